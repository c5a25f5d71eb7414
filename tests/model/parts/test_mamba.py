"""A Mamba-2 block, its gradients against float64, and its state against a whole text."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from arbcli.config.model import BlockConfig, StageConfig
from arbcli.config.parts import MambaConfig
from arbcli.config.site import Site
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.baselines import FloatWeight
from arbcli.model.packed import TernaryTensor
from arbcli.model.parts import mamba as module
from arbcli.model.parts.mamba import mamba_values, running_sum
from arbcli.model.stack import Block
from arbcli.model.state import Clock, KeptTexts
from arbcli.verify.parts.base import Reading, norm, under
from arbcli.verify.parts.mamba import mamba
from arbcli.verify.update_reference import reference_weight

CONFIG = MambaConfig(heads=2, states=7)
SITE = Site(dim=20, depth=1, ctx=64)
KERNELS = "triton" if torch.cuda.is_available() else "interpreter"


def mamba_block(site=SITE) -> Block:
    return Block(BlockConfig(mixer=CONFIG), StageConfig(dim=site.dim), site)


def reference(x, weights):
    """Compute what the block gives for each text of (B, T, D)."""
    names = {name.removesuffix(".weight"): w for name, w in weights.items()}
    reading = Reading(config=CONFIG, site=SITE)
    own = under(names, "mamba")
    return torch.stack([t + mamba(own, t, norm(t, names["norm"]), reading) for t in x])


def block(device) -> tuple[Block, dict[str, TernaryTensor]]:
    with torch.device(device):
        part = mamba_block()
    tensors = {name: t for name, t in part.named_modules() if isinstance(t, TernaryTensor)}
    for index, tensor in enumerate(tensors.values()):
        tensor.initialise(0, index)
    return part, tensors


def normal(*shape, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("backend", ["torch", pytest.param(KERNELS, marks=pytest.mark.slow)])
def test_block_and_its_gradients_equal_the_reference(backend, device):
    part, tensors = block(device)
    handed = {}
    for name, tensor in tensors.items():
        tensor.sink = lambda _, grad, name=name: handed.update({name: grad})
    x, grad_y = normal(2, 17, 20, device=device), normal(2, 17, 20, device=device, seed=1)
    weights = {name: reference_weight(tensor) for name, tensor in tensors.items()}
    leaves = {n: w.requires_grad_() for n, w in weights.items() if not tensors[n].frozen}
    ours, twin = x.clone().requires_grad_(), x.double().requires_grad_()
    with use_backend(backend):
        y = part(ours).x
        y.backward(grad_y)
    wanted = reference(twin, weights)
    wanted.backward(grad_y.double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), twin.grad, rtol=1e-4, atol=1e-5)
    assert handed.keys() == leaves.keys()
    for name, grad in handed.items():
        error = (grad - leaves[name].grad).norm() / leaves[name].grad.norm()
        # decays' gradients are small differences of large sums
        assert error < (1e-3 if grad.shape[1] == 1 else 1e-5), name


class Copies(TorchDispatchMode):
    """List the operations that copy a tensor of some size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name in ("aten::_to_copy", "aten::clone", "aten::copy_", "aten::cat"):
            self.found += [name] * (result.numel() >= self.numel)
        return result


def test_forward_copies_nothing_but_what_gates(monkeypatch):
    """Kernels that are stood in for make no copies, whatever plain torch does for them."""
    part, _ = block("cpu")
    x = normal(2, 17, 20, device="cpu").bfloat16()
    monkeypatch.setattr(module, "_convolve", lambda x, taps: torch.zeros_like(x))
    monkeypatch.setattr(module, "_scan", lambda q, k, v, g: v.new_zeros(v.shape, dtype=torch.float))
    with Copies(2 * 17 * 40) as copies:
        mixed = part.mamba(x, part.norm).added
    assert mixed.dtype == torch.bfloat16
    assert copies.found == ["aten::copy_"]


def test_float_twin_and_its_gradients_equal_the_reference():
    part = mamba_block(replace(SITE, weights="float"))
    weights = {name: p for name, p in part.named_modules() if isinstance(p, FloatWeight)}
    for index, weight in enumerate(weights.values()):
        weight.initialise(0, index)
    assert weights["mamba.taps.weight"].latent.std().item() == pytest.approx(0.5, rel=0.2)
    x, grad_y = normal(2, 17, 20, device="cpu"), normal(2, 17, 20, device="cpu", seed=1)
    leaves = {n: w.latent.detach().double().requires_grad_() for n, w in weights.items()}
    ones = {
        name: torch.ones(1, size) for name, size in (("norm.weight", 20), ("mamba.gate.weight", 40))
    }
    y = part(x).x
    y.backward(grad_y)
    wanted = reference(x.double(), leaves | ones)
    wanted.backward(grad_y.double())
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    for name, weight in weights.items():
        error = (weight.latent.grad - leaves[name].grad).norm() / leaves[name].grad.norm()
        assert error < (1e-3 if weight.latent.shape[1] == 1 else 1e-5), name


@torch.no_grad()
def test_text_in_pieces_gives_what_the_whole_gives(device):
    part, _ = block(device)
    x = normal(1, 23, 20, device=device)
    clock = Clock(64, KeptTexts(23, torch.float32, torch.device(device)))
    past = part.new_state(clock)
    assert sum(t.nbytes for t in past.tensors()) == 4 * (past.state.numel() + past.ring.numel())
    whole = part(x).x
    for halved in (False, True):
        found = []
        for piece in x.split([4, 1, 1, 9, 2, 6], dim=1):
            # half of the stream may still be what the block before adds to it
            before = piece / 2, piece / 2
            with clock.reading(piece.shape[1]):
                flow = part(*(before if halved else (piece, None)), state=past, whole=False)
            found.append(flow.whole())
        torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=1e-4, atol=1e-5)
        assert clock.position == 23
        clock.position.zero_()
        past.reset()


def test_running_sums_run_both_ways(device):
    x = normal(2, 150, 3, device=device)
    torch.testing.assert_close(running_sum(x), x.cumsum(1), rtol=1e-5, atol=1e-5)
    wanted = x.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(running_sum(x, reverse=True), wanted, rtol=1e-5, atol=1e-5)


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
