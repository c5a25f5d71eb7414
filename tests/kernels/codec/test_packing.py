"""All 256 bytes, legal and not, and the order of the weights in a row."""

import pytest
import torch

from arbcli.kernels.codec.layout import BLOCK, row_bytes
from arbcli.kernels.codec.packing import illegal_bytes, pack_trits, unpack_trits


def test_every_byte_unpacks_to_its_base_3_digits():
    legal = torch.arange(243, dtype=torch.uint8)[:, None]
    powers = torch.tensor([1, 3, 9, 27, 81])
    digits = unpack_trits(legal, 5).to(torch.int64) + 1
    assert torch.equal((digits * powers).sum(1), torch.arange(243))
    assert digits.min() == 0
    assert digits.max() == 2


def test_every_byte_packs_back_to_itself():
    legal = torch.arange(243, dtype=torch.uint8)[:, None]
    assert torch.equal(pack_trits(unpack_trits(legal, 5)), legal)


@pytest.mark.parametrize("byte", range(256))
def test_illegal_bytes_are_those_above_242(byte):
    packed = torch.tensor([[121, byte]], dtype=torch.uint8)
    assert illegal_bytes(packed) == (byte > 242)


def test_digit_of_a_block_is_32_neighbours():
    trits = torch.zeros(1, BLOCK, dtype=torch.int8)
    trits[0, 32 * 3 + 7] = 1
    packed = pack_trits(trits)
    assert packed[0, 7] == 121 + 27  # all zeros is 121
    assert (packed != 121).sum() == 1


@pytest.mark.parametrize("in_features", [1, 4, 5, 6, 159, 160, 161, 164, 165, 166, 319, 320, 1311])
def test_row_takes_no_more_bytes_than_its_last_block_needs(in_features):
    assert -(-in_features // 5) <= row_bytes(in_features)
    assert row_bytes(in_features) == in_features // 160 * 32 + -(-(in_features % 160) // 5)


@pytest.mark.parametrize("in_features", [1, 3, 33, 123, 161, 323])
def test_padding_is_trit_zero(in_features):
    ones = torch.ones(2, in_features, dtype=torch.int8)
    digits = unpack_trits(pack_trits(ones), in_features)
    assert digits.sum() == 2 * in_features
    total = sum(
        int(pack_trits(ones)[0, j]) // 3**d % 3 - 1
        for j in range(row_bytes(in_features))
        for d in range(5)
    )
    assert total == in_features
