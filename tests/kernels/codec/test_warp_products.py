"""Decoding of packed trits in registers: on every pair of bytes."""

import pytest
import torch

from arbcli.kernels.codec.layout import LARGEST_BYTE
from arbcli.kernels.codec.warp_products import HAS_PTX, spread, take_digits
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
