"""Verification of `arbcli.kernels.update.average_weights`."""

import torch
from torch import Tensor

from arbcli.kernels.update.average_weights import average_weights
from arbcli.verify.kernels.codec.packing import unpack_trits_reference
from arbcli.verify.kernels.update.random_bits import random_halves_reference
from arbcli.verify.kernels.update.step_trits import draw_weights
from arbcli.verify.verification import CaseGenerator, Verification, filled


def average_weights_reference(
    packed: Tensor, remainder: Tensor, average: Tensor, key: Tensor, turn: Tensor, rate: Tensor,
    radix: int, shift: int, nibble: bool,
) -> Tensor:  # fmt: skip
    """Compute the new average, in int64."""
    low, a = remainder.to(torch.int64), average.to(torch.int64)
    if nibble:
        low = (low % 16 + 8) % 16 - 8
    z = unpack_trits_reference(packed, remainder.shape[1]).to(torch.int64) * radix + low
    random = random_halves_reference(int(key), *remainder.shape, turn=turn).to(packed.device)
    step = torch.div((z - a * 2**shift) * int(rate), 2**shift, rounding_mode="floor")
    step = torch.div(step + random, 2**16, rounding_mode="floor")
    return (a + step).to(torch.int8)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    radix, largest, shift, nibble = rng.pick(
        ((64, 63, 0, False), (64, 127, 1, False), (32, 127, 1, False), (14, 7, 0, True))
    )
    packed, remainder = draw_weights(rng, n, k, radix, largest)
    if nibble:
        remainder = rng.view(rng.integers(-8, 7, n, k) * 16 + remainder % 16)
    limit = (radix + largest) >> shift
    average = rng.integers(-limit, limit, n, k)
    rate = rng.scalar(rng.pick((0, 1, 4096, 2**15, 2**16)))
    turn = rng.scalar(rng.integer(2**16))
    return packed, remainder, average, rng.key(), turn, rate, radix, shift, nibble


average_weights_verification = Verification(
    average_weights, average_weights_reference, compared=("average",), draw=_draw,
    changed={"copied": {"rate": filled(2**16)}, "kept": {"rate": filled(0)}},
    needs_rows=False,
)  # fmt: skip
