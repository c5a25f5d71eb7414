"""Rotary position embedding: angles, and the rotated share of a head."""

import math
from dataclasses import dataclass, fields

from arbcli.base.errors import ArbError, setting_error
from arbcli.config.settings import MAX_SIZE, check_fields, setting

SCALINGS = ("none", "linear", "llama3", "yarn")
LOW = {"llama3": 1.0, "yarn": 1.0}
HIGH = {"llama3": 4.0, "yarn": 32.0}
"""Defaults of the bounds, in rotations within the original context, by scaling."""
MAX_VALUE = 10**12
"""Maximum base and factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Angles of the rotary position embedding, and their scaling for a longer context.

    Pair i of a head with a rotated width of n is rotated by `base ** (-2 i / n)` radians per
    position.
    """

    base: float = setting(10000.0, minimum=1, maximum=MAX_VALUE)
    """Base of the wavelengths; they grow nearly by this factor from the first to the last pair."""
    share: float = 1.0
    """Rotated share of a head."""
    scaling: str = setting("none", choices=SCALINGS)
    """`linear` divides all angles by `factor`; `llama3` and `yarn` only those of long waves."""
    factor: float = setting(1.0, minimum=1, maximum=MAX_VALUE)
    """Divisor of the angles."""
    low: float | None = None
    """Waves with fewer rotations in the original context are scaled; None is 1."""
    high: float | None = None
    """Waves with more rotations are not scaled; None is 4 for `llama3` and 32 for `yarn`."""
    original_ctx: int | None = setting(None, minimum=1, maximum=MAX_SIZE)
    """Context length before the extension, for `llama3` and `yarn`."""

    def __post_init__(self) -> None:
        """Check types, sizes, and that fields match the scaling.

        Raises:
            ArbError: a value is invalid.
        """
        check_fields(self)
        if not 0 < self.share <= 1:
            raise setting_error(f"`share` is {self.share}", "use more than 0, and at most 1")
        banded = self.scaling in HIGH
        unused: tuple[str, ...] = () if banded else ("low", "high", "original_ctx")
        if self.scaling == "none":
            unused += ("factor",)
        for field in fields(self):
            if field.name in unused and getattr(self, field.name) != field.default:
                raise ArbError(
                    f"`{field.name}` does not apply to the scaling `{self.scaling}`",
                    "leave it out, or name another scaling",
                    fields=(field.name, "scaling"),
                )
        if not banded:
            return
        if self.original_ctx is None:
            raise ArbError(
                f"the scaling `{self.scaling}` needs `original_ctx`",
                "give the context that the angles were first made for",
                fields=("original_ctx",),
            )
        low, high = self.bounds
        if not 0 < low < high <= MAX_VALUE:
            raise setting_error(f"`low` is {low}, and `high` is {high}", "use 0 < low < high")

    @property
    def bounds(self) -> tuple[float, float]:
        """`low` and `high` with their defaults, for a scaling that has them."""
        low = LOW[self.scaling] if self.low is None else self.low
        return low, HIGH[self.scaling] if self.high is None else self.high

    @property
    def stretch(self) -> float:
        """Factor of rotated queries and keys; above 1 for `yarn`, which sharpens attention."""
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0

    def rotated(self, width: int) -> int:
        """Return the rotated width of a head."""
        return int(width * self.share)


PLAIN = RotaryConfig()
"""Rotary position embedding of full heads, with the default base and without scaling."""
