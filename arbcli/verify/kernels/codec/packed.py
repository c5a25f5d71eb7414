"""References and random inputs for `arbcli.kernels.codec.packed`."""

from functools import partial

import torch

from arbcli.kernels.codec.layout import LARGEST_BYTE, row_bytes
from arbcli.kernels.codec.packed import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    OCTAVE,
    Packed,
    num_groups,
)


def random_packed(
    rows: int, in_features: int, group_size: int, generator: torch.Generator, spread: int = 127
) -> Packed:
    """Draw packed trits, E and F on the generator's device; E is within `spread` of -1."""
    draw = partial(torch.randint, generator=generator, device=generator.device)
    trits = draw(0, LARGEST_BYTE + 1, (rows, row_bytes(in_features)), dtype=torch.uint8)
    shape = (rows, num_groups(in_features, group_size))
    low, high = max(LOWEST_EXPONENT, -1 - spread), min(HIGHEST_EXPONENT, spread - 1)
    exponent = draw(low, high + 1, shape, dtype=torch.int8)
    fraction = draw(0, OCTAVE, shape, dtype=torch.int8)
    return Packed(trits, exponent, fraction, in_features, group_size)
