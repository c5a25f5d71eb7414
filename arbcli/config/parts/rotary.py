"""Rotary positions: which angles turn which share of a head."""

import math
from dataclasses import dataclass, fields

from arbcli.config.checks import (
    LARGEST,
    check_at_least,
    check_at_most,
    check_choice,
    check_fields,
)
from arbcli.errors import ArbError

SCALINGS = ("none", "linear", "llama3", "yarn")
LOW = {"llama3": 1.0, "yarn": 1.0}
HIGH = {"llama3": 4.0, "yarn": 32.0}
"""Defaults of the bounds, in turns within the original context, by scaling."""
MOST = 1e12
"""Of a base or a factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """The angles of rotary positions, and how they are scaled for a longer context.

    Pair i of a head, of which n numbers are rotated, turns by `base ** (-2 i / n)` radians a
    position.
    """

    base: float = 10000.0
    """From the first to the last pair, wavelengths grow nearly by this factor."""
    share: float = 1.0
    """Share of a head that turns."""
    scaling: str = "none"
    """`linear` divides all angles by `factor`; `llama3` and `yarn` those of long waves."""
    factor: float = 1.0
    """Divisor of the angles."""
    low: float | None = None
    """Waves with fewer turns than this in the original context are scaled; None is 1."""
    high: float | None = None
    """Waves with more turns are not scaled; None is 4 for `llama3` and 32 for `yarn`."""
    original_ctx: int | None = None
    """Context of the model before it was made longer, for `llama3` and `yarn`."""

    def __post_init__(self) -> None:
        """Check types, sizes, and that the scaling has what it needs.

        Raises:
            ArbError: a value does not fit.
        """
        check_fields(self)
        check_choice("scaling", self.scaling, SCALINGS)
        for name, most in (("base", MOST), ("share", 1), ("factor", MOST)):
            value = getattr(self, name)
            if not (0 < value <= most and (name == "share" or value >= 1)):
                raise ArbError(
                    f"`{name}` is {value}",
                    hint=f"use {'more than 0' if name == 'share' else '1 or more'},"
                    f" and at most {most:g}",
                    fields=(name,),
                )
        banded = self.scaling in HIGH
        unused: tuple[str, ...] = () if banded else ("low", "high", "original_ctx")
        if self.scaling == "none":
            unused += ("factor",)
        for field in fields(self):
            if field.name in unused and getattr(self, field.name) != field.default:
                raise ArbError(
                    f"`{field.name}` does not apply to the scaling `{self.scaling}`",
                    hint="leave it out, or name another scaling",
                    fields=(field.name, "scaling"),
                )
        if not banded:
            return
        if self.original_ctx is None:
            raise ArbError(
                f"the scaling `{self.scaling}` needs `original_ctx`",
                hint="give the context that the angles were first made for",
                fields=("original_ctx",),
            )
        check_at_least("original_ctx", self.original_ctx)
        check_at_most("original_ctx", self.original_ctx, LARGEST)
        low, high = self.bounds
        if not 0 < low < high <= MOST:
            raise ArbError(
                f"`low` is {low}, and `high` is {high}",
                hint="use 0 < low < high",
                fields=("low", "high"),
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """`low` and `high`, of a scaling that has them."""
        low = LOW[self.scaling] if self.low is None else self.low
        return low, HIGH[self.scaling] if self.high is None else self.high

    @property
    def stretch(self) -> float:
        """Factor of queries and keys as they turn; `yarn` sharpens attention."""
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0

    def rotated(self, width: int) -> int:
        """Count the numbers of a head that turn."""
        return int(width * self.share)


PLAIN = RotaryConfig()
"""All of a head turns, at the first base, as far as it was trained."""
