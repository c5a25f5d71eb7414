"""Verification of `arbcli.kernels.update.last_bits`."""

import torch
from torch import Tensor

from arbcli.kernels.update.last_bits import (
    last_bits,
    take_last_bits_,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.packing import pack_trits_reference, unpack_trits_reference
from arbcli.verify.kernels.update.step_trits import draw_weights
from arbcli.verify.verification import Verification


def last_bits_reference(trits: Tensor, remainder: Tensor, radix: int, nibble: bool) -> Tensor:
    """Compute the reference result of `last_bits`, in int64."""
    bits = _z_reference(trits, remainder, radix, nibble) % 16
    if len(bits) % 2:
        bits = torch.cat([bits, torch.zeros_like(bits[:1])])
    return (bits[::2] + 16 * bits[1::2]).to(torch.uint8)


def take_last_bits_reference(
    trits: Tensor, remainder: Tensor, bits: Tensor, radix: int, nibble: bool
) -> tuple[Tensor, Tensor]:
    """Compute the reference result of `take_last_bits_` in `trits` and `remainder`, in int64."""
    z = _z_reference(trits, remainder, radix, nibble)
    low_bits = torch.stack([bits.long() % 16, bits.long() // 16], dim=1).flatten(0, 1)[: len(z)]
    z += (low_bits - z + 8) % 16 - 8
    new = torch.sign(z) * (z.abs() > radix // 2)
    low = z - new * radix
    if nibble:
        low = torch.div(remainder.long(), 16, rounding_mode="floor") * 16 + low % 16
    return pack_trits_reference(new.to(torch.int8)), low.to(torch.int8)


def _z_reference(trits: Tensor, remainder: Tensor, radix: int, nibble: bool) -> Tensor:
    low = remainder.long()
    low = (low % 16 + 8) % 16 - 8 if nibble else low
    return unpack_trits_reference(trits, remainder.shape[1]).long() * radix + low


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    nibble = rng.below(2) == 1
    radix = 14 if nibble else 64
    packed, remainder = draw_weights(rng, n, k, radix, 7 if nibble else 63)
    if nibble:
        remainder = rng.view(rng.integers(-7, 7, n, k) * 16 + remainder % 16)
    return packed, remainder, radix, nibble


last_bits_verification = Verification(
    last_bits, last_bits_reference, draw=_draw, needs_rows=False,
)  # fmt: skip


def _draw_taken(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    *state, radix, nibble = _draw(rng, group_size, m, n, k)
    bits = rng.integers(0, 255, (n + 1) // 2, k, dtype=torch.uint8).contiguous()
    return *state, bits, radix, nibble


take_last_bits_verification = Verification(
    take_last_bits_, take_last_bits_reference, compared=("trits", "remainder"),
    draw=_draw_taken, needs_rows=False,
)  # fmt: skip
