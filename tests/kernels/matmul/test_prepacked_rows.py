"""Few rows times a prepacked matrix: how it is prepacked, and what its cases do not say."""

import math

import pytest
import torch
from marks import mostly_slow

from arbcli.kernels.codec.decode_digits import decode_digits_reference
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.matmul import digits_matmul as digits
from arbcli.kernels.matmul import prepacked_rows as module
from arbcli.kernels.matmul.digits_matmul import (
    DIGITS_MATMUL,
    digits_matmul,
    in_lanes,
    prepack_digits,
    prepack_in_lanes,
    random_digits,
)
from arbcli.kernels.matmul.prepacked import prepack, prepacked_reference, prepacked_torch
from arbcli.kernels.matmul.prepacked_rows import (
    MOST_TEXTS,
    PREPACKED_ROWS,
    Tiling,
    _tiling,
    prepacked_rows,
)
from arbcli.kernels.matmul.swizzled import fits_prepacked
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend

compiled = pytest.mark.skipif(not native.available(), reason=native.why_not())
KERNELS = "triton" if torch.cuda.is_available() else "interpreter"


def matrix(device, rows=20, in_features=328, group_size=32) -> Packed:
    generator = torch.Generator().manual_seed(0)
    return random_packed(rows, in_features, group_size, generator, spread=8).to(device)


def digits_of_many_scales(device, rows=22, in_features=328) -> Packed:
    """Draw weights of all digits whose exponents differ from row to row and group to group."""
    packed = random_digits(rows, in_features, 32, torch.Generator().manual_seed(2))
    packed.exponent.add_(torch.arange(packed.exponent.numel()).view_as(packed.exponent) % 7)
    return packed.map(lambda part: part.to(device))


@pytest.mark.parametrize("digits", ["trit", "all"])
def test_a_gated_matrix_is_prepacked_by_halves(digits, device):
    packed = matrix(device, rows=22) if digits == "trit" else digits_of_many_scales(device)
    prepacked, reference = (
        (prepack, prepacked_reference)
        if digits == "trit"
        else (prepack_digits, DIGITS_MATMUL.reference)
    )
    weight, halves = prepacked(packed, gated=True), decode_digits_reference(packed)
    x = torch.randn(2, 328, generator=torch.Generator().manual_seed(1)).to(device)
    gate, up = (x.double() @ halves.double().T).chunk(2, dim=1)
    got = reference(x, *weight, None, None, torch.float32)
    torch.testing.assert_close(got, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("digits", ["trit", "all"])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16], ids=str)
def test_result_has_the_type_that_is_asked_for(asked, digits, device):
    """And by default that of the activations."""
    multiply = prepacked_rows if digits == "trit" else digits_matmul
    weight = (
        prepack(matrix(device)) if digits == "trit"
        else prepack_digits(digits_of_many_scales(device))
    )  # fmt: skip
    x = torch.ones(2, 328, device=device, dtype=torch.bfloat16)
    for backend in ("torch", KERNELS):
        with use_backend(backend):
            assert multiply(x, weight, dtype=asked).dtype == (asked or torch.bfloat16)


def test_matrices_one_above_the_other_are_multiplied_at_once(device):
    upper, lower = matrix(device), matrix(device, rows=7)
    both = decode_digits_reference(upper.above(lower))
    parts = [decode_digits_reference(part) for part in (upper, lower)]
    assert torch.equal(both, torch.cat(parts))


def test_power_of_two_in_front_of_a_row_does_not_matter(device):
    weight = prepack(matrix(device))
    x = torch.randn(3, 328, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    with use_backend(KERNELS):
        y, scaled = (
            prepacked_rows(part, weight, 0.0, dtype=torch.float32) for part in (x, 2.0**40 * x)
        )
    assert torch.equal(y, scaled)


@pytest.mark.parametrize("value", mostly_slow([float("inf"), float("nan")], math.isnan))
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_row(rows, value, device):
    weight = prepack(matrix(device, rows=5))
    for k in (0, 171, 327):
        x = torch.ones(rows, 328, device=device, dtype=torch.bfloat16)
        x[-1, k] = value
        with use_backend(KERNELS):
            y = prepacked_rows(x, weight, 1e-6, dtype=torch.float32)
        assert y[:-1].isfinite().all()
        assert not y[-1].isfinite().any()


@pytest.mark.parametrize(
    ("tiling", "gated"),
    [((3, 1, 4, 1, 1), False), ((2, 2, 4, 1, 1), True), ((1, 2, 4, 3, 3), True)],
)
def test_work_can_be_shared_out_otherwise(tiling, gated, device, monkeypatch):
    tiling = Tiling(*tiling)
    packed = matrix(device, rows=38, in_features=400 * tiling.steps)
    x = torch.randn(11, packed.in_features, generator=torch.Generator().manual_seed(1))
    inputs = x.to(device, torch.bfloat16), *prepack(packed, gated), 1e-6, None, torch.float32
    monkeypatch.setattr(module, "_tiling", lambda *_: tiling)
    with use_backend(KERNELS):
        y = PREPACKED_ROWS.triton(*inputs)
    expected = prepacked_reference(*inputs)
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("rows", [1, 9])
def test_rows_are_multiplied_by_every_backend(rows, device):
    gpu = device.type == "cuda"  # many tiles and steps are not for the interpreter
    for out_features, in_features in ((35, 1000), *(((8488, 8008), (8488, 328)) if gpu else ())):
        packed = matrix(device, out_features, in_features)
        x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(1))
        x = x.to(device, torch.bfloat16)
        expected = x.double() @ decode_digits_reference(packed).double().T
        for backend in (KERNELS, "torch"):
            with use_backend(backend):
                y = prepacked_rows(x, prepack(packed), dtype=torch.float32)
            assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_row_of_a_wider_matrix(device):
    wide = torch.ones(2, 331, device=device, dtype=torch.bfloat16)
    weight = prepack(matrix(device))
    with use_backend(KERNELS):
        row, alone = (prepacked_rows(x, weight) for x in (wide[:1, :328], wide[:1, :328].clone()))
    assert torch.equal(row, alone)


