"""The generator: the same words everywhere, and none favoured."""

import pytest
import torch

from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.update.random_bits import random_bits, random_halves, stream_keys
from arbcli.kernels.update.step_scales import step_scales
from arbcli.verify.kernels.update.random_bits import random_bits_reference, random_halves_reference


def unsigned(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int64) & 0xFFFFFFFF


def int32(*words: int) -> torch.Tensor:
    return torch.tensor([word - 2**32 if word >> 31 else word for word in words], dtype=torch.int32)


GOLDEN_WORDS = {
    0: [[0x00000000, 0x01FCE552, 0xFBA67A6E], [0x54ACEA80, 0x9F0407BF, 0x3813EB8C]],
    0x12345678: [[0xD9DC1D15, 0x09E65EDB, 0x24AD1C5F], [0xC1EC35A7, 0x738D0628, 0x929CFB34]],
}
"""Of rows 0 and 7, columns 0, 1 and 1000, by key; computed apart from this project's code."""


@pytest.mark.parametrize("key", GOLDEN_WORDS)
def test_words_are_the_published_hash(key):
    """Runs of another version of the program draw the same, and a weaker hash is seen."""
    words = random_bits(int32(key)[0], int32(0, 7), int32(0, 1, 1000))
    assert unsigned(words).tolist() == GOLDEN_WORDS[key]
    assert (
        random_bits_reference(key, 8, 1001)[[0, 7]][:, [0, 1, 1000]].tolist() == (GOLDEN_WORDS[key])
    )


def test_kernels_draw_the_published_words(device):
    """A step of v by half a unit moves it where the low half of the word is 2**15 or more."""
    exponent, fraction = torch.zeros(2, 8, 1001, dtype=torch.int8, device=device)
    slope, one = torch.full((8, 1001), 0.5, device=device), torch.tensor(2.0**16, device=device)
    control = (value[None].to(device)[0] for value in int32(0x12345678, 1, 0, 1))
    with use_backend("triton" if device.type == "cuda" else "interpreter"):
        step_scales(exponent, fraction, slope, one, *control)
    moved = (exponent.cpu() < 0)[[0, 7]][:, [0, 1, 1000]]
    expected = torch.tensor(GOLDEN_WORDS[0x12345678]) % 2**16 >= 2**15
    assert torch.equal(moved, expected)


def test_keys_are_the_published_keys():
    seed, tick = int32(3, 5)
    assert unsigned(stream_keys(seed, tick, num_tensors=2, num_streams=5)).tolist() == [
        [0xB4274FF5, 0x1629FEEE, 0x19B27CA9, 0x72F19786, 0x80A29C2E],
        [0xC0CD606B, 0x794728D1, 0xF1293C5D, 0x9548B7B7, 0xCA738A78],
    ]


def test_two_rows_share_the_words_of_a_pair():
    key, columns = torch.tensor(-9, dtype=torch.int32), torch.arange(41, dtype=torch.int32)
    words = random_bits_reference(-9, 4, 41)
    for rows in (slice(0, 7), slice(2, 5), slice(4, 8)):
        halves = random_halves(key, rows, columns)
        assert torch.equal(halves.long(), random_halves_reference(-9, 8, 41)[rows])
        for n, row in zip(range(rows.start, rows.stop), halves, strict=True):
            assert torch.equal(row.long(), words[n // 2] // 2 ** (16 * (n % 2)) % 2**16)
