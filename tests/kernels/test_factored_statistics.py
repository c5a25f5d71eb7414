"""Mean squares against float64; running statistics step by step, and by counting random words."""

import copy
import math

import pytest
import torch

from arbcli.kernels.backend import use_backend
from arbcli.kernels.factored_statistics import (
    AVERAGE_STATISTIC,
    MEAN_SQUARES,
    UNSET,
    average_statistic,
    average_statistic_reference,
    averaged_digits,
    mean_squares,
    statistic_value,
    statistic_value_reference,
)

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"
STEP = 2 ** (1 / 128)

each_implementation = pytest.mark.parametrize("implementation", ["triton", "torch"])
each_backend = pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])
each_spec = pytest.mark.parametrize(
    "spec", [MEAN_SQUARES, AVERAGE_STATISTIC], ids=lambda spec: spec.name
)


def run(spec, implementation, case):
    # a copy, unlike a clone, has the strides of a view
    return getattr(spec, implementation)(*copy.deepcopy(case.inputs))


def scalars(device, key=7, ok=1):
    return [torch.tensor(x, dtype=torch.int32, device=device) for x in (key, ok)]


def digits(*pairs, device):
    return torch.tensor(pairs, dtype=torch.int8, device=device)


@each_implementation
@each_spec
def test_statistics_are_as_close_to_the_reference_as_the_gate_asks(spec, implementation, device):
    for case in spec.cases(device, 0):
        results, references = run(spec, implementation, case), run(spec, "reference", case)
        for result, reference in zip(results, references, strict=True):
            assert result.shape == reference.shape, case.label
            error = (result.double() - reference).norm()
            assert error <= spec.gate.relative * reference.norm(), case.label


@each_implementation
@each_spec
def test_statistics_are_deterministic(spec, implementation, device):
    for case in spec.cases(device, 0):
        first, second = run(spec, implementation, case), run(spec, implementation, case)
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other), case.label


@each_backend
def test_mean_squares_counts_every_element_once(backend, device):
    # sums of small integers are exact in any order, and so is a mean over a power of two
    for rows, columns in ((64, 128), (128, 256), (2, 1024), (512, 1)):
        generator = torch.Generator().manual_seed(rows)
        grad = torch.randint(-3, 4, (rows, columns), generator=generator).float().to(device)
        with use_backend(backend):
            row_means, column_means = mean_squares(grad)
        squares = grad.double() ** 2
        assert torch.equal(row_means, (squares.mean(dim=1) + 1e-30).float()), (rows, columns)
        assert torch.equal(column_means, (squares.mean(dim=0) + 1e-30).float()), (rows, columns)


@each_backend
def test_average_statistic_rounds_as_the_reference_nearly_everywhere(backend, device):
    generator = torch.Generator().manual_seed(3)
    length = 2000
    old = torch.randint(-40 * 128, 40 * 128, (length,), generator=generator)
    ours = torch.stack((old >> 7, old & 127), dim=1).to(device, torch.int8)
    # of the order of the old statistic, and far from it
    value = torch.exp2(old / 128 + 4 * torch.randn(length, generator=generator)).to(device)
    reference = ours.clone()
    with use_backend(backend):
        average_statistic(ours, value, *scalars(device))
    average_statistic_reference(reference, value, *scalars(device))
    whole, fraction = (ours.int() - reference.int()).unbind(1)
    steps = whole * 128 + fraction
    assert steps.abs().max() <= 1
    assert (steps == 0).float().mean() > 0.99


def test_average_statistic_is_the_same_in_kernel_and_torch_nearly_everywhere(device):
    for case in AVERAGE_STATISTIC.cases(device, 0):
        ours, other = (run(AVERAGE_STATISTIC, name, case)[1] for name in ("triton", "torch"))
        assert (ours == other).double().sum() >= 0.99 * len(ours), case.label
        ratio = ours[ours != other] / other[ours != other]
        assert ((ratio < STEP * 1.001) & (ratio > 0.999 / STEP)).all(), case.label


@pytest.mark.parametrize(
    ("whole", "fraction", "value"),
    [(0, 0, 1.3), (-3, 17, 0.2), (-3, 17, 0.1), (-99, 127, 1e-30), (90, 1, 0.0), (-128, 5, 0.7)],
)
def test_averaged_digits_are_unbiased_over_every_random_word(whole, fraction, value):
    average = 0.99 * 2 ** (whole + fraction / 128) + 0.01 * value if whole != -128 else value
    t = 128 * math.log2(average)
    words = [averaged_digits(whole, fraction, value, word) for word in range(65536)]
    counts = {v: words.count(divmod(v, 128)) for v in (math.floor(t), math.floor(t) + 1)}
    assert sum(counts.values()) == 65536
    assert counts[math.floor(t) + 1] == math.floor((t - math.floor(t)) * 65536)


