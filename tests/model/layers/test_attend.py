"""Which attention goes forward and back on which GPU, and what its gradients are laid out like."""

from functools import partial

import pytest
import torch
from operations import NotedOperations
from torch.nn import functional

from arbcli.inspect.trace import no_memory
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.backend import compile_for, use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.layers.attend import HOPPER, SHORT, attend_causally, attend_rotated
from arbcli.model.layers.rotary import rotary_norm, table_for

APART = ["_queries_kernel", "_keys_kernel"]
"""Kernels of the backward; in short windows of narrow heads, `_both_kernel` alone."""
WINDOWS = [(64, 128, ["_both_kernel"]), (64, 320, APART), (128, 128, APART)]
"""Width of a head, length of a window, and the kernels of its backward."""
FLASH = "_scaled_dot_product_flash_attention_backward"


def one_by_one(qkv):
    return attend_causally(*rotary_norm(qkv))


def attend_at_once(qkv):
    return attend_rotated(qkv, table_for(qkv))


def gone_back(backend="triton", capability=HOPPER, width=64, length=128, attend=one_by_one):
    """Go forward and back as on a GPU; list the operations and the kernels of the backward."""
    operations, launched, device = [], [], torch.device("cuda")
    with no_memory(device), compile_for(capability), use_backend(backend):
        qkv = torch.empty(2, length, 3, 4, width, dtype=torch.bfloat16, device=device)
        qkv.requires_grad_()
        y = attend(qkv * 1).transpose(1, 2).reshape(2, length, -1)
        grad = torch.empty_like(y)
        with (
            replaced_launches(lambda kernel, *_, **__: launched.append(kernel.fn.__name__)),
            NotedOperations(lambda name, _: operations.append(name)),
        ):
            y.backward(grad)
    return operations, launched


@pytest.mark.parametrize(
    ("attend", "rotation"), [(one_by_one, ["_rotary_norm_backward_kernel"]), (attend_at_once, [])]
)
@pytest.mark.parametrize(("width", "length", "ours"), WINDOWS)
def test_gradients_go_through_our_kernels_without_a_copy(width, length, ours, attend, rotation):
    operations, launched = gone_back(width=width, length=length, attend=attend)
    assert launched == ours + rotation
    assert not {FLASH, "clone", "copy_", "_to_copy", "stack", "cat"} & {*operations}


@pytest.mark.parametrize("attend", [one_by_one, attend_at_once])
@pytest.mark.parametrize(
    "other", [{"backend": "torch"}, {"capability": (8, 0)}, {"width": 32}, {"length": 127}], ids=str
)
def test_gradients_of_other_gpus_widths_lengths_and_backends_are_those_of_torch(other, attend):
    operations, launched = gone_back(**other, attend=attend)
    assert FLASH in operations
    assert not {*APART, "_both_kernel"} & {*launched}


def attended(q, k, v, grad):
    with deterministic():
        y = attend_causally(q, k, v)
        # a graph that is kept gives the same again
        twice = [torch.autograd.grad(y, (q, k, v), grad, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))
    return [y.detach(), *twice[0]]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_captured_and_eager_attention_have_the_same_bits(width, device):
    if torch.cuda.get_device_capability(device) != HOPPER:
        pytest.skip("torch's own attention, which others test")
    torch.manual_seed(0)
    qkv = torch.randn(2, 256, 3, 4, width, device=device).bfloat16()
    grad = torch.randn(2, 256, 4, width, device=device).bfloat16().transpose(1, 2)
    parts = [part.detach().requires_grad_() for part in qkv.transpose(1, 3).unbind(2)]
    eager = attended(*parts, grad)
    twins = [part.detach().double().requires_grad_() for part in parts]
    scores = (twins[0] @ twins[1].mT * width**-0.5).masked_fill(
        torch.ones(256, 256, dtype=torch.bool, device=device).triu(1), -torch.inf
    )
    y = scores.softmax(-1) @ twins[2]
    wanted = [y.detach(), *torch.autograd.grad(y, twins, grad.double())]
    for got, expected in zip(eager, wanted, strict=True):
        assert (got.double() - expected).norm() < 6e-3 * expected.norm()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attended(*parts, grad)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), deterministic():
        y = attend_causally(*parts)
        captured = [y, *torch.autograd.grad(y, parts, grad)]
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(eager, captured, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_gradient_at_once_is_that_of_both_parts(width, device):
    if torch.cuda.get_device_capability(device) != HOPPER:
        pytest.skip("other GPUs compute one after the other")
    torch.manual_seed(0)
    qkv = torch.randn(2, 256, 3, 4, width, device=device).bfloat16().requires_grad_()
    results = []
    for attended in (one_by_one, attend_at_once, attend_at_once):
        y = attended(qkv * 1)
        results.append((y, *torch.autograd.grad(y, qkv, y.detach())))
    (y, grad), (same, near), again = results
    assert torch.equal(y, same)
    assert (near - grad).float().norm() < 4e-3 * grad.float().norm()  # rounded once less
    assert all(torch.equal(a, b) for a, b in zip((same, near), again, strict=True))


@pytest.mark.parametrize(("length", "dtype"), [(5, torch.float32), (SHORT + 1, torch.bfloat16)])
def test_gradients_of_short_sequences_on_a_cpu_are_computed_in_float32(length, dtype):
    def run(inputs, attend):
        leaves = [part.detach().requires_grad_() for part in inputs]
        y = attend(*leaves)
        return y.detach(), torch.autograd.grad(y, leaves, grad_y.to(y.dtype))

    generator = torch.Generator().manual_seed(0)
    grad_y, *inputs = torch.randn(4, 2, 3, length, 16, generator=generator).bfloat16()
    plain = partial(functional.scaled_dot_product_attention, is_causal=True)
    y, grads = run(inputs, attend_causally)
    wanted, exact = run([part.to(dtype) for part in inputs], plain)
    # of torch itself for longer ones; others are rounded as probabilities and as results
    assert (y - wanted).norm() <= (2**-8 if dtype == torch.float32 else 0) * wanted.norm()
    for grad, other in zip(grads, exact, strict=True):
        if dtype == torch.bfloat16:  # of longer ones by torch
            assert torch.equal(grad, other)
        else:
            error = (grad.double() - other.double()).norm() / other.double().norm()
            assert error < 5e-3
