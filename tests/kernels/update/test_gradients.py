"""One pass over a gradient, and what it is divided by: judged, and averaged step by step."""

import math

import pytest
import torch

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update.add_slopes import add_slopes
from arbcli.kernels.update.gradient_gains import UNSET, gradient_gains, slope_gain, statistic_value
from arbcli.kernels.update.gradient_statistics import GradientStatistics, gradient_statistics
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.update.gradient_gains import averaged_digits, statistic_value_reference

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"

each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])


def inputs_of(statistic, value, key=7, ok=1):
    """Make `value` the mean squares of the columns of a gradient of one row."""
    like = {"device": value.device}
    total = torch.full((1,), 4.0 if ok else math.nan, **like)
    slope = torch.ones(1, 2, **like)
    sums = (total.double(), total, torch.full((1, 1), 0.25, **like), value[None])
    row_statistic = digits((0, 0), device=value.device)
    keys = (torch.tensor(key + i, dtype=torch.int32, **like) for i in range(2))
    counters = (torch.zeros((), dtype=torch.int64, **like) for _ in range(2))
    statistics = GradientStatistics(slope, *sums)
    return statistics, row_statistic, statistic, *keys, *counters


def gains_of(statistic, value, **options):
    """Average values into a statistic; return what `gradient_gains` does."""
    return gradient_gains(*inputs_of(statistic, value, **options))


def digits(*pairs, device):
    return torch.tensor(pairs, dtype=torch.int8, device=device)


@each_backend
def test_slopes_of_a_step_are_divided_by_their_root_mean_square(backend, device):
    """With as many parts as programs of a large matrix, or one."""
    slopes = torch.randn(2, 30, 400, generator=torch.Generator().manual_seed(0)).to(device)
    slopes[:, 0, :9] *= 20  # the largest ones are clipped
    unit = torch.full((), 2.0**16, device=device)
    weight, ok = (torch.tensor(n, dtype=torch.int32, device=device) for n in (2**15, 1))
    total = torch.zeros_like(slopes[0], dtype=torch.int16)
    with use_backend(backend):
        for slope in slopes:
            squares = add_slopes(total, slope, unit, weight, ok)
        usable, gain = slope_gain(total, squares)
    expected = slopes.double().clamp(-16, 16).mean(0)
    torch.testing.assert_close(total.double(), 2**11 * expected, rtol=0, atol=1.01)
    assert int(usable) == 1
    assert float(gain) == pytest.approx(32 / expected.square().mean().sqrt().item(), rel=1e-4)


@each_backend
def test_gain_of_slopes_of_almost_nothing_is_a_number(backend, device):
    inputs = inputs_of(None, torch.ones(3, device=device))
    statistics = inputs[0]._replace(
        slope_squares=torch.full((1,), 1e-80, dtype=torch.float64, device=device)
    )
    with use_backend(backend):
        gains = gradient_gains(statistics, None, None, *inputs[3:])
    assert float(gains.slope) == pytest.approx(3e38)


@each_backend
def test_zero_gradient_has_the_least_statistic(backend, device):
    """A power of two that is not the end of what digits can be."""
    statistic = torch.full((2, 2), UNSET, dtype=torch.int8, device=device)
    with use_backend(backend):
        gains = gains_of(statistic, torch.tensor([1.0, 0.0], device=device))
    assert statistic[1].tolist() == [-120, 0]
    assert float(gains.columns[1]) == pytest.approx(2.0**60)


@pytest.mark.parametrize(
    ("whole", "fraction", "value"), [(0, 0, 1.3), (-3, 17, 0.1), (-128, 5, 0.7)]
)
def test_averaged_digits_are_unbiased_over_every_random_word(whole, fraction, value):
    mean_square = 0.99 * 2 ** (whole + fraction / 128) + 0.01 * value if whole != -128 else value
    t = 128 * math.log2(mean_square)
    words = [averaged_digits(whole, fraction, value, word) for word in range(65536)]
    counts = {v: words.count(divmod(v, 128)) for v in (math.floor(t), math.floor(t) + 1)}
    assert sum(counts.values()) == 65536
    assert counts[math.floor(t) + 1] == math.floor((t - math.floor(t)) * 65536)


@each_backend
def test_statistic_saturates_at_both_ends(backend, device):
    statistic = digits((127, 127), (127, 127), (-127, 0), (-128, 0), (-127, 0), device=device)
    value = torch.tensor([3e38, math.inf, 0.0, 0.0, 1e-44], device=device)
    with use_backend(backend):
        gains = gains_of(statistic, value)
    # the first is a hair below the end, and may be rounded down
    assert statistic[0, 0] == 127
    assert statistic[0, 1] >= 125
    assert torch.equal(statistic[1:2], digits((127, 127), device=device))
    # 2**-120 is added to every mean square, and a hundredth of it counts
    assert (statistic[2:, 0] >= -127).all()
    assert (statistic[2:, 0] <= -120).all()
    assert gains.columns.isfinite().all()


def test_statistic_value_decodes_every_pair_of_digits(device):
    pairs = torch.cartesian_prod(torch.arange(-127, 128), torch.arange(128)).to(device)
    value = statistic_value(pairs.to(torch.int8))
    normal = pairs[:, 0] >= -126  # below that a device may flush to zero
    reference = statistic_value_reference(pairs)
    torch.testing.assert_close(value.double()[normal], reference[normal], rtol=1e-6, atol=0)
    assert (value[~normal] < 2.0**-125).all()
    unset = torch.full((128, 2), UNSET, dtype=torch.int8, device=device)
    assert not statistic_value(unset).any()


def matrix(rows, columns, group_size, device):
    packed = CaseGenerator(rows, device, torch.float32).packed(rows, columns, group_size, 1, "trit")
    return packed._replace(fraction=None)


@each_backend
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_one_bad_element_shows_in_the_sum(backend, bad, device):
    grad, packed = torch.ones(70, 140, device=device), matrix(70, 140, 32, device)
    grad[69, 139] = bad
    with use_backend(backend):
        assert not gradient_statistics(grad, packed).squares.sum().isfinite()


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_columns_are_the_same_by_any_number_of_threads():
    """No part of their sums is two threads'; 16 rows lie beyond the last whole part.

    Rows are so many that all threads have begun when the first ends.
    """
    grad = torch.randint(-3, 4, (4048, 200), generator=torch.Generator().manual_seed(0)).float()
    packed, before, columns = matrix(4048, 200, 32, "cpu"), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with use_backend("native"):
                columns.append(gradient_statistics(grad, packed, factored=True).columns)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*columns)
    assert torch.equal(columns[0].sum(dim=0), grad.square().sum(dim=0))
