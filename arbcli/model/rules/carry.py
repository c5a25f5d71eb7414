"""`carry`: an int8 remainder and no moment. Each gradient steps z by its share immediately."""

from torch import Tensor

from arbcli.kernels.update.step_trits import step_by_direction
from arbcli.model.rules.base import TRIT, Buffer, Gradient, Rule, State, StepControl


class Carry(Rule):
    """An int8 remainder."""

    name, radix, remainder_max = "carry", 32, 127

    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare the remainder."""
        return {"remainder": Buffer((rows, columns), "remainder")}

    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Return the remainder, (N, K) int8, with its largest magnitude."""
        return {"remainder": (state["remainder"], self.remainder_max)}

    def step(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Step scales and weights along the direction."""
        keys, ok = control.keys, gradient.gains.ok
        self.move_scales(state, gradient, control)
        step_by_direction(
            state["trits"], state["remainder"], *gradient.required_direction, keys[TRIT],
            *control.gain, control.limit, ok, control.flips, self.radix, self.remainder_max,
            control.weight_decay,
        )  # fmt: skip


class CarryOfAllDigits(Carry):
    """`Carry` for weights that are all digits of z."""

    reads_all, radix, remainder_max, spread = True, 64, 63, 1.0


RULE, ALL_DIGITS = Carry(), CarryOfAllDigits()
