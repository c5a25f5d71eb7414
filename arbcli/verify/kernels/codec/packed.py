"""Changed cases of operations with packed matrices: see `arbcli.kernels.codec.packed`."""

from collections.abc import Callable
from typing import Any

import torch

from arbcli.kernels.codec import packed as codec
from arbcli.kernels.codec.layout import MAX_BYTE


def _set_octave(exponent: int) -> Callable[[codec.Packed], codec.Packed]:
    return lambda packed: packed._replace(exponent=torch.full_like(packed.exponent, exponent))


def _set_remainder(radix: int, nibble: bool) -> Callable[[codec.Packed], codec.Packed]:
    def change(packed: codec.Packed) -> codec.Packed:
        size, device = (packed.out_features, packed.in_features), packed.trits.device
        digits = torch.arange(size[0] * size[1], device=device) * 37 % 256 - 128
        remainder = digits.to(torch.int8).view(size)
        return packed._replace(remainder=remainder, radix=radix, nibble=nibble)

    return change


ALL_DIGITS: dict[str, dict[str, Any]] = {
    "eight bits": {"packed": _set_remainder(64, False)},
    "four bits": {"packed": _set_remainder(14, True)},
}
"""Changed cases of an operation with weights of all digits."""
SPECIAL_WEIGHTS: dict[str, dict[str, Any]] = {
    "lowest octave": {"packed": _set_octave(codec.LOWEST_EXPONENT)},
    "highest octave": {"packed": _set_octave(codec.HIGHEST_EXPONENT)},
    "zeros": {"packed": lambda x: x._replace(trits=torch.full_like(x.trits, MAX_BYTE // 2))},
}
"""Changed cases of an operation with packed weights."""
