"""Quantised gradients: unbiased, the same in every order, and refused where they could wrap."""

import pytest
import torch

from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update.quantise_gradient import NONE, fitting_exponents, quantise_gradient
from arbcli.kernels.update.sum_gradients import sum_gradients


def quantised(grad, exponent, key, limit=127, sums=None, fitting=None):
    add = sums is not None
    sums = sums if add else torch.empty(grad.shape, dtype=torch.int8)
    fitting = fitting if add else torch.empty(len(grad), dtype=torch.int8)
    with use_backend("torch"):
        quantise_gradient(grad, exponent, torch.tensor(key).int(), sums, fitting, limit, add)
    return sums, fitting


def test_mean_of_many_is_the_gradient():
    grad = torch.linspace(-3, 3, 4000).expand(64, 4000)
    exponent = torch.zeros(64, dtype=torch.int8)
    found = sum(quantised(grad, exponent, key << 8)[0].double().mean(0) for key in range(16)) / 16
    assert (found - grad[0]).abs().max() < 5 * 0.5 / 32  # five deviations of 1024 roundings


def test_parts_add_up_to_the_same_in_any_order():
    grads = torch.randn(4, 9, 40, generator=torch.Generator().manual_seed(1))
    exponent = torch.full((9,), -4, dtype=torch.int8)
    alone = [quantised(grad, exponent, key, 31) for key, grad in enumerate(grads)]
    together = None, None
    for key in (2, 0, 3, 1):
        together = quantised(grads[key], exponent, key, 31, *together)
    parts, fits = (torch.stack(found) for found in zip(*alone, strict=True))
    with use_backend("torch"):
        whole = sum_gradients(together[0][None], exponent, together[1][None])
        assert torch.equal(sum_gradients(parts, exponent, fits), whole)


def test_exponents_that_fit_use_the_range_and_clip_next_to_nothing():
    grad = torch.randn(50, 300, generator=torch.Generator().manual_seed(2)) * 1e-5
    for limit in (31, 63, 127):
        exponent = fitting_exponents(grad.abs().amax(1), limit)
        sums, fitting = quantised(grad, exponent, 7, limit)
        assert torch.equal(fitting, exponent)
        assert limit // 2 <= sums.abs().amax(1).min()
        error = (sums * torch.exp2(exponent.double())[:, None] - grad.double()).abs()
        assert (error <= 1.01 * torch.exp2(exponent.double())[:, None]).all()


def test_row_without_an_exponent_is_left_out_and_still_measured():
    sums, fitting = quantised(torch.ones(1, 5), torch.tensor([NONE], dtype=torch.int8), 3)
    assert not sums.any()
    assert fitting.tolist() == [-6]


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"limit": 128}, {"sums": torch.zeros(2, 3)}, {"grad": torch.ones(3)}]
)
def test_wrong_arguments_are_refused(wrong):
    about = {
        "grad": torch.ones(2, 3), "exponent": torch.zeros(2, dtype=torch.int8),
        "key": torch.tensor(1).int(), "sums": torch.zeros(2, 3, dtype=torch.int8),
        "fitting": torch.zeros(2, dtype=torch.int8), "limit": 127, "add": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="need"):
        quantise_gradient(**(about | wrong))
