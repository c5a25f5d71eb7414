"""Attention within a window, against torch's own under a mask."""

import pytest
import torch
from torch.nn import functional

from arbcli.device import deterministic
from arbcli.model.parts.window import attend_in_window


def masked(q, k, v, window):
    place = torch.arange(q.shape[2], device=q.device)
    distance = place[:, None] - place
    mask = (distance >= 0) & (distance < window)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def compare(length, window, width, dtype, device, bound):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, length, width)
    q, k, v = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)
    )
    twins = [part.detach().double().requires_grad_() for part in (q, k, v)]
    grad = torch.randn(shape, generator=generator).to(device)
    y, wanted = attend_in_window(q, k, v, window), masked(*twins, window)
    y.backward(grad.to(dtype))
    wanted.backward(grad.to(dtype).double())
    pairs = [
        (y, wanted),
        *((part.grad, twin.grad) for part, twin in zip((q, k, v), twins, strict=True)),
    ]
    for got, expected in pairs:  # with a window of 1 the gradients of q and k are 0
        size = expected.norm() or grad.norm()
        assert (got.double() - expected).norm() <= bound * size


@pytest.mark.parametrize(
    ("length", "window"), [(2, 1), (7, 3), (12, 4), (33, 32), (50, 7)], ids=str
)
def test_pieces_are_what_a_mask_gives(length, window, device):
    compare(length, window, 6, torch.float32, device, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "window"), [(7, 3), (130, 128), (1000, 64)], ids=str)
def test_flash_attention_is_what_a_mask_gives(length, window, device):
    compare(length, window, 64, torch.bfloat16, device, 0.01)


@pytest.mark.gpu
def test_flash_attention_gives_the_same_gradients_twice(device):
    q, k, v = (torch.randn(2, 4, 512, 64, device=device).bfloat16().requires_grad_() for _ in "qkv")
    grads = []
    with deterministic():
        for _ in range(2):
            y = attend_in_window(q, k, v, 64)
            grads.append(torch.autograd.grad(y.float().square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