def test_averaged_digits_keep_an_exact_power_of_two():
    words = (0, 1, 32768, 65535)
    assert {averaged_digits(-128, 77, 0.125, word) for word in words} == {(-3, 0)}


@each_backend
def test_average_statistic_changes_nothing_unless_ok(backend, device):
    before = digits((-128, 3), (5, 127), (-127, 0), (0, 64), device=device)
    statistic = before.clone()
    value = torch.tensor([1.0, math.nan, math.inf, 3.0], device=device)
    with use_backend(backend):
        running = average_statistic(statistic, value, *scalars(device, ok=0))
    assert torch.equal(statistic, before)
    torch.testing.assert_close(running.double(), statistic_value_reference(before))


@each_backend
def test_average_statistic_takes_the_first_value_whole(backend, device):
    statistic = torch.full((5, 2), UNSET, dtype=torch.int8, device=device)
    value = torch.tensor([1e-30, 1.0, 0.1, 1e30, 7.0], device=device)
    with use_backend(backend):
        running = average_statistic(statistic, value, *scalars(device))
    torch.testing.assert_close(running, value, rtol=STEP - 1, atol=0)
    assert torch.equal(statistic[1], digits((0, 0), device=device)[0])


@pytest.mark.filterwarnings("ignore:divide by zero")  # log2(0) in the interpreter
@each_backend
def test_average_statistic_saturates_at_both_ends(backend, device):
    statistic = digits((127, 127), (127, 127), (-127, 0), (-128, 0), (-127, 0), device=device)
    value = torch.tensor([3e38, math.inf, 0.0, 0.0, 1e-44], device=device)
    with use_backend(backend):
        running = average_statistic(statistic, value, *scalars(device))
    ends = digits((127, 127), (127, 127), (-127, 0), (-127, 0), (-127, 0), device=device)
    # the first is a hair below the end, and may be rounded down
    assert statistic[0, 0] == 127
    assert statistic[0, 1] >= 125
    assert torch.equal(statistic[1:], ends[1:])
    assert running.isfinite().all()


@each_backend
def test_average_statistic_draws_other_bits_for_another_key(backend, device):
    value = torch.full((200,), 0.3, device=device)
    results = []
    for key in (1, 2):
        statistic = torch.full((200, 2), UNSET, dtype=torch.int8, device=device)
        with use_backend(backend):
            average_statistic(statistic, value, *scalars(device, key=key))
        results.append(statistic)
    assert not torch.equal(*results)


def test_statistic_value_decodes_every_pair_of_digits(device):
    pairs = torch.cartesian_prod(torch.arange(-127, 128), torch.arange(128)).to(device)
    value = statistic_value(pairs.to(torch.int8))
    normal = pairs[:, 0] >= -126  # below that a device may flush to zero
    reference = statistic_value_reference(pairs)
    torch.testing.assert_close(value.double()[normal], reference[normal], rtol=1e-6, atol=0)
    assert (value[~normal] < 2.0**-125).all()
    unset = torch.full((128, 2), UNSET, dtype=torch.int8, device=device)
    assert not statistic_value(unset).any()


def test_mean_squares_rejects_what_does_not_fit(device):
    for grad in (
        torch.zeros(3, 4, device=device).double(),
        torch.zeros(3, 4, dtype=torch.int8, device=device),
        torch.zeros(3, device=device),
        torch.zeros(0, 4, device=device),
    ):
        with pytest.raises(ValueError, match="float32 or bfloat16 matrix that is not empty"):
            mean_squares(grad)


def test_average_statistic_rejects_what_does_not_fit(device):
    statistic = digits((0, 0), (1, 1), (2, 2), device=device)
    value = torch.ones(3, device=device)
    key, ok = scalars(device)
    with pytest.raises(ValueError, match="int8 digits of shape"):
        average_statistic(statistic.int(), value, key, ok)
    with pytest.raises(ValueError, match="int8 digits of shape"):
        average_statistic(statistic.T, value, key, ok)
    with pytest.raises(ValueError, match="need 3 float32 values"):
        average_statistic(statistic, value[:2], key, ok)
    with pytest.raises(ValueError, match="need 3 float32 values"):
        average_statistic(statistic, value.double(), key, ok)
    with pytest.raises(ValueError, match="`key` as an int32 scalar"):
        average_statistic(statistic, value, key.long(), ok)
    with pytest.raises(ValueError, match="`ok` as an int32 scalar"):
        average_statistic(statistic, value, key, ok[None])