def test_only_one_row_of_bf16_is_taken(device):
    x = torch.zeros(1, 1, 328, device=device, dtype=torch.bfloat16)
    with use_backend(KERNELS):
        assert fits_prepacked(x, 32)
        assert not fits_prepacked(x, 6)
        assert not fits_prepacked(x.float(), 32)
        assert not fits_prepacked(x[..., 1:], 32)
        assert not fits_prepacked(x.expand(1, 2, 328), 32)
    with use_backend("torch"):
        assert not fits_prepacked(x, 32)


def test_rejects_what_does_not_fit(device):
    packed, x = matrix(device), torch.zeros(328, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="N % 2 == 0, got N = 19"):
        prepack(packed.rows(slice(19)), gated=True)
    with pytest.raises(ValueError, match="need G % 32 == 0, got G = 6"):
        prepack(matrix(device, group_size=6))
    weight, x = prepack(packed), x[None]
    with use_backend(KERNELS):
        for wrong in (x.float(), x[:, :320], x[0], x.expand(2, 328), x[None]):
            with pytest.raises(ValueError, match=r"x.dtype == torch|x: need contig"):
                prepacked_rows(wrong, weight)
        for few in (x[:, :325].contiguous(), x.repeat(65, 1), x[:0]):
            some = prepack(matrix(device, in_features=few.shape[1]))
            with pytest.raises(ValueError, match=r"need in_features % 8|need M > 0"):
                prepacked_rows(few, some)
        for added in (x, x[:, :20].float(), x[0, :20]):
            with pytest.raises(ValueError, match=r"added: need|added.dtype"):
                prepacked_rows(x, weight, added=added)


@compiled
@pytest.mark.parametrize("digits", ["trit", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_among_any_others_in_loops(dtype, digits):
    """Of one row, of the number that loops take at a time, and of more than the cache has."""
    generator = torch.Generator().manual_seed(0)
    if digits == "all":
        weight, multiply = (
            prepack_in_lanes(random_digits(22, 168, 32, generator), True),
            digits_matmul,
        )
    else:
        weight, multiply = prepack(matrix("cpu", 22, 168), True), prepacked_rows
    x = torch.randn(265, 168, generator=generator).to(dtype)
    added = torch.randn(265, 11, generator=generator).to(dtype)
    with use_backend("native"):
        every = multiply(x, weight, 1e-6, added)
        for rows in (slice(0, 1), slice(0, 6), slice(254, 262), slice(264, 265)):
            assert torch.equal(multiply(x[rows], weight, 1e-6, added[rows]), every[rows])
    with use_backend("torch"):
        pieces = prepack_digits(random_digits(22, 168, 32, generator.manual_seed(0)), True)
        other = (prepacked_torch if digits == "trit" else DIGITS_MATMUL.torch)(
            x, *(weight if digits == "trit" else pieces), 1e-6, added, torch.float32
        )
    error = (every.float() - other).norm() / other.norm()
    assert error < (5e-5 if dtype == torch.float32 else 5e-3)  # activations of 16 bits, and bf16


@compiled
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("in_features", [1, 40, 328])
def test_loops_lay_a_matrix_out_as_torch_does(in_features, gated):
    packed = matrix("cpu", 22, in_features)
    with use_backend("torch"):
        expected = prepack(packed, gated)
    with use_backend("native"):
        assert torch.equal(prepack(packed, gated).pieces, expected.pieces)
    digits = random_digits(22, in_features, 64, torch.Generator().manual_seed(0))
    expected, found = in_lanes(prepack_digits(digits, gated)), prepack_in_lanes(digits, gated)
    assert torch.equal(found.pieces, expected.pieces)
    assert torch.equal(found.scales, expected.scales)
    assert found[2:] == expected[2:]


@pytest.mark.parametrize("processors", [5, 132])
def test_order_of_sums_is_of_the_matrix_alone(processors):
    """Else the bits of a row would depend on how many there are."""
    for tiles in (1, 70, 700):
        for blocks in range(1, 72):
            tilings = [
                _tiling(rows, tiles, blocks, processors) for rows in range(1, MOST_TEXTS + 1)
            ]
            assert len({(tiling.warps, tiling.steps) for tiling in tilings}) == 1


def test_few_rows_of_all_digits_are_cut_as_one_is():
    """So that each has the bits that it has by itself."""
    for tiles in (1, 132, 133, 900):
        for planes in (1, 31, 32, 63, 64, 127, 128, 129, 400):
            found = {digits._tiling(r, tiles, planes, 132) for r in range(1, digits.ROWS_ALIKE + 1)}
            assert len(found) == 1, (tiles, planes)
