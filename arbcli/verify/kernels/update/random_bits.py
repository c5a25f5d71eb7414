"""References and random inputs for `arbcli.kernels.update.random_bits`."""

import torch
from torch import Tensor

from arbcli.verify.case_generator import CaseGenerator

_MASK = 0xFFFFFFFF


def mix_reference(x: int) -> int:
    """Scramble one unsigned 32-bit word; a bijection."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def random_bits_reference(key: int, rows: int, columns: int) -> Tensor:
    """Compute (rows, columns) int64 random words in 0..2**32-1, one Python integer at a time."""
    words = [
        [
            mix_reference((k * 0x9E3779B9 & _MASK) ^ mix_reference(n ^ key & _MASK))
            for k in range(columns)
        ]
        for n in range(rows)
    ]
    return torch.tensor(words, dtype=torch.int64).reshape(rows, columns)


def random_halves_reference(
    key: int, rows: int, columns: int, *, turn: Tensor | None = None
) -> Tensor:
    """Compute (rows, columns) int64 in 0..65535: half a word each, the high one in odd rows."""
    words = random_bits_reference(key, -(-rows // 2), columns)
    halves = torch.stack([words % 2**16, words // 2**16], dim=1).flatten(0, 1)[:rows]
    return halves if turn is None else (halves + int(turn)) % 2**16


def draw_turn(rng: CaseGenerator) -> Tensor | None:
    """Draw an offset of random bits, or none."""
    return rng.scalar(rng.integer(2**16)) if rng.integer(2) else None
