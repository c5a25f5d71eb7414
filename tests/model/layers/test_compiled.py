"""Blocks in `torch.compile(fullgraph=True)`: how often they are compiled, and what they compute."""

import copy
from dataclasses import replace

import pytest
import torch
from cells import CELLS, FEW, PLAIN, Cell
from marks import mostly_slow
from torch._dynamo.testing import CompileCounterWithBackend

from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.build import build_model
from arbcli.model.layers.compiled import find
from arbcli.model.stack import Block
from arbcli.model.updater import Updater
from arbcli.training.compiled_twin import compile_twin

SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8}


class Trained:
    """A model whose weights step, packed, or have gradients, floats."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.model = build_model(config, torch.float32).to(self.device)
        self.model.initialise(0)
        self.updater = None
        if config.weights == "ternary":
            self.updater = Updater(self.model.weights().values(), 0, torch.float32)
            for tensor in self.updater.tensors:
                tensor.sink = self.updater

    @property
    def blocks(self) -> list[Block]:
        return [block for stack in self.model.stacks() for block in stack]

    def compile(
        self, backend: str = "aot_eager", dynamic: bool | None = False
    ) -> CompileCounterWithBackend:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        for block in self.blocks:
            block.compile(backend=counter, fullgraph=True, dynamic=dynamic)
        return counter

    def step(self, step: int) -> list[torch.Tensor]:
        """Step once, like a trainer by deterministic algorithms: losses."""
        generator = torch.Generator().manual_seed(step)
        shape = 2, 2, self.model.config.ctx
        ids = torch.randint(256, shape, generator=generator).to(self.device)
        if self.updater:
            self.updater.begin(step, 0.1)
        with deterministic():
            losses = self.model.losses(*ids)
            sum(losses.values()).backward()
            self.model.after_step()
        return [loss.detach() for loss in losses.values()]

    def changed(self) -> dict[str, torch.Tensor]:
        """Give what steps change: packed weights, counters; or the gradients of floats."""
        grads = {name: part.grad for name, part in self.model.named_parameters()}
        return grads or {name: part.clone() for name, part in self.model.named_buffers()}


def share_of_others(some: dict, others: dict) -> float:
    """Give the share of the numbers of some tensors that others have not."""
    assert some.keys() == others.keys()
    unlike = sum(int((some[name] != others[name]).sum()) for name in some)
    return unlike / sum(part.numel() for part in some.values())


def assert_equal(some: dict, others: dict) -> None:
    assert some.keys() == others.keys()
    assert not [name for name in some if not torch.equal(some[name], others[name])]


def deep(cell: Cell, weights: str) -> ModelConfig:
    """Assemble every list of blocks of the model of a cell twice, one after the other."""
    names = ("blocks", "before", "after")
    config = replace(cell.model(), weights=weights)
    stages = [
        replace(stage, **{name: 2 * getattr(stage, name) for name in names})
        for stage in config.stages
    ]
    return replace(config, stages=tuple(stages))


def kinds(config: ModelConfig) -> int:
    """Count the kinds of blocks by what they are made of, and their widths."""
    lists = [
        (stage, blocks)
        for stage in config.stages
        for blocks in (stage.before, stage.blocks, stage.after)
    ]
    return len({(block, stage.dim) for stage, blocks in lists for block in blocks})


def every_cell() -> list:
    """Make parameters of cells and weights, of which one is quick: all are many operations."""
    found = []
    plain = [cell for cell in FEW if cell[2:] == (1, "plain")]
    for cell in CELLS:
        for weights in ("ternary", "float"):
            quick = (cell, weights) == (plain[-1], "ternary")
            name = "-".join(map(str, (*cell, weights)))
            marks = () if quick else pytest.mark.slow
            found.append(pytest.param(cell, weights, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("cell", "weights"), every_cell())
def test_blocks_of_a_kind_and_width_are_compiled_once_with_the_same_bits(cell, weights, device):
    config = deep(cell, weights)
    plain, compiled = Trained(config, device), Trained(config, device)
    before, counter = compiled.changed(), compiled.compile()
    # between kernels a compiler differentiates plain operations, and adds their gradients up in an
    # order of its own, so that the integers of the first step may round otherwise
    exact = cell.mixer not in PLAIN
    for step in range(2):
        got, wanted = compiled.step(step), plain.step(step)
        if exact or step == 0:
            assert got == wanted
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=0)
    assert counter.frame_count == kinds(config)
    if exact and (device.type == "cpu" or weights == "float"):
        assert_equal(compiled.changed(), plain.changed())
    elif exact:  # on a GPU integers of one matrix rounded otherwise in 4 of 68 cells
        assert share_of_others(compiled.changed(), plain.changed()) < 0.01
    assert any(
        before[name] is None or not torch.equal(part, before[name])
        for name, part in plain.changed().items()
    )
    if weights == "ternary":
        assert all(tensor._awaited == 0 for tensor in compiled.updater.tensors)


SOME = [Cell("mamba", "experts", 4, "plain"), Cell("compressed", "mlp", 1, "plain")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "weights"),
    [
        (Cell("mamba", "mlp", 1, "plain"), "float"),
        (Cell("compressed", "mlp", 1, "plain"), "ternary"),
    ],
    ids=str,
)
def test_inductor_computes_the_same(cell, weights, device):
    config = replace(cell.model(), weights=weights)
    plain, compiled = Trained(config, device), Trained(config, device)
    compiled.compile("inductor")
    torch.testing.assert_close(compiled.step(0), plain.step(0), rtol=1e-5, atol=1e-6)
    if weights == "float":
        torch.testing.assert_close(compiled.changed(), plain.changed(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("mixer", ["mamba", "compressed"])
def test_other_lengths_and_evaluations_compute_the_same(mixer, dynamic, device):
    config = Cell(mixer, "mlp", 1, "plain").model()
    plain, compiled = Trained(config, device), Trained(config, device)
    counter = compiled.compile(dynamic=dynamic)
    for length in (9, 5):
        ids = torch.randint(256, (3, length), generator=torch.Generator().manual_seed(length))
        ids = ids.to(device)
        losses = []
        for trained in (plain, compiled):
            trained.updater.begin(length, 0.1)
            losses.append(trained.model.loss(ids, ids))
            losses[-1].backward()
        assert torch.equal(*losses)
        with torch.no_grad():
            assert torch.equal(plain.model(ids), compiled.model(ids))
    if dynamic is False:
        assert counter.frame_count == 4  # both lengths, with and without gradients
    assert_equal(compiled.changed(), plain.changed())


@pytest.mark.slow
@pytest.mark.parametrize("cell", SOME, ids=str)
def test_twin_of_any_parts_is_compiled(cell, device):
    config = replace(cell.model(), weights="float")
    plain, compiled = Trained(config, device), Trained(config, device)
    torch._dynamo.reset()
    compile_twin(compiled.model, backend="aot_eager")
    assert compiled.step(0) == plain.step(0)
    assert_equal(compiled.changed(), plain.changed())


@pytest.mark.slow
def test_twin_with_memories_is_compiled_by_blocks(small_graph, device):
    """Gradients of what the router reads besides the blocks are added up in another order."""
    given = {key: value for key, value in small_graph.items() if key != "batch"}
    config = preset(given.pop("preset"), **given, memgram=True, weights="float")
    plain, compiled = Trained(config, device), Trained(config, device)
    torch._dynamo.reset()
    compile_twin(compiled.model, backend="aot_eager")
    for step in range(2):
        assert compiled.step(step) == plain.step(step)
    torch.testing.assert_close(compiled.changed(), plain.changed(), rtol=1e-4, atol=1e-6)
    assert plain.model.memgram.strength.any()
    assert_equal(dict(compiled.model.named_buffers()), dict(plain.model.named_buffers()))


def dense(**given) -> Trained:
    return Trained(preset("tiny", **SHAPE, **given))


@pytest.mark.parametrize("sub_norms", mostly_slow([True, False], bool))
def test_compiled_block_steps_though_its_input_has_no_gradient(sub_norms):
    plain, compiled = dense(sub_norms=sub_norms), dense(sub_norms=sub_norms)
    compiled.compile()
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    for trained in (plain, compiled):
        trained.updater.begin(0, 0.1)
        trained.blocks[0](x).x.square().sum().backward()
    assert_equal(compiled.changed(), plain.changed())
    assert not torch.equal(
        compiled.blocks[0].mlp.output.weight.trits, dense().blocks[0].mlp.output.weight.trits
    )


def test_block_of_a_user_is_compiled_once_for_all():
    plain, compiled = dense(), dense()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    blocks = [torch.compile(block, backend=counter, fullgraph=True) for block in compiled.blocks]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 32, generator=generator).requires_grad_()
    found = []
    for run in (plain.blocks, blocks):
        y = x
        for block in run:
            y = block(y).x
        found.append(y.detach())
    assert torch.equal(*found)
    assert counter.frame_count == 1


def test_module_is_found_by_its_tensor_and_so_is_its_copy():
    block = dense().blocks[0]
    twin = copy.deepcopy(block)
    for part in (block.mlp.output.weight, block.mlp.sub_norm, twin.mlp.output.weight):
        assert find(part.key_tensor) is part
    with pytest.raises(LookupError, match="a copy of it"):
        find(block.mlp.output.weight.trits.clone())


def test_modules_that_exchange_trits_are_told_apart():
    first, second = (block.mlp.output.weight for block in dense().blocks)
    assert find(first.trits) is first
    place = first.trits
    first.trits, second.trits = second.trits, place
    assert find(place) is second
    assert find(first.trits) is first


def test_gate_without_a_norm_is_found_as_any_other():
    gate = dense(sub_norms=False).blocks[0].mlp.sub_norm
    found = find(gate.key_tensor)
    assert type(found) is type(gate)
    assert found.weight is None
