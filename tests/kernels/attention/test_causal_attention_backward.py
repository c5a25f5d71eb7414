"""Attention's gradient: what the cases of its spec do not say."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from arbcli.kernels.attention.causal_attention_backward import (
    causal_attention_backward,
    flash_attention_backward,
)
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.verify.kernels.attention.causal_attention_backward import (
    random_attention,
    rounded_causal_gradients,
)


def random(*shape, dtype=torch.float32, device="cpu", group=1):
    inputs = random_attention(torch.Generator().manual_seed(0), shape, dtype, group)
    return [part.to(device) for part in inputs]


def error(grads, wanted) -> float:
    pairs = zip(grads, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "group"),
    [((2, 12, 1024, 64), 1), ((1, 16, 2048, 128), 4), ((3, 2, 321, 64), 1), ((2, 6, 128, 64), 3)],
    ids=str,
)
def test_gradients_are_those_of_flash_attention_and_the_same_every_time(shape, group, device):
    inputs = random(*shape, dtype=torch.bfloat16, device=device, group=group)
    grads = causal_attention_backward(*inputs)
    assert error(grads, rounded_causal_gradients(*inputs)) < 2.5e-3  # both are rounded at the end
    # the library's gradients of a group are rounded before their sum too: a third error
    limit = 2.5e-3 if group == 1 else 2.5e-3 * 1.5**0.5
    with deterministic():
        assert error(grads, flash_attention_backward(*inputs)) < limit
    for _ in range(5):
        again = causal_attention_backward(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.gpu
def test_gradient_that_is_the_same_for_all_heads_is_read(device):
    grad, *rest = random(2, 3, 128, 64, dtype=torch.bfloat16, device=device)
    same = grad[:, :1].expand(-1, 3, -1, -1)
    gradients = [causal_attention_backward(g, *rest) for g in (same, same.contiguous())]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.gpu
def test_gradients_are_found_in_a_thread_that_has_not_used_the_gpu(device):
    inputs = random(1, 2, 128, 64, dtype=torch.bfloat16, device=device)
    wanted = causal_attention_backward(*inputs)
    with ThreadPoolExecutor(1) as pool:
        gradients = pool.submit(causal_attention_backward, *inputs).result()
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 2, 18, 16), torch.float32),
        pytest.param((16, 4, 64, 64), torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((32, 6, 256, 64), torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((3, 2, 200, 64), torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_programs_in_one_launch_give_the_bits_of_two_launches(shape, dtype, device, monkeypatch):
    inputs = random(*shape, dtype=dtype, device=device)
    gradients = []
    for most in (100, 0):
        monkeypatch.setattr(f"{causal_attention_backward.triton.__module__}.MAX_TOGETHER", most)
        with use_backend("triton" if device.type == "cuda" else "interpreter"):
            gradients.append(causal_attention_backward.triton(*inputs))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
