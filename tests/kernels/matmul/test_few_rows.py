"""Products of few rows and in eight bits."""

import math

import pytest
import torch

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.matmul import few_rows as module
from arbcli.kernels.matmul.few_rows import few_rows, fits_few_rows
from arbcli.kernels.matmul.fp8_matmul import fp8_matmul
from arbcli.kernels.matmul.quantise_rows import quantise_rows
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.kernels.matmul.quantise_rows import (
    quantise_rows_verification,
)


@pytest.mark.parametrize(
    ("rows", "plan"),
    [
        (3, {"TILES": 1, "HEIGHT": 1, "N_WARPS": 1, "K_WARPS": 2, "ABREAST": 1, "AHEAD": 2}),
        (13, {"TILES": 2, "HEIGHT": 2, "N_WARPS": 2, "K_WARPS": 1, "ABREAST": 1, "AHEAD": 1}),
    ],
)
def test_every_plan_gives_the_product(device, monkeypatch, rows, plan):
    monkeypatch.setattr(module, "_plan", lambda *_: (plan, None))
    generator = torch.Generator().manual_seed(0)
    packed = random_packed(36, 805, 32, generator, spread=8)
    # read where it is, with what is after an odd number of columns
    x = torch.full((rows, 816), math.nan, dtype=torch.bfloat16, device=device)[:, :805]
    x.copy_(torch.randn(rows, 805, generator=generator))
    expected = x.cpu().double() @ decode_digits_reference(packed).double().T
    y = few_rows(x, packed.to(device), torch.float32)
    assert (y.cpu() - expected).norm() < 1e-5 * expected.norm()


def test_non_finite_row_spoils_only_itself(device):
    generator = torch.Generator().manual_seed(0)
    packed = random_packed(20, 805, 32, generator, spread=8).to(device)
    for k in (0, 417, 804):
        x = torch.randn(3, 805, generator=generator).to(device, torch.bfloat16)
        x[1, k] = torch.nan
        assert fits_few_rows(x, packed)
        y = few_rows(x, packed, torch.float32)
        assert y[[0, 2]].isfinite().all()
        assert not y[1].isfinite().any()


@pytest.mark.parametrize("columns", [8, 12, 13, 20])
@pytest.mark.parametrize("start", [0, 4, 8])
def test_rows_are_read_16_bytes_at_a_time_where_they_begin_at_multiples_of_16(columns, start):
    """Others are copied, those of 8 bytes too: a GPU refuses what is not aligned."""
    wide = torch.randn(3, 16 + columns - columns % 4)[:, start:].bfloat16()
    x = wide[:, : min(columns, wide.shape[1])]
    aligned = module._on_16_bytes(x)
    assert torch.equal(aligned[:, : x.shape[1]], x)
    assert aligned.stride(1) == 1
    assert aligned.stride(0) * aligned.itemsize % 16 == aligned.data_ptr() % 16 == 0


@pytest.mark.parametrize(("stride", "start"), [(8, 0), (8, 4), (8, 1), (8, 2), (6, 0), (7, 0)])
def test_digits_are_read_by_words_where_they_begin_at_multiples_of_4(stride, start):
    digits = torch.zeros(64, dtype=torch.int8)[start:].as_strided((3, 5), (stride, 1))
    assert module._in_words(digits) == (stride % 4 == 0 and start % 4 == 0)
    assert not module._in_words(torch.zeros(8, 8, dtype=torch.int8).T)


def matrix(outputs: int, inputs: int, device: torch.device | str = "cpu") -> Packed:
    generator = torch.Generator().manual_seed(0)
    return random_packed(outputs, inputs, 32, generator, spread=2).to(device)


def product(x: torch.Tensor, packed: Packed, **options) -> torch.Tensor:
    return fp8_matmul(*quantise_rows(x), packed, dtype=x.dtype, **options)


def test_numbers_that_eight_bits_hold_are_multiplied_exactly(device):
    packed = matrix(32, 64, device)._replace(fraction=None)
    x = torch.randint(-8, 9, (70, 64)).float().to(device)
    weight = decode_weight(packed, torch.float32)
    assert torch.equal(product(x, packed), x @ weight.T)


def test_non_finite_row_gives_nan(device):
    packed = matrix(32, 64, device)
    x = torch.ones(70, 64, device=device)
    x[3, 5] = torch.inf
    finite = product(x, packed).isfinite().all(dim=1)
    assert finite.tolist() == [row != 3 for row in range(70)]


@pytest.mark.parametrize(
    "run",
    [quantise_rows_verification.triton, quantise_rows_verification.torch],
    ids=["triton", "torch"],
)
@pytest.mark.parametrize(
    ("width", "place", "value"),
    [(40, 7, torch.inf), (2100, 7, -torch.inf), (2100, 1500, torch.nan), (2100, 2099, torch.inf)],
)
def test_non_finite_row_stays_non_finite_and_changes_no_other(
    run, value, width, place, device, monkeypatch
):
    """Rows that are read in turns, of 1024 here, keep what any of the turns has seen."""
    monkeypatch.setattr("arbcli.kernels.matmul.quantise_rows.WHOLE_ROW", 64)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(device)
    whole = run(x)
    x[1, place] = value
    q, scale = run(x)
    assert scale.isfinite().flatten().tolist() == [True, False, True]
    for got, expected in zip((q, scale), whole, strict=True):
        assert torch.equal(got[::2], expected[::2])


def test_largest_of_a_row_uses_the_range():
    q, scale = quantise_rows(torch.tensor([[3.0, -5.0], [2.0**-9, 0.0], [0.0, 0.0]]))
    assert q.float().tolist() == [[96.0, -160.0], [128.0, 0.0], [0.0, 0.0]]
    assert scale[:2].flatten().tolist() == [2.0**-5, 2.0**-16]
