"""Quantised gradients: unbiased, the same in every order, and refused where they could wrap."""

import pytest
import torch

from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update.hadamard import block_of, mixed_back
from arbcli.kernels.update.quantise_gradient import NONE, fitting_exponents, quantise_gradient
from arbcli.kernels.update.sum_gradients import sum_gradients


def quantised(grad, exponent, key, limit=127, sums=None, fitting=None):
    add = sums is not None
    sums = sums if add else torch.empty(grad.shape, dtype=torch.int8)
    fitting = fitting if add else torch.empty(len(grad), dtype=torch.int8)
    with use_backend("torch"):
        about = sums, None, fitting, limit, 1, add
        quantise_gradient(grad, exponent, torch.tensor(key).int(), *about)
    return sums, fitting


def test_parts_add_up_to_the_same_in_any_order():
    grads = torch.randn(4, 9, 40, generator=torch.Generator().manual_seed(1))
    exponent = torch.full((9,), -4, dtype=torch.int8)
    alone = [quantised(grad, exponent, key, 31) for key, grad in enumerate(grads)]
    together = None, None
    for key in (2, 0, 3, 1):
        together = quantised(grads[key], exponent, key, 31, *together)
    parts, fits = (torch.stack(of_parts) for of_parts in zip(*alone, strict=True))
    with use_backend("torch"):
        whole = sum_gradients(together[0][None], None, exponent, together[1][None], 8)
        assert torch.equal(sum_gradients(parts, None, exponent, fits, 8), whole)


def test_exponents_that_fit_use_the_range_and_clip_next_to_nothing():
    grad = torch.randn(50, 300, generator=torch.Generator().manual_seed(2)) * 1e-5
    for limit in (31, 63, 127):
        exponent = fitting_exponents(grad.abs().amax(1), limit)
        sums, fitting = quantised(grad, exponent, 7, limit)
        assert torch.equal(fitting, exponent)
        assert limit // 2 <= sums.abs().amax(1).min()
        error = (sums * torch.exp2(exponent.double())[:, None] - grad.double()).abs()
        assert (error <= 1.01 * torch.exp2(exponent.double())[:, None]).all()


def sent_and_back(grad, limit, block, low=None):
    """Quantise with the exponents that fit, and make a gradient of the integers."""
    sums = torch.empty(grad.shape, dtype=torch.int16 if low is None else torch.int8)
    none = torch.full((len(grad),), NONE, dtype=torch.int8)
    fitting, key = torch.empty_like(none), torch.tensor(5).int()
    with use_backend("torch"):
        quantise_gradient(grad, none, key, sums, low, fitting, limit, block, False)
        exponent = fitting.clone()
        quantise_gradient(grad, exponent, key, sums, low, fitting, limit, block, False)
        planes = sums[None], None if low is None else low[None]
        return sum_gradients(*planes, exponent, fitting[None], block)


@pytest.mark.parametrize("columns", [1, 6, 40, 192])
def test_mixing_is_undone(columns):
    grad = torch.randn(9, columns, generator=torch.Generator().manual_seed(3))
    low = torch.empty(5, columns, dtype=torch.uint8)
    for limit, plane in ((32767, None), (2047, low)):
        restored = sent_and_back(grad, limit, block_of(columns), plane)
        assert (restored - grad).abs().max() < 8 * grad.abs().max() / limit


@pytest.mark.parametrize(("columns", "block"), [(1, 1), (3, 1), (6, 2), (96, 32), (384, 64)])
def test_blocks_divide_the_columns(columns, block):
    assert block_of(columns) == block


def test_integers_that_are_mixed_back_are_left_as_they_are():
    row = torch.arange(64, dtype=torch.int32)[None]
    mixed_back(row, 64)
    assert row[0].tolist() == [*range(64)]
