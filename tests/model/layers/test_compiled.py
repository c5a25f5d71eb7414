import copy

import pytest
import torch
from marks import mostly_slow
from torch._dynamo.testing import CompileCounterWithBackend

from arbcli.config.presets import preset
from arbcli.model.layers import linear
from arbcli.model.layers.compiled import find
from arbcli.model.packed import TernaryTensor
from arbcli.model.stack import Block
from arbcli.train.updater import Updater

SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8}


class Stack:
    """Two blocks with an updater, whose weights step in the backward."""

    def __init__(self, **given) -> None:
        config = preset("tiny", **SHAPE, **given)
        self.blocks = [Block(block, config.site()) for block in config.main.blocks]
        self.tensors = [
            part
            for block in self.blocks
            for part in block.modules()
            if isinstance(part, TernaryTensor)
        ]
        for index, tensor in enumerate(self.tensors):
            tensor.initialise(0, index)
        self.updater = Updater(self.tensors, 0, torch.float32)
        for tensor in self.updater.tensors:
            tensor.sink = self.updater
        self.calls = self.blocks

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(step)
        x = torch.randn(2, 8, 32, requires_grad=True)
        y = x
        self.updater.begin(step, 1.0)
        for block in self.calls:
            y = block(y).x
        y.square().sum().backward()
        return y.detach(), x.grad

    def compile(self) -> CompileCounterWithBackend:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        self.calls = [
            torch.compile(block, backend=counter, fullgraph=True) for block in self.blocks
        ]
        return counter

    def state(self) -> list[torch.Tensor]:
        return [buffer.clone() for tensor in self.tensors for buffer in tensor.buffers()]


def equal(some, others) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("sub_norms", mostly_slow([True, False], bool))
def test_compiler_takes_a_block_whole_once_for_all_of_them(sub_norms):
    plain, compiled = Stack(sub_norms=sub_norms), Stack(sub_norms=sub_norms)
    before, counter = plain.state(), compiled.compile()
    for step in range(2):
        assert equal(compiled.step(step), plain.step(step))
    assert counter.frame_count == 1
    assert equal(compiled.state(), plain.state())
    assert not equal(before, plain.state())
    with torch.no_grad():
        x = torch.randn(2, 8, 32)
        assert torch.equal(compiled.calls[0](x).x, plain.blocks[0](x).x)
    assert all(tensor._awaited == 0 for tensor in compiled.updater.tensors)


def test_compiled_layer_refuses_to_lose_its_update():
    stack = Stack()
    stack.compile()
    with pytest.raises(Exception, match="only if its input requires a gradient"):
        stack.calls[0](torch.randn(2, 8, 32))


def test_layer_is_found_by_its_trits_and_so_is_its_copy():
    (block,) = Stack().blocks[:1]
    twin = copy.deepcopy(block)
    for part in (block.mlp.output, block.mlp.sub_norm, twin.mlp.output):
        assert find(part.weight.trits) is part
    with pytest.raises(LookupError, match="a copy of them"):
        find(block.mlp.output.weight.trits.clone())


def test_layer_whose_trits_moved_is_not_taken_for_the_one_that_has_their_place():
    first, second = (block.mlp.output for block in Stack().blocks)
    assert find(first.weight.trits) is first
    place = first.weight.trits
    first.weight.trits, second.weight.trits = second.weight.trits, place
    assert find(place) is second
    assert find(first.weight.trits) is first


@pytest.mark.parametrize("sub_norms", [True, False])
def test_what_comes_before_a_compiled_layer_is_found_again(sub_norms):
    """A gate without a norm has no trits to be found by, and is made anew."""
    mlp = Stack(sub_norms=sub_norms).blocks[0].mlp
    trits = mlp.sub_norm.weight.trits if sub_norms else None
    found = linear._before(trits, True)
    assert type(found) is type(mlp.sub_norm)
    assert (found is mlp.sub_norm) == sub_norms
    assert (found.weight is None) != sub_norms
    assert linear._before(None, False) is None
