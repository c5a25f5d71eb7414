"""The product for few rows of x: its decoder on every pair of bytes, every plan, and inf."""

import math

import pytest
import torch
from marks import mostly_slow

from arbcli.kernels.codec.decode_digits import decode_digits_reference
from arbcli.kernels.codec.layout import LARGEST_BYTE
from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.codec.warp_products import HAS_PTX, spread, take_digits
from arbcli.kernels.matmul import few_rows as module
from arbcli.kernels.matmul.few_rows import few_rows, fits_few_rows
from arbcli.kernels.runtime._triton import tl, triton


@triton.jit
def _trits_kernel(words_ptr, trits_ptr, COUNT: tl.constexpr, PTX: tl.constexpr):
    offsets = tl.program_id(0) * 128 + tl.arange(0, 128)
    mask = offsets < COUNT
    qs = spread(tl.load(words_ptr + offsets, mask=mask, other=0), PTX)
    for digit in tl.static_range(4, -1, -1):
        trits, qs = take_digits(qs, digit, PTX)
        for i in tl.static_range(2):
            tl.store(trits_ptr + (2 * digit + i) * COUNT + offsets, trits[i], mask=mask)


@pytest.mark.slow  # every trit of random matrices is compared elsewhere
def test_every_pair_of_bytes_is_decoded(device):
    byte = torch.arange(LARGEST_BYTE + 1, device=device)
    first, second = (b.flatten() for b in torch.meshgrid(byte, byte, indexing="ij"))
    pair = first + 256 * second
    words = torch.cat([pair, pair << 16]).to(torch.int32)
    decoded = torch.empty(10, len(words), dtype=torch.int32, device=device)
    _trits_kernel[(triton.cdiv(len(words), 128),)](words, decoded, COUNT=len(words), PTX=HAS_PTX)
    bytes_of_word = words.view(torch.uint8).view(-1, 2, 2).long()  # (words, half, 2)
    halves = decoded.view(5, 2, -1)  # (digit, half, words) of two bf16
    for digit in range(5):
        trits = bytes_of_word // 3**digit % 3 - 1
        signed = trits * (2 if digit % 2 else -2)
        got = halves[digit].contiguous().view(torch.bfloat16).view(2, -1, 2).movedim(0, 1)
        assert torch.equal(got.float(), signed.float())


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
