"""A Mamba-2 block: where its numbers begin, what it copies, and its running sums."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.model import BlockConfig, StageConfig
from arbcli.families.mamba import mixer as module
from arbcli.families.mamba.config import MambaConfig
from arbcli.families.mamba.mixer import mamba_values, running_sum
from arbcli.model.packed import TernaryTensor
from arbcli.model.stack import Block

CONFIG = MambaConfig(heads=2, states=7)
SPEC = LayerSpec(dim=20, depth=1, ctx=64)


def mamba_block(spec=SPEC) -> Block:
    return Block(BlockConfig(mixer=CONFIG), StageConfig(dim=spec.dim), spec)


def block(device) -> tuple[Block, dict[str, TernaryTensor]]:
    with torch.device(device):
        part = mamba_block()
    tensors = {name: t for name, t in part.named_modules() if isinstance(t, TernaryTensor)}
    for index, tensor in enumerate(tensors.values()):
        tensor.initialise(0, index)
    return part, tensors


def normal(*shape, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


class Copies(TorchDispatchMode):
    """List the operations that copy a tensor of some size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.operations = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name in ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::cat"):
            self.operations += [name] * (result.numel() >= self.numel)
        return result


def test_forward_copies_only_the_gate(monkeypatch):
    """Kernels that are stood in for make no copies, whatever plain torch does for them."""
    part, _ = block("cpu")
    x = normal(2, 17, 20, device="cpu").bfloat16()
    monkeypatch.setattr(module, "_convolve", lambda x, taps: torch.zeros_like(x))
    monkeypatch.setattr(module, "_scan", lambda q, k, v, g: v.new_zeros(v.shape, dtype=torch.float))
    with Copies(2 * 17 * 40) as copies:
        mixed = part.mamba(x, part.norm).added
    assert mixed.dtype == torch.bfloat16
    assert copies.operations == ["aten::copy_"]


def test_backward_casts_the_gradients_of_b_and_c_once_for_all_heads(monkeypatch):
    """Not those of each head, of (B, T, H, S)."""
    c, b = (normal(2, 17, 96, device="cpu", seed=n).bfloat16().requires_grad_() for n in (0, 1))
    v = normal(2, 17, 3, 5, device="cpu").bfloat16().requires_grad_()
    y = module._scan(c, b, v, -normal(2, 17, 3, device="cpu").abs())
    of_head = normal(2, 17, 3, 96, device="cpu", seed=2)

    def stand_in(q, k, v, g, reverse=False):
        return of_head if v.shape[-1] == 96 else v.float()

    monkeypatch.setattr(module, "decay_scan", stand_in)
    with Copies(of_head.numel()) as copies:
        grads = torch.autograd.grad(y, (c, b), torch.ones_like(y))
    assert not copies.operations
    assert all(torch.equal(grad, of_head.sum(dim=2).bfloat16()) for grad in grads)


def test_running_sums_run_both_ways(device):
    x = normal(2, 150, 3, device=device).mul(4).round()  # no order of additions rounds a sum
    assert torch.equal(running_sum(x), x.cumsum(1))
    assert torch.equal(running_sum(x, reverse=True), x.flip(1).cumsum(1).flip(1))


@pytest.mark.parametrize("heads", [1, 2, 16])
def test_heads_begin_with_different_steps_and_rates(heads):
    rates, biases = mamba_values(heads)
    assert len(set(rates)) == len(set(biases)) == heads
    assert 0 not in (*rates, *biases)
    steps = torch.nn.functional.softplus(torch.tensor(biases))
    assert steps[0].item() == pytest.approx(1e-3)
    if heads > 1:
        assert steps[-1].item() == pytest.approx(0.1)
        assert rates[-1] == pytest.approx(math.log(16))
