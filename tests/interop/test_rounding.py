"""Weights are rounded as the equations say, and weights of our own grid are read as they are."""

from itertools import takewhile
from types import SimpleNamespace

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.interop import importing as run
from arbcli.interop.huggingface.dense import Part
from arbcli.interop.rounding import CLIPPED, PLACES, Grid, Rounded, put, round_vector, round_weights
from arbcli.kernels.codec.packing import unpack_trits
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.language_model import LanguageModel
from arbcli.model.rules import WITH_DIGITS

MOMENT, NIBBLE = Grid(127, 64), Grid(21, 16)


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.03


def decoded(z: torch.Tensor, v: torch.Tensor, group: int, grid: Grid) -> torch.Tensor:
    scale = torch.exp2(v / 128).bfloat16().float().repeat_interleave(group, dim=1)
    return (z * scale[:, : z.shape[1]] / grid.unit).bfloat16().float()


def round_reference(
    weight: torch.Tensor, group_size: int, grid: Grid, own_grid: bool = False
) -> Rounded:
    """Round (N, K) float32 weights from the equations, a group at a time."""
    every_v = range(-12288, 4096)
    scales = torch.tensor([2.0 ** (v / 128) for v in every_v]).bfloat16().tolist()
    scale_at = dict(zip(every_v, scales, strict=True))
    places = [v for v in scale_at if scale_at[v] != scale_at.get(v - 1)]
    groups = -(-weight.shape[1] // group_size)
    z = torch.zeros(weight.shape, dtype=torch.int8)
    v = torch.zeros(len(weight), groups, dtype=torch.int32)

    def levels(w: torch.Tensor, place: int) -> torch.Tensor:
        step = scale_at[places[place]] / grid.unit
        return (w / step).round().clamp(-grid.largest, grid.largest)

    def error(w: torch.Tensor, place: int) -> float:
        decoded = (levels(w, place) * (scale_at[places[place]] / grid.unit)).bfloat16()
        return float((decoded.double() - w).square().sum())

    for row in range(len(weight)):
        for group, w in enumerate(weight[row].split(group_size)):
            if not w.any():
                continue
            need = float(w.abs().max()) * grid.unit / (grid.largest + 0.5)
            first = next(at for at, step in enumerate(places) if scale_at[step] >= need)
            tried = [first + place for place in PLACES]
            if own_grid:
                every = range(first - CLIPPED, len(places))
                below = takewhile(lambda at, w=w: levels(w, at).any(), every)
                exact = (at for at in below if error(w, at) == 0)
                tried = [at for at in [next(exact, None)] if at is not None] or tried
            best = min(tried, key=lambda at: error(w, at))
            v[row, group] = places[best]
            here = slice(group * group_size, group * group_size + len(w))
            z[row, here] = levels(w, best).to(torch.int8)
    return Rounded(z, v)


@pytest.mark.parametrize("backend", ["torch", *["native"] * native.available()])
@pytest.mark.parametrize(
    ("own_grid", "group", "columns", "grid"),
    [(False, 32, 33, MOMENT), (True, 16, 18, NIBBLE), (False, 4, 3, NIBBLE), (True, 4, 3, MOMENT),
     (False, 64, 64, NIBBLE), (False, 6, 97, MOMENT)],
)  # fmt: skip
def test_rounding_equals_reference(grid, group, columns, own_grid, backend):
    weight = drawn(5, columns)
    weight[3:] *= torch.tensor([[1e-20], [1e5]])
    weight[0, :group] = 0  # a group without a weight
    weight[1, 1] = 3.0  # an outlier
    weight[2, :2] = torch.tensor([1e-30, -1e9])
    if own_grid:
        weight[1:2] = decoded(*round_weights(weight[1:2], group, grid), group, grid)
    with use_backend(backend):
        rounded = round_weights(weight, group, grid, own_grid)
    wanted = round_reference(weight, group, grid, own_grid)
    assert torch.equal(rounded.z, wanted.z)
    assert torch.equal(rounded.v, wanted.v)


@pytest.mark.parametrize("backend", ["torch", *["native"] * native.available()])
@pytest.mark.parametrize(("size", "scale", "z"), [(1e-37, -12288, 0), (3e38, 4095, 127)])
def test_scales_end_where_their_digits_do(size, scale, z, backend):
    """In eight bits the next exponent would be another one."""
    weight = torch.tensor([[size, -size, size / 3, 0.0]])
    with use_backend(backend):
        rounded = round_weights(weight, 4, MOMENT)
    assert (rounded.v.tolist(), rounded.z.tolist()) == ([[scale]], [[z, -z, z, 0]])


@pytest.mark.parametrize("grid", [MOMENT, NIBBLE], ids=["moment", "nibble"])
def test_own_grid_is_read_exactly(grid):
    """Whatever level the largest weight of a group has; below L / 2 z may be doubled."""
    generator = torch.Generator().manual_seed(2)
    for limit in (grid.largest, grid.largest // 2 + 1, grid.largest // 2, 5):
        z = torch.randint(-limit, limit + 1, (20, 64), generator=generator)
        z[:, ::32], z[:, 1::32] = limit, limit - 1  # of all but one z no two are multiples
        v = torch.randint(-1500, 300, (20, 2), generator=generator)
        weight = decoded(z, v, 32, grid)
        rounded = round_weights(weight, 32, grid, True)
        if 2 * limit > grid.largest:
            assert torch.equal(rounded.z, z.to(torch.int8))
        assert torch.equal(decoded(rounded.z, rounded.v, 32, grid), weight)
        assert torch.equal(round_weights(weight, 32, grid, True).v, rounded.v)


@pytest.mark.parametrize("grid", [MOMENT, NIBBLE], ids=["moment", "nibble"])
def test_numbers_of_a_vector_keep_the_digits_of_bf16(grid):
    numbers = drawn(200, 1).mul(40).bfloat16().float()
    numbers[0] = 0
    rounded = round_vector(numbers, grid)
    assert torch.equal(decoded(*rounded, 1, grid), numbers)
    assert int(rounded.z[0]) == 0
    sizes = rounded.z[1:].abs()
    assert int(sizes.min()) >= grid.largest / 2
    more = drawn(200, 1, seed=3)
    first = round_vector(more, grid)
    assert float((decoded(*first, 1, grid) / more - 1).abs().max()) < 2**-8  # half a step of bf16
    second = round_vector(decoded(*first, 1, grid), grid)
    assert torch.equal(first.z, second.z)
    assert torch.equal(first.v, second.v)


@pytest.mark.parametrize("rule", WITH_DIGITS)
def test_digits_are_those_that_a_step_leaves(rule):
    """The trit is the sign of z where z is beyond half of what a trit is worth, else 0."""
    lm = LanguageModel(preset("tiny", dim=64, layers=1, heads=2, ffn=64, digits="all", rule=rule))
    tensor = max(lm.packed_tensors().values(), key=lambda packed: packed.num_weights)
    put(tensor, slice(None), drawn(tensor.out_features, tensor.in_features), False)
    trits = unpack_trits(tensor.trits, tensor.in_features).int()
    below, half = tensor.rule.digits(tensor.state)["remainder"][0].int(), tensor.rule.radix // 2
    z = trits * tensor.rule.radix + below
    assert torch.equal(trits, z.sign() * (z.abs() > half))
    assert {half, half + 1} <= set(z.abs().unique().tolist())


def test_report_counts_weights_far_from_the_others():
    """Of a part of some rows, that is read in pieces; sizes are in root-mean-squares."""
    weight = torch.ones(8, 64)
    weight[1, 3], weight[6, 60], weight[7, 1] = 300.0, -299.0, 20.0
    lm = LanguageModel(preset("tiny", dim=64, layers=1, heads=2, ffn=64, digits="all"))
    tensor = lm.head.weight
    part = Part("ours", "theirs", slice(16, 24), (8, 64))
    folder = SimpleNamespace(path="a", read=lambda _, rows: weight[rows])
    report, (error, squares) = run._round(folder, tensor, part, False)
    size = float(weight.square().mean().sqrt())
    assert (report.name, report.shape) == ("theirs", (8, 64))
    assert report.outliers == 2
    assert report.largest == pytest.approx(300 / size)
    assert squares == pytest.approx(float(weight.square().sum()))
    decoded_rows = tensor.weight(torch.float32)[16:24]
    assert error == pytest.approx(float((decoded_rows - weight).square().sum()), rel=1e-3)
    assert report.relative_error == pytest.approx((error / squares) ** 0.5)
    weight.fill_(1.0)
    assert run._round(folder, tensor, part, False)[0].outliers == 0
