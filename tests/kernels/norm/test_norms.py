"""Norms and their gradients: what the cases of their specs do not say."""

from functools import partial

import pytest
import torch

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.norm import rms_norm as module
from arbcli.kernels.norm.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward
from arbcli.kernels.norm.norm_e4m3 import add_rms_norm_e4m3, gated_rms_norm_e4m3, rms_norm_e4m3
from arbcli.kernels.norm.rms_norm import (
    add_rms_norm,
    rms_norm,
    rms_norm_backward,
    tiling,
)
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.compare import as_tuple
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.kernels.codec.packing import pack_trits_reference
from arbcli.verify.kernels.matmul.quantise_rows import quantise_rows_verification

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def relative_error(result, reference):
    assert result.shape == reference.shape
    if not reference.numel():
        return 0.0
    return float((result.double() - reference).norm() / reference.norm())


def norm_weight(width, device):
    generator = torch.Generator().manual_seed(0)
    return random_packed(1, width, 32, generator, spread=2).to(device)


def ones(width, device):
    trits = pack_trits_reference(torch.ones(1, width, dtype=torch.int8))
    scales = torch.zeros(1, -(-width // 32), dtype=torch.int8)
    return Packed(trits, scales, scales, width, 32).to(device)


def randn(*shape, device, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@each_backend
def test_rms_norm_gradient_takes_an_expanded_grad_y(backend, device):
    weight = norm_weight(40, device)
    x = randn(3, 40, device=device)
    one = torch.ones((), device=device)
    with use_backend(backend):
        expanded = rms_norm_backward(one.expand(3, 40), x, weight, 1e-6)
        whole = rms_norm_backward(torch.ones_like(x), x, weight, 1e-6)
    assert torch.equal(expanded[0], whole[0])


# what can differ is how a compiler fuses products, so wide rows are for a GPU
@pytest.mark.parametrize("width", [165, 2100, 8229] if torch.cuda.is_available() else [165])
@each_backend
def test_no_weights_give_the_bits_of_weights_of_1(backend, width, device):
    x, grad_y = randn(2, 9 if width == 165 else 1, width, device=device)
    gate_up = torch.cat([x, grad_y], dim=1)
    runs = (
        lambda weight: [rms_norm(x, weight, 1e-6)],
        lambda weight: add_rms_norm(x, grad_y, weight, 1e-6),
        lambda weight: rms_norm_backward(grad_y, x, weight, 1e-6),
        lambda weight: [gated_rms_norm(gate_up, weight, 1e-6)],
        lambda weight: gated_rms_norm_backward(grad_y, gate_up, weight, 1e-6),
        lambda weight: [part.float() for part in rms_norm_e4m3(x, weight, 1e-6)],
        lambda weight: [part.float() for part in gated_rms_norm_e4m3(gate_up, weight, 1e-6)],
    )
    with use_backend(backend):
        for run in runs:
            for got, expected in zip(run(None), run(ones(width, device)), strict=True):
                assert torch.equal(got, expected)


def test_wide_rows_have_the_gradient_of_narrow_rows(device, monkeypatch):
    """Rows that do not fit into registers are read in blocks, twice."""
    x, grad_y = (randn(5, 2100, device=device, seed=seed) for seed in (1, 2))
    weight, gradients = norm_weight(2100, device), []
    for whole in (module.WHOLE_ROW, 2000):
        monkeypatch.setattr(module, "tiling", partial(tiling, whole=whole))
        with use_backend(KERNEL_BACKEND):
            gradients.append(rms_norm_backward(grad_y, x, weight, 1e-6))
    for one, other in zip(*gradients, strict=True):
        assert relative_error(other, one.double()) < 1e-6


KERNELS = "triton" if torch.cuda.is_available() else "interpreter"


@pytest.mark.parametrize("backend", [KERNELS, "torch"])
@pytest.mark.parametrize(
    ("rows", "width"),
    [(5, 33), (9, 160)],
)
def test_bits_are_those_of_norm_and_rounding(rows, width, backend, device):
    generator = torch.Generator().manual_seed(0)
    weight = random_packed(1, width, 32, generator, spread=2).to(device)
    x = torch.randn(rows, 2 * width, generator=generator).to(device)
    kind = "torch" if backend == "torch" else "triton"
    for run, spec, *sources in (
        (rms_norm_e4m3, rms_norm, x[:, :width]),
        (add_rms_norm_e4m3, add_rms_norm, x[:, :width], x[:, width:]),
        (gated_rms_norm_e4m3, gated_rms_norm, x),
    ):
        with use_backend(backend):
            *total, q, scale = run(*sources, weight, 1e-6)
            *expected, y = as_tuple(getattr(spec, kind)(*sources, weight, 1e-6))
            expected += getattr(quantise_rows_verification, kind)(y)
        for part, other in zip((*total, q.float(), scale), expected, strict=True):
            assert torch.equal(part, other)
