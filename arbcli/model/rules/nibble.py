"""`nibble`: the rule `moment` in one byte: 16 * moment + (A mod 16)."""

from torch import Tensor

from arbcli.kernels.update.blend_moment import moment_max
from arbcli.model.rules.base import Buffer, State
from arbcli.model.rules.moment import Moment


class Nibble(Moment):
    """A 4-bit remainder and a 4-bit moment.

    P is the largest even number whose remainders up to P / 2 fit in four bits. Changes of z and of
    the moment are about a unit, so the noise of independent random bits would dominate them: the
    bits are offset from step to step instead.
    """

    name, turns_bits = "nibble", True
    radix, remainder_max, moment_range = 14, 7, 0.35
    share_a_byte = True

    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare the byte that remainder and moment share."""
        return {"remainder": Buffer((rows, columns), "remainder")}

    def start(self, state: State, rows: slice, remainder: Tensor) -> None:
        """Initialise the low four bits to remainders, (R, K) int8, and the moment to zero."""
        state["remainder"][rows] = remainder & 15

    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Return remainder and moment, (N, K) int8 each, sign-extended from four bits."""
        byte = state["remainder"]
        return {
            "remainder": (((byte & 15) ^ 8) - 8, self.remainder_max),
            "moment": (byte >> 4, moment_max(self.share_a_byte)),
        }


class NibbleOfAllDigits(Nibble):
    """`Nibble` for weights that are all digits of z."""

    reads_all, spread = True, 0.85


RULE, ALL_DIGITS = Nibble(), NibbleOfAllDigits()
