"""Norms and their gradients: what the cases of their specs do not say."""

import pytest
import torch

from arbcli.kernels.norm.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def randn(*shape, device, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@each_backend
def test_rms_norm_gradient_takes_an_expanded_grad_y(backend, device):
    weight, x = randn(40, device=device, seed=0), randn(3, 40, device=device)
    one = torch.ones((), device=device)
    with use_backend(backend):
        expanded = rms_norm_backward(one.expand(3, 40), x, weight, 1e-6)
        whole = rms_norm_backward(torch.ones_like(x), x, weight, 1e-6)
    assert torch.equal(expanded[0], whole[0])


# what can differ is how a compiler fuses products, so wide rows are for a GPU
@pytest.mark.parametrize("width", [165, 2100, 8229] if torch.cuda.is_available() else [165])
@each_backend
def test_no_gains_give_the_bits_of_gains_of_1(backend, width, device):
    x, grad_y = randn(2, 9 if width == 165 else 1, width, device=device)
    runs = (
        lambda weight: [rms_norm(x, weight, 1e-6)],
        lambda weight: add_rms_norm(x, grad_y, weight, 1e-6),
        lambda weight: rms_norm_backward(grad_y, x, weight, 1e-6),
    )
    with use_backend(backend):
        for run in runs:
            for got, expected in zip(run(None), run(torch.ones(width, device=device)), strict=True):
                assert torch.equal(got, expected)
