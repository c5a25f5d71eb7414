"""`moment`: an int8 remainder below the trit, and an int8 running mean of the direction.

m <- 0.9 m + 0.1 u, then z <- z - lr * P / 16 * m / rms(m), both rounded stochastically.
"""

import torch
from torch import Tensor

from arbcli.kernels.update.blend_moment import blend_moment, moment_max
from arbcli.kernels.update.direction import UNIT
from arbcli.kernels.update.step_trits import step_by_moment
from arbcli.rules.base import (
    MOMENT,
    TRIT,
    Buffer,
    Gradient,
    Rule,
    State,
    StepControl,
    fixed_point_gain,
)

DECAY = 0.9


class Moment(Rule):
    """Remainder and moment, a byte each."""

    radix, remainder_max, moment_range = 64, 127, 2.0

    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare remainder and moment."""
        return {
            "remainder": Buffer((rows, columns), "remainder"),
            "moment": Buffer((rows, columns), "moment"),
        }

    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Read remainder and moment as they are."""
        return {
            "remainder": (state["remainder"], self.remainder_max),
            "moment": (state["moment"], moment_max(self.share_a_byte)),
        }

    def step(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Blend the direction into the moment, and after the last one step along it."""
        keys, ok, share_a_byte = control.keys, gradient.gains.ok, self.share_a_byte
        self.move_scales(state, gradient, control)
        moment = state["remainder"] if share_a_byte else state["moment"]
        decay = round(DECAY * UNIT) if control.first else UNIT
        together = 1 if control.first and control.last else control.accumulation
        gain, shift = self._blend_gain(together)
        squares = control.squares
        blend_moment(
            moment, *gradient.ingredients, keys[MOMENT], ok, squares, decay, gain, shift,
            share_a_byte,
        )  # fmt: skip
        if not control.last:
            return
        step_size = control.step_size
        if control.share is not None:
            squares = (squares / control.share).to(torch.int64)
        if together == 1 and control.accumulation > 1:  # alone: it takes its share of the step
            step_size = step_size // control.accumulation
        step_by_moment(
            state["trits"], state["remainder"], None if share_a_byte else moment, keys[TRIT],
            step_size, squares, control.limit, ok, control.flips, self.radix, self.remainder_max,
        )  # fmt: skip

    def _blend_gain(self, accumulation: int) -> tuple[int, int]:
        """Find what a direction is multiplied by before it is added, in fixed point."""
        units = moment_max(self.share_a_byte) / self.moment_range  # int8 units of one rms
        gain, shift = fixed_point_gain((1 - DECAY) * units / accumulation, bits=10)
        return (gain, shift) if gain < 1024 else (gain >> 1, shift - 1)


class MomentOfAllDigits(Moment):
    """The same, where weights are all digits of z: they are finer, and steps are smaller.

    z is within +-127, which a byte holds.
    """

    reads_all, radix, remainder_max, moment_range = True, 64, 63, 1.0
    spread, fade_growth = 1.0, 2.857


RULE, ALL_DIGITS = Moment(), MomentOfAllDigits()
