"""Products with a prepacked matrix: properties that the cases of their verification omit."""

import pytest
import torch

from arbcli.kernels.attention.attend_parts import AttentionParts
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul import prepacked_rows as module
from arbcli.kernels.matmul import row_matmul as of_row
from arbcli.kernels.matmul.int8_matmul import (
    int8_matmul,
    permute_lanes,
    prepack_in_lanes,
    prepack_int8,
)
from arbcli.kernels.matmul.prepacked import MAX_COLUMNS, prepack
from arbcli.kernels.matmul.prepacked_rows import MAX_TEXTS, PREPACKED_ROWS, _tiling, prepacked_rows
from arbcli.kernels.matmul.row_matmul import Tiling, row_matmul
from arbcli.kernels.matmul.swizzled import fits_prepacked
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.decode_digits import (
    decode_digits_reference,
    digits_reference,
    scales_reference,
)
from arbcli.verify.kernels.matmul.int8_matmul import int8_matmul_verification
from arbcli.verify.kernels.matmul.prepacked import prepacked_reference

compiled = pytest.mark.skipif(not native.available(), reason=native.why_not())
KERNELS = "triton" if torch.cuda.is_available() else "interpreter"
REFERENCES = {"trit": prepacked_reference, "all": int8_matmul_verification.reference}
"""By digits of a prepacked matrix."""


def matrix(device, rows=20, in_features=328, group_size=32) -> Packed:
    return CaseGenerator(0, device, torch.float32).packed(rows, in_features, group_size, 8, "trit")


def random_int8(rows, in_features, group_size, seed) -> Packed:
    """Draw a matrix of all digits with |z| up to 127."""
    rng = CaseGenerator(seed, torch.device("cpu"), torch.float32)
    packed = rng.packed(rows, in_features, group_size, 8, "trit")
    remainder = rng.integers(-128, 127, rows, in_features)
    return packed._replace(remainder=remainder, radix=14, nibble=True)


def draw(rows, in_features=328, *, device) -> torch.Tensor:
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(1))
    return x.to(device, torch.bfloat16)


def row(device, in_features=328) -> torch.Tensor:
    return draw(1, in_features, device=device)


def digits_of_many_scales(device, rows=22, in_features=328) -> Packed:
    """Draw weights of all digits whose exponents differ from row to row and group to group."""
    packed = random_int8(rows, in_features, 32, seed=2)
    packed.exponent.add_(torch.arange(packed.exponent.numel()).view_as(packed.exponent) % 7)
    return packed.map(lambda part: part.to(device))


def unrounded(packed: Packed) -> torch.Tensor:
    """Decode in float64, with scales rounded to bf16, and not their products with digits."""
    return digits_reference(packed) * scales_reference(packed).bfloat16().double()


