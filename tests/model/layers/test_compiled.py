"""Blocks in `torch.compile(fullgraph=True)`: how often they are compiled, and what they compute."""

import copy
from dataclasses import replace

import pytest
import torch
from cells import Cell
from states import assert_same
from torch._dynamo.testing import CompileCounterWithBackend

from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.build import build_model
from arbcli.model.layers.compiled import find
from arbcli.model.layers.dropout import Dropout, Mask
from arbcli.model.stack import Block
from arbcli.model.updater import Updater
from arbcli.training.compiled_baseline import compile_baseline

SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8}


class Trained:
    """A model whose weights step, packed, or have gradients, floats."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.model = build_model(config, torch.float32).to(self.device)
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
            self.model.finish_step()
        return [loss.detach() for loss in losses.values()]

    def changed(self) -> dict[str, torch.Tensor]:
        """Give what steps change: packed weights, counters; or the gradients of floats."""
        grads = {name: part.grad for name, part in self.model.named_parameters()}
        return grads or {name: part.clone() for name, part in self.model.named_buffers()}


def test_blocks_of_a_kind_and_width_are_compiled_once_with_the_same_bits(device):
    config = Cell("none", "mlp", 1, "plain").model()
    config = replace(config, stages=(replace(config.main, blocks=2 * config.main.blocks),))
    plain, compiled = Trained(config, device), Trained(config, device)
    before, counter = compiled.changed(), compiled.compile()
    for step in range(2):
        assert compiled.step(step) == plain.step(step)
    assert counter.frame_count == 1
    assert_same(compiled.changed(), plain.changed())
    assert any(not torch.equal(part, before[name]) for name, part in plain.changed().items())
    assert all(tensor._awaited == 0 for tensor in compiled.updater.tensors)


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


def dense(**given) -> Trained:
    return Trained(preset("tiny", **SHAPE | given))


def test_compiled_baseline_has_the_same_masks_of_dropout():
    plain, compiled = (dense(weights="float", layers=1).model for _ in range(2))
    torch._dynamo.reset()
    compile_baseline(compiled, backend="aot_eager")
    keys = torch.arange(5, dtype=torch.int32)
    masks = Dropout(keys[:2], 0.25, keys[2:4], 0.2, Mask(keys[4], 0.1))
    ids = torch.randint(256, (2, 2, 8), generator=torch.Generator().manual_seed(1))
    grads = []
    for model in (plain, compiled):
        with deterministic():
            model.losses(*ids, dropout=masks)["text"].backward()
        grads.append({name: part.grad for name, part in model.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-7)


def test_compiled_block_steps_though_its_input_has_no_gradient():
    plain, compiled = dense(), dense()
    compiled.compile()
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    for trained in (plain, compiled):
        trained.updater.begin(0, 0.1)
        trained.blocks[0](x).x.square().sum().backward()
    assert_same(compiled.changed(), plain.changed())
    assert not torch.equal(
        compiled.blocks[0].mlp.output.weight.trits, dense().blocks[0].mlp.output.weight.trits
    )


def test_module_is_found_by_its_tensor_and_so_is_its_copy():
    block = dense().blocks[0]
    twin = copy.deepcopy(block)
    for part in (block.mlp.output.weight, block.mlp.sub_norm, twin.mlp.output.weight):
        assert find(part.key_tensor) is part
    with pytest.raises(LookupError, match="a copy of it"):
        find(block.mlp.output.weight.trits.clone())
