"""The product for few rows of x: every plan, and inf."""

import math

import pytest
import torch
from marks import mostly_slow

from arbcli.kernels.codec.decode_digits import decode_digits_reference
from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.matmul import few_rows as module
from arbcli.kernels.matmul.few_rows import few_rows, fits_few_rows


@pytest.mark.parametrize(
    ("rows", "plan"),
    mostly_slow(
        [
            (2, {"TILES": 1, "HEIGHT": 1, "N_WARPS": 2, "K_WARPS": 1, "ABREAST": 4, "AHEAD": 2}),
            (3, {"TILES": 1, "HEIGHT": 1, "N_WARPS": 1, "K_WARPS": 2, "ABREAST": 1, "AHEAD": 2}),
            (8, {"TILES": 1, "HEIGHT": 2, "N_WARPS": 2, "K_WARPS": 1, "ABREAST": 1, "AHEAD": 2}),
            (13, {"TILES": 2, "HEIGHT": 2, "N_WARPS": 2, "K_WARPS": 1, "ABREAST": 1, "AHEAD": 1}),
            (17, {"TILES": 4, "HEIGHT": 1, "N_WARPS": 2, "K_WARPS": 1, "ABREAST": 1, "AHEAD": 1}),
        ],
        lambda rows, plan: rows <= 8,
    ),
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


NOT_FINITE = (float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize("value", mostly_slow(NOT_FINITE, math.isnan))
def test_a_row_that_is_not_finite_spoils_only_itself(device, value):
    generator = torch.Generator().manual_seed(0)
    packed = random_packed(20, 805, 32, generator, spread=8).to(device)
    for k in (0, 417, 804):
        x = torch.randn(3, 805, generator=generator).to(device, torch.bfloat16)
        x[1, k] = value
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
    found = module._on_16_bytes(x)
    assert torch.equal(found[:, : x.shape[1]], x)
    assert found.stride(1) == 1
    assert found.stride(0) * found.itemsize % 16 == found.data_ptr() % 16 == 0


@pytest.mark.parametrize(("stride", "start"), [(8, 0), (8, 4), (8, 1), (8, 2), (6, 0), (7, 0)])
def test_digits_are_read_by_words_where_they_begin_at_multiples_of_4(stride, start):
    digits = torch.zeros(64, dtype=torch.int8)[start:].as_strided((3, 5), (stride, 1))
    assert module._in_words(digits) == (stride % 4 == 0 and start % 4 == 0)
    assert not module._in_words(torch.zeros(8, 8, dtype=torch.int8).T)