@pytest.mark.parametrize("digits", ["trit", "all"])
def test_a_gated_matrix_is_prepacked_by_halves(digits, device):
    packed = matrix(device, rows=22) if digits == "trit" else digits_of_many_scales(device)
    make = prepack if digits == "trit" else prepack_int8
    weight, halves = make(packed, gated=True), unrounded(packed)
    x = torch.randn(2, 328, generator=torch.Generator().manual_seed(1)).to(device)
    gate, up = (x.double() @ halves.T).chunk(2, dim=1)
    got = REFERENCES[digits](x, *weight, None, None, torch.float32)
    torch.testing.assert_close(got, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize(
    ("tiling", "gated"),
    [((3, 1, 4, 1, 1), False), ((2, 2, 4, 1, 1), True), ((1, 2, 4, 3, 3), True)],
)
def test_few_rows_have_the_same_product_in_every_tiling(tiling, gated, device, monkeypatch):
    tiling = module.Tiling(*tiling)
    packed = matrix(device, rows=38, in_features=400 * tiling.steps)
    x = torch.randn(11, packed.in_features, generator=torch.Generator().manual_seed(1))
    inputs = x.to(device, torch.bfloat16), *prepack(packed, gated), 1e-6, None, torch.float32
    monkeypatch.setattr(module, "_tiling", lambda *_: tiling)
    with use_backend(KERNELS):
        y = PREPACKED_ROWS.triton(*inputs)
    expected = prepacked_reference(*inputs)
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


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


def test_matrix_that_cannot_be_prepacked_is_refused(device):
    with pytest.raises(ValueError, match="N % 2 == 0, got N = 19"):
        prepack(matrix(device, rows=19), gated=True)
    with pytest.raises(ValueError, match="need G % 32 == 0, got G = 6"):
        prepack(matrix(device, group_size=6))


@compiled
@pytest.mark.parametrize("digits", ["trit", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_among_any_others_in_loops(dtype, digits):
    """Of one row, of the number that loops take at a time, and of more than the cache has."""
    generator = torch.Generator().manual_seed(0)
    weight, multiply = prepack(matrix("cpu", 22, 168), True), prepacked_rows
    if digits == "all":
        integers = random_int8(22, 168, 32, seed=0)
        weight = prepack_in_lanes(integers, True)
        multiply = int8_matmul
    x = torch.randn(265, 168, generator=generator).to(dtype)
    added = torch.randn(265, 11, generator=generator).to(dtype)
    with use_backend("native"):
        every = multiply(x, weight, 1e-6, added)
        for rows in (slice(0, 1), slice(0, 6), slice(254, 262), slice(264, 265)):
            assert torch.equal(multiply(x[rows], weight, 1e-6, added[rows]), every[rows])
    if digits == "all":
        weight = prepack_int8(integers, True)
    other = REFERENCES[digits](x, *weight, 1e-6, added, torch.float32)
    error = (every.double() - other).norm() / other.norm()
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
    digits = random_int8(22, in_features, 64, seed=0)
    expected, by_loops = permute_lanes(prepack_int8(digits, gated)), prepack_in_lanes(digits, gated)
    assert torch.equal(by_loops.pieces, expected.pieces)
    assert torch.equal(by_loops.scales, expected.scales)
    assert by_loops[2:] == expected[2:]


@pytest.mark.parametrize("backend", ["torch", KERNELS, pytest.param("native", marks=compiled)])
def test_the_kernel_alone_rounds_weights_of_all_digits(backend, device):
    """A row with a single 1 gives a column of weights."""
    if backend == "native" and device.type == "cuda":
        pytest.skip("loops are for CPUs")
    packed = digits_of_many_scales(device)
    weight = prepack_int8(packed)
    expected = unrounded(packed)
    if backend == KERNELS:
        expected = decode_digits_reference(packed).double()
    for k in (0, 171, 327):
        x = torch.zeros(1, 328, device=device, dtype=torch.bfloat16)
        x[0, k] = 1
        with use_backend(backend):
            column = int8_matmul(x, weight, dtype=torch.float32)
        assert torch.equal(column[0].double(), expected[:, k])


@pytest.mark.parametrize("processors", [5, 132])
def test_order_of_sums_is_of_the_matrix_alone(processors):
    """Else the bits of a row would depend on how many there are."""
    for tiles in (1, 70, 700):
        for blocks in range(1, 72):
            for piece_bytes in (module.PIECE_BYTES.value, module.INT8_BYTES):
                tilings = [
                    _tiling(rows, tiles, blocks, processors, piece_bytes)
                    for rows in range(1, MAX_TEXTS + 1)
                ]
                assert len({(tiling.warps, tiling.steps) for tiling in tilings}) == 1
                assert max(tiling.shared_bytes for tiling in tilings) <= 48 << 10


def test_elements_that_15_bits_hold_are_multiplied_exactly(device):
    """As long as float32 holds the sums: of integers, times powers of two."""
    packed, integers = matrix(device), (row(device) * 8).round()
    integers[:, ::32] = 2**14 - 2**6  # the others of 32 keep their last bits
    packed = packed._replace(fraction=None, exponent=torch.zeros_like(packed.exponent))
    for scale in (1.0, 2.0**-100, 2.0**100):
        x = integers * scale
        expected = x.double() @ decode_digits_reference(packed).double().T
        with use_backend(KERNELS):
            y = row_matmul(x, prepack(packed), dtype=torch.float32)
        assert torch.equal(y.double(), expected)


@pytest.mark.parametrize(
    ("product", "rows", "value", "eps"),
    [(row_matmul, 1, torch.inf, None), (row_matmul, 1, torch.nan, 1e-6),
     (prepacked_rows, 3, torch.nan, 1e-6)],
)  # fmt: skip
def test_non_finite_values_are_not_hidden_and_stay_in_their_row(product, rows, value, eps, device):
    weight = prepack(matrix(device, rows=5))
    for k in (0, 171, 327):
        x = torch.ones(rows, 328, device=device, dtype=torch.bfloat16)
        x[-1, k] = value
        with use_backend(KERNELS):
            y = product(x, weight, eps, dtype=torch.float32)
        assert y[:-1].isfinite().all()
        assert not y[-1].isfinite().any()


@pytest.mark.parametrize(("shape", "tiling"), [((50, 1096), (4, 3, 4)), ((34, 640), (4, 4, 8, 96))])
def test_row_has_the_same_product_in_every_tiling(shape, tiling, monkeypatch, device):
    packed, x = matrix(device, *shape), row(device, shape[1])
    expected = x.double() @ decode_digits_reference(packed).double().T
    monkeypatch.setattr(of_row, "tiling_of", lambda *_: Tiling(*tiling))
    with use_backend(KERNELS):
        y = row_matmul(x, prepack(packed), dtype=torch.float32)
    assert (y - expected).abs().max() < 1e-4 * expected.abs().max()


def test_no_matrix_needs_more_memory_than_a_program_may_share():
    for tiles in (1, 40, 132, 133, 300, 1000, 5000):
        for blocks in range(1, MAX_COLUMNS // 128 + 1):
            tiling = of_row.tiling_of(tiles, blocks, 132)
            assert tiling.shared_bytes(blocks) <= 47 << 10
            assert tiling.height * -(-blocks // tiling.abreast) <= 3 * tiling.warps
            assert tiling.height <= 2 * tiling.warps


def parts_of_attention(device, parts, heads, width, filled) -> AttentionParts:
    """Draw parts of attention; those that are not filled have no numbers in them."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(parts, heads * width, generator=generator).bfloat16()
    totals = torch.rand(parts, heads, generator=generator) + 0.1
    values[filled:], totals[filled:] = torch.nan, torch.nan
    position = torch.tensor(96 * filled - 1, dtype=torch.int32, device=device)
    return AttentionParts(values.to(device), totals.to(device), position, 96)


@pytest.mark.parametrize(
    ("eps", "heads", "width", "filled"),
    [(None, 3, 64, 1), (1e-6, 4, 128, 2), (None, 4, 128, 5), (1e-6, 3, 64, 5)],
)
def test_parts_of_attention_are_averaged_first(eps, heads, width, filled, device):
    """To the last bit, unless the compiler joins a multiplication and an addition."""
    x, in_features = parts_of_attention(device, 5, heads, width, filled), heads * width
    weight = prepack(matrix(device, in_features=in_features))
    for backend in (KERNELS, "torch"):
        with use_backend(backend):
            ways = x, x.combine()[None]
            y, expected = (row_matmul(way, weight, eps, dtype=torch.float32) for way in ways)
        assert y.isfinite().all()
        if KERNELS == "interpreter":
            assert torch.equal(y, expected)
        assert (y - expected).norm() < 0.004 * expected.norm()


@pytest.mark.parametrize("backend", [KERNELS, "torch", "native"])
@pytest.mark.parametrize(
    ("rows", "gated", "eps", "adds"),
    [(2, True, 1e-6, False), (2, False, None, True), (5, False, 1e-6, True), (3, False, 1.0, True)],
)
def test_each_row_has_the_bits_that_it_has_alone(
    backend, rows, gated, eps, adds, monkeypatch, device
):
    """However rows are shared out: programs have as many each; of five by two, one is in both.

    Of three rows each has a program of its own, with more warps than there are sums of squares.
    """
    if backend == "native" and device.type == "cuda":
        pytest.skip("the native backend is for a CPU")
    n, k = (16, 4104) if rows == 3 else (50, 328)
    weight, x = prepack(matrix(device, n, k), gated), draw(rows, k, device=device)
    added = draw(rows, weight.out_features, device=device) if adds else None
    if rows == 5:
        monkeypatch.setattr(of_row, "programs_of_tiles", lambda *_: 2)
    with use_backend(backend):
        got = row_matmul(x, weight, eps, added)
        for row in range(rows):
            addend = added[row : row + 1] if adds else None
            assert torch.equal(got[row], row_matmul(x[row : row + 1], weight, eps, addend)[0])
