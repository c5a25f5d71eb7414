"""All 256 bytes, legal and not, and the order of the weights in a row."""

import pytest
import torch

from arbcli.kernels.codec.layout import row_bytes
from arbcli.kernels.codec.packing import illegal_bytes, pack_trits, unpack_trits


@pytest.mark.parametrize("byte", range(256))
def test_illegal_bytes_are_those_above_242(byte):
    packed = torch.tensor([[121, byte]], dtype=torch.uint8)
    assert illegal_bytes(packed) == (byte > 242)


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
