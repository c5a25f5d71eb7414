"""`moment`: an int8 remainder below the trit, and an int8 running mean.

With the orthogonal direction it averages gradients g, as Muon does: m <- 0.9 m + 0.1 g / rms(g),
then z <- z - lr * P / 16 * u(m). With other directions u it averages these: m <- 0.9 m + 0.1 u,
then z <- z - lr * P / 16 * m / rms(m). All assignments round stochastically.

z is the integer of a weight, P = 64 the value of its trit, and u a direction, of unit RMS: see
`arbcli.model.optimizers`.
"""

import torch
from torch import Tensor

from arbcli.kernels.update.blend_moment import blend_moment, moment_max
from arbcli.kernels.update.direction import UNIT
from arbcli.kernels.update.step_trits import step_by_direction, step_by_moment
from arbcli.model.rules.base import (
    MOMENT,
    TRIT,
    Buffer,
    FactoredUpdate,
    Gradient,
    Rule,
    State,
    StepControl,
)

BETA = 0.9
"""Momentum coefficient of a step: m <- BETA m + (1 - BETA) u."""


class Moment(Rule):
    """An int8 remainder and an int8 moment.

    The moment averages gradients before it is orthogonalised, as the orthogonal factor of a single
    gradient is mostly noise. An average of gradients of unit RMS has an RMS of about 0.2, so a
    range of 0.5 clips few elements.
    """

    name = "moment"
    radix, remainder_max, moment_range = 64, 127, 0.5

    @property
    def blend_units(self) -> float:
        """Factor of a direction of unit RMS in the moment, in units of int8 or of a nibble."""
        return (1 - BETA) * (moment_max(self.share_a_byte) / self.moment_range)

    @property
    def expected_square(self) -> float:
        """Mean square of the moment of gradients that are independent."""
        return self.blend_units**2 / (1 - BETA**2)

    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare remainder and moment."""
        return {
            "remainder": Buffer((rows, columns), "remainder"),
            "moment": Buffer((rows, columns), "moment"),
        }

    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Return remainder and moment, (N, K) int8 each, with their largest magnitudes."""
        return {
            "remainder": (state["remainder"], self.remainder_max),
            "moment": (state["moment"], moment_max(self.share_a_byte)),
        }

    def step(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Blend the direction into the moment; after the last gradient, step along the moment."""
        self.update_moment(state, gradient, control)
        if control.last:
            self.step_along_moment(state, gradient.gains.ok, control)

    def step_along_moment(self, state: State, ok: Tensor, control: StepControl) -> None:
        """Step weights along their moment of directions: see `Rule.step_along_moment`."""
        squares = control.squares
        if control.share is not None:
            squares = (squares / control.share).to(torch.int64)
        step_by_moment(
            state["trits"], state["remainder"], None if self.share_a_byte else state["moment"],
            control.keys[TRIT], control.turn, control.step_size, squares, control.limit, ok,
            control.flips, self.radix, self.remainder_max, control.weight_decay,
        )  # fmt: skip

    def update_moment(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Step the scales, and blend the gradient or direction into the moment."""
        self.move_scales(state, gradient, control)
        beta = round(BETA * UNIT) if control.first else UNIT
        blend_moment(
            self.moment_bytes(state), *gradient.required_direction, control.keys[MOMENT],
            gradient.gains.ok, control.squares, beta, *control.blend_gain, self.share_a_byte,
            control.moment_turn,
        )  # fmt: skip

    def step_along_direction(
        self, state: State, direction: FactoredUpdate, ok: Tensor, control: StepControl
    ) -> None:
        """Step weights along the direction of the moment: see `Rule.step_along_direction`."""
        step_by_direction(
            state["trits"], state["remainder"], *direction, control.keys[TRIT], *control.gain,
            control.limit, ok, control.flips, self.radix, self.remainder_max, control.weight_decay,
            control.turn, self.share_a_byte,
        )  # fmt: skip


class MomentOfAllDigits(Moment):
    """`Moment` for weights that are all digits of z, which fits in int8."""

    reads_all, remainder_max = True, 63
    spread, fade_growth = 1.0, 2.0


RULE, ALL_DIGITS = Moment(), MomentOfAllDigits()
