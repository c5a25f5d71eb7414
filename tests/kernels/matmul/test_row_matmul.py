"""A row times a prepacked matrix: how it is prepacked, and what its cases do not say."""

import pytest
import torch

from arbcli.kernels.attention.attend_parts import AttentionParts
from arbcli.kernels.codec.decode_digits import decode_digits_reference
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.matmul import prepacked
from arbcli.kernels.matmul import row_matmul as module
from arbcli.kernels.matmul.prepacked import decode_prepacked, prepack, prepacked_reference
from arbcli.kernels.matmul.row_matmul import MOST_COLUMNS, Tiling, row_matmul
from arbcli.kernels.runtime.backend import use_backend

KERNELS = "triton" if torch.cuda.is_available() else "interpreter"


def matrix(device, rows=20, in_features=328, group_size=32) -> Packed:
    generator = torch.Generator().manual_seed(0)
    return random_packed(rows, in_features, group_size, generator, spread=8).to(device)


def row(device, in_features=328) -> torch.Tensor:
    x = torch.randn(1, in_features, generator=torch.Generator().manual_seed(1))
    return x.to(device, torch.bfloat16)


@pytest.mark.parametrize("in_features", [8, 128, 328])
@pytest.mark.parametrize("group_size", [32, 96])
def test_prepacked_weights_are_the_packed_ones(group_size, in_features, device):
    packed = matrix(device, in_features=in_features, group_size=group_size)
    expected, weight = decode_digits_reference(packed), prepack(packed)
    for k in {0, in_features // 2, in_features - 1}:
        x = torch.zeros(1, in_features, device=device)
        x[0, k] = 1
        column = prepacked_reference(x, *weight, None, None, torch.float32)
        assert torch.equal(column[0], expected[:, k].double())
    assert torch.equal(decode_prepacked(weight.pieces)[:20, :in_features], expected.float())


@pytest.mark.parametrize("gated", [False, True])
def test_a_matrix_is_prepacked_some_rows_at_a_time(gated, monkeypatch, device):
    packed = matrix(device, rows=90)
    whole = prepack(packed, gated)
    monkeypatch.setattr(prepacked, "PREPACKED_AT_ONCE", 2 * 16 * 384)
    assert torch.equal(prepack(packed, gated).pieces, whole.pieces)


def test_a_gated_matrix_is_prepacked_by_halves(device):
    packed = matrix(device, rows=22)
    weight, halves, x = prepack(packed, gated=True), decode_digits_reference(packed), row(device)
    gate, up = (x.double() @ halves.double().T).chunk(2, dim=1)
    got = prepacked_reference(x, *weight, None, None, torch.float32)
    torch.testing.assert_close(got, gate * torch.sigmoid(gate) * up)


def test_elements_that_15_bits_hold_are_multiplied_exactly(device):
    """As long as float32 holds the sums: of integers, with one power of two a row."""
    packed, x = matrix(device), (row(device) * 8).round()
    packed = packed._replace(fraction=None, exponent=torch.zeros_like(packed.exponent))
    expected = x.double() @ decode_digits_reference(packed).double().T
    with use_backend(KERNELS):
        y = row_matmul(x, prepack(packed), dtype=torch.float32)
    assert torch.equal(y.double(), expected)


def test_an_element_is_off_by_little_of_the_largest_of_32(device):
    packed = matrix(device, rows=1, in_features=32)
    packed = packed._replace(fraction=None, exponent=torch.zeros_like(packed.exponent))
    weight, bound = decode_digits_reference(packed).double(), 2.0**-14
    for scale in (1.0, 2.0**-100, 2.0**100):
        x = row(device, 32) * torch.logspace(0, -6, 32, device=device).bfloat16() * scale
        with use_backend(KERNELS):
            y = row_matmul(x, prepack(packed), dtype=torch.float32)
        error = (y.double() - x.double() @ weight.T).abs()
        assert error.max() <= bound * x.abs().max() * weight.abs().sum()


def test_power_of_two_in_front_of_the_row_does_not_matter(device):
    weight, x = prepack(matrix(device)), row(device)
    with use_backend(KERNELS):
        y, scaled = (
            row_matmul(part, weight, 0.0, dtype=torch.float32) for part in (x, 2.0**40 * x)
        )
    assert torch.equal(y, scaled)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_what_is_not_finite_is_not_hidden(eps, value, device):
    weight = prepack(matrix(device, rows=5))
    for k in (0, 171, 327):
        x = torch.ones(1, 328, device=device, dtype=torch.bfloat16)
        x[0, k] = value
        with use_backend(KERNELS):
            y = row_matmul(x, weight, eps, dtype=torch.float32)
        assert not y.isfinite().any()


TILINGS = [
    ((34, 200), (1, 1, 4)), ((50, 1096), (4, 3, 4)), ((34, 640), (4, 4, 8, 96)),
    ((18, 1960), (1, 1, 16, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "tiling"), TILINGS)
def test_every_way_to_share_work_out(shape, tiling, monkeypatch, device):
    packed, x = matrix(device, *shape), row(device, shape[1])
    expected = x.double() @ decode_digits_reference(packed).double().T
    monkeypatch.setattr(module, "tiling_of", lambda *_: Tiling(*tiling))
    with use_backend(KERNELS):
        y = row_matmul(x, prepack(packed), dtype=torch.float32)
    assert (y - expected).abs().max() < 1e-4 * expected.abs().max()


def test_matrices_of_a_large_model_are_shared_out_as_was_fastest():
    found = [
        module.tiling_of(tiles, in_features // 128, 132)
        for tiles, in_features in ((384, 2048), (128, 2048), (704, 2048), (128, 5632))
    ]
    assert found == [(4, 3, 8, 128), (1, 1, 16, 64), (4, 4, 8, 96), (4, 1, 8, 128)]


def test_no_matrix_needs_more_memory_than_a_program_may_share():
    for tiles in (1, 40, 132, 133, 300, 1000, 5000):
        for blocks in range(1, MOST_COLUMNS // 128 + 1):
            tiling = module.tiling_of(tiles, blocks, 132)
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


@pytest.mark.parametrize("filled", [1, 2, 5])
@pytest.mark.parametrize(("heads", "width"), [(3, 64), (4, 128)])
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_parts_of_attention_are_averaged_first(eps, heads, width, filled, device):
    """To the last bit, unless the compiler joins a multiplication and an addition."""
    x, in_features = parts_of_attention(device, 5, heads, width, filled), heads * width
    weight = prepack(matrix(device, in_features=in_features))
    for backend in (KERNELS, "torch"):
        with use_backend(backend):
            ways = x, x.average()[None]
            y, expected = (row_matmul(each, weight, eps, dtype=torch.float32) for each in ways)
        assert y.isfinite().all()
        if KERNELS == "interpreter":
            assert torch.equal(y, expected)
        assert (y - expected).norm() < 0.004 * expected.norm()


def test_a_row_of_a_wider_matrix(device):
    wide, weight = torch.ones(2, 331, device=device, dtype=torch.bfloat16), prepack(matrix(device))
    with use_backend(KERNELS):
        one, alone = (row_matmul(x, weight) for x in (wide[1:, :328], wide[1:, :328].clone()))
    assert torch.equal(one, alone)


def test_rejects_what_does_not_fit(device):
    weight, x = prepack(matrix(device)), row(device)
    with use_backend(KERNELS):
        with pytest.raises(ValueError, match="need M == 1"):
            row_matmul(x.repeat(2, 1), weight)
        with pytest.raises(ValueError, match="in_features = 17928"):
            row_matmul(row(device, 17_928), weight._replace(in_features=17_928))
