"""Verification of `arbcli.kernels.update.blend_moment`."""

import torch
from torch import Tensor

from arbcli.kernels.update.blend_moment import blend_moment, moment_max
from arbcli.verify.kernels.update.direction import draw_gains, fixed_point_reference
from arbcli.verify.kernels.update.random_bits import draw_turn, random_halves_reference
from arbcli.verify.verification import REFUSED, CaseGenerator, Verification, filled


def blend_moment_reference(
    moment: Tensor, values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None,
    key: Tensor, ok: Tensor, squares: Tensor, decay: int, gain: Tensor, shift: Tensor,
    nibble: bool, turn: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the reference result of `blend_moment` in `moment` and in `squares`, in int64."""
    if not ok:
        return moment, squares
    state = moment.to(torch.int64)
    old = torch.div(state, 16, rounding_mode="floor") if nibble else state
    u = fixed_point_reference(values, row_gain, column_gain, 2**21)
    added = torch.div(u * gain.to(torch.int64), 2 ** int(shift), rounding_mode="floor")
    blended = old * decay + added
    random = random_halves_reference(int(key), *moment.shape, turn=turn).to(moment.device)
    new = torch.div(blended + random, 2**16, rounding_mode="floor")
    largest = 7 if nibble else 127
    new = new.clamp(-largest, largest)
    total = squares + (new * new).sum()
    return (new * 16 + state % 16 if nibble else new).to(torch.int8), total


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    nibble = rng.integer(2) == 1
    largest = moment_max(nibble)
    moment = rng.integers(-largest, largest, n, k)
    if nibble:
        moment = rng.view(moment * 16 + rng.integers(0, 15, n, k))
    gains = draw_gains(rng, n, k, rng.pick((2.0**14, 2.0**16, 2.0**22)))
    squares = torch.tensor(rng.integer(1000), device=rng.device)
    return (
        moment, rng.reals(n, k), *gains, rng.key(), rng.ok(), squares,
        rng.pick((0, 58982, 65536)), rng.scalar(rng.integer(1024)),
        rng.scalar(4 + rng.integer(12)), nibble, draw_turn(rng),
    )  # fmt: skip


blend_moment_verification = Verification(
    blend_moment, blend_moment_reference,
    changed=REFUSED | {
        "saturated": {"values": lambda x: x.sign() * 1e30},
        "no direction": {"values": torch.zeros_like},
        "halfway": {
            "values": lambda x: (2 * x).round() / 2, "row_gain": torch.ones_like,
            "column_gain": None, "gain": filled(1000), "shift": torch.zeros_like,
        },
    }, compared=("moment", "squares"), draw=_draw,
    needs_rows=False,
    values={"ok": CaseGenerator.ok},
)  # fmt: skip
