"""Verification of `arbcli.kernels.update.step_trits`."""

import math

import torch
from torch import Tensor

from arbcli.kernels.codec.packing import pack_trits_torch
from arbcli.kernels.update.step_trits import MAX_DECAY, step_by_direction, step_by_moment
from arbcli.verify.kernels.codec.packing import pack_trits_reference, unpack_trits_reference
from arbcli.verify.kernels.update.direction import draw_gains, fixed_point_reference
from arbcli.verify.kernels.update.random_bits import draw_turn, random_halves_reference
from arbcli.verify.verification import REFUSED, CaseGenerator, Verification, filled


def step_by_moment_reference(
    packed: Tensor, remainder: Tensor, moment: Tensor | None, key: Tensor, turn: Tensor | None,
    step_size: Tensor, squares: Tensor, limit: Tensor, ok: Tensor, flips: Tensor, radix: int,
    remainder_max: int, decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `step_by_moment` (`packed`, `remainder`, `flips`)."""
    nibble = moment is None
    u = (remainder if moment is None else moment).to(torch.int64)
    u = torch.div(u, 16 if nibble else 1, rounding_mode="floor")
    gain = 0.0
    if ok:  # in float32, whose rounding the gain is defined with
        size, total, number = (
            torch.tensor(x, dtype=torch.float32)
            for x in (int(step_size) / 2**16, int(squares), remainder.numel())
        )
        root = torch.tensor(math.sqrt(total / number), dtype=torch.float32)
        gain = float((size / root).clamp(max=2**23) + 0.5) // 1
    step = u * int(gain)
    return _step_reference(
        packed, remainder, step, key, limit, ok, flips, radix, remainder_max, nibble,
        turn, decay,
    )  # fmt: skip


def step_by_direction_reference(
    packed: Tensor, remainder: Tensor, values: Tensor, row_gain: Tensor | None,
    column_gain: Tensor | None, key: Tensor, gain: Tensor, shift: Tensor, limit: Tensor, ok: Tensor,
    flips: Tensor, radix: int, remainder_max: int, decay: Tensor | None = None,
    turn: Tensor | None = None, nibble: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `step_by_direction` (`packed`, `remainder`, `flips`)."""
    u = fixed_point_reference(values, row_gain, column_gain, 2**18)
    step = torch.div(u * gain.to(torch.int64), 2 ** int(shift), rounding_mode="floor")
    return _step_reference(
        packed, remainder, step, key, limit, ok, flips, radix, remainder_max, nibble,
        turn, decay,
    )  # fmt: skip


def _step_reference(
    packed: Tensor, remainder: Tensor, step: Tensor, key: Tensor, limit: Tensor, ok: Tensor,
    flips: Tensor, radix: int, remainder_max: int, nibble: bool,
    turn: Tensor | None, decay: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not ok:
        return packed, remainder, flips
    trits = unpack_trits_reference(packed, remainder.shape[1]).to(torch.int64)
    state = remainder.to(torch.int64)
    low = (state % 16 + 8) % 16 - 8 if nibble else state
    step = step.clamp(-int(limit), int(limit))
    random = random_halves_reference(int(key), *remainder.shape, turn=turn).to(packed.device)
    z = trits * radix + low
    if decay is not None:
        step += torch.div(z * int(decay), 2**8, rounding_mode="floor")
    z = torch.div(z * 2**16 - step + random, 2**16, rounding_mode="floor")
    z = z.clamp(-radix - remainder_max, radix + remainder_max)
    new = torch.sign(z) * (z.abs() > radix // 2)
    low = z - new * radix
    if nibble:
        low = torch.div(state, 16, rounding_mode="floor") * 16 + low % 16
    packed = pack_trits_reference(new.to(torch.int8))
    return packed, low.to(torch.int8), flips + (new != trits).sum()


def draw_weights(
    rng: CaseGenerator, n: int, k: int, radix: int, largest: int
) -> tuple[Tensor, Tensor]:
    """Draw trits and remainders over the full range of z."""
    z = rng.integers(-radix - largest, radix + largest, n, k, dtype=torch.int32)
    trits = torch.sign(z) * (z.abs() > radix // 2)
    packed = rng.view(pack_trits_torch(trits.to(torch.int8)))
    return packed, rng.view((z - radix * trits).to(torch.int8))


def _draw_state(rng: CaseGenerator, n: int, k: int) -> tuple[Tensor, Tensor, int, int, bool]:
    """Draw trits, remainders, radix, largest remainder, and whether remainders include m."""
    nibble = rng.integer(2) == 1
    radix, largest = (8, 7) if nibble else (32, 127)
    packed, remainder = draw_weights(rng, n, k, radix, largest)
    if nibble:
        remainder = rng.view(rng.integers(-7, 7, n, k) * 16 + remainder % 16)
    return packed, remainder, radix, largest, nibble


def _draw_by_moment(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    packed, remainder, radix, largest, nibble = _draw_state(rng, n, k)
    moment = None if nibble else rng.integers(-127, 127, n, k)
    step_size, squares, flips = (
        torch.tensor(value, device=rng.device)
        for value in (rng.integer(2**36), rng.integer(n * k * largest**2), rng.integer(1000))
    )
    limit = rng.scalar(rng.pick((2**14, 2**19, 2**23)))
    return (
        packed, remainder, moment, rng.key(), draw_turn(rng), step_size, squares, limit, rng.ok(),
        flips, radix, largest, _draw_decay(rng),
    )  # fmt: skip


def _draw_decay(rng: CaseGenerator) -> Tensor | None:
    return rng.scalar(rng.integer(MAX_DECAY + 1)) if rng.integer(2) else None


def _draw_by_direction(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    packed, remainder, radix, largest, nibble = _draw_state(rng, n, k)
    gains = draw_gains(rng, n, k, rng.pick((2.0**14, 2.0**16, 2.0**19)))
    limit = rng.pick((2**14, 2**19, 2**23))
    control = map(rng.scalar, (rng.integer(2**12), 6 + rng.integer(8), limit))
    return (
        packed, remainder, rng.reals(n, k), *gains, rng.key(), *control, rng.ok(),
        torch.tensor(rng.integer(1000), device=rng.device),
        radix, largest, _draw_decay(rng), draw_turn(rng), nibble,
    )  # fmt: skip


step_by_moment_verification = Verification(
    step_by_moment, step_by_moment_reference,
    changed=REFUSED | {
        "tiny step": {"step_size": lambda x: x >> 20},
        "huge step": {"step_size": filled(2**45)},
        "no moment": {"squares": torch.zeros_like},
    },
    compared=("packed", "remainder", "flips"), draw=_draw_by_moment, needs_rows=False,
    values={"ok": CaseGenerator.ok},
)  # fmt: skip
step_by_direction_verification = Verification(
    step_by_direction, step_by_direction_reference,
    changed=REFUSED | {f"saturated {x:+}": {"values": filled(x)} for x in (1e30, -1e30)},
    compared=("packed", "remainder", "flips"), draw=_draw_by_direction, needs_rows=False,
    values={"ok": CaseGenerator.ok},
)  # fmt: skip
