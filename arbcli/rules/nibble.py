"""`nibble`: as `moment`, with remainder and moment in one byte: 16 * moment + (A mod 16)."""

from torch import Tensor

from arbcli.kernels.update.blend_moment import moment_max
from arbcli.rules.base import Buffer, State
from arbcli.rules.moment import Moment


class Nibble(Moment):
    """Four bits of remainder, four bits of moment, which hold a mean of directions better.

    P is the largest even number whose remainders of up to P / 2 have four bits. Steps are less than
    a unit of z, so that rounding by bits of no order would be most of what z does: they are turned.
    """

    averages_gradients, turns_bits = False, True
    radix, remainder_max, moment_range = 14, 7, 0.6
    share_a_byte = True

    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare the byte of both."""
        return {"remainder": Buffer((rows, columns), "remainder")}

    def start(self, state: State, rows: slice, remainder: Tensor) -> None:
        """Write remainders to the low four bits; the moment is zero."""
        state["remainder"][rows] = remainder & 15

    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Take the byte apart; both halves are two's complement."""
        byte = state["remainder"]
        return {
            "remainder": (((byte & 15) ^ 8) - 8, self.remainder_max),
            "moment": (byte >> 4, moment_max(self.share_a_byte)),
        }


class NibbleOfAllDigits(Nibble):
    """The same, where weights are all digits of z."""

    reads_all, spread = True, 0.85


RULE, ALL_DIGITS = Nibble(), NibbleOfAllDigits()
