"""Update rules: how a step changes packed weights, and what is stored next to them. One file each.

To add a rule, write its file and add its name here. A name is known without importing torch.
"""

from fractions import Fraction
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arbcli.rules.base import Rule

RULES = ("moment", "nibble", "carry", "votes")
"""Names of rules, each that of its file here, which defines `RULE`."""

DIGITS = ("trit", "all", "fade")
"""Forms of a weight: the trit of z = T * P + A, or all digits of z; or all of them at the beginning
of a run and the trit at its end."""
FADE_PARTS = 16
"""A remainder that fades loses this part of what it counts, so many times."""
_SHARES = tuple(Fraction(kept, FADE_PARTS) for kept in range(FADE_PARTS - 1, 0, -1))
STAGES = ("all", *map(str, _SHARES), "trit")
"""Stages of weights that fade: those in the middle by the share of the remainder that
they count."""
FADED = dict(zip(STAGES[1:-1], _SHARES, strict=True)) | {
    name: Fraction(1, parts) for name, parts in (("half", 2), ("quarter", 4), ("eighth", 8))
}
"""That share, by what only a checkpoint in the middle of such a run has; the last three are names
that earlier ones have."""
WITH_DIGITS = ("moment", "nibble", "carry")
"""Rules that keep digits below the trit; their files define `ALL_DIGITS` too."""
FADING = ("moment", "nibble")
"""Rules that learn as well or better where weights fade."""

DIRECTION = {"moment": "orthogonal", "nibble": "orthogonal", "carry": "factored", "votes": None}
"""Default direction of each rule; None where the rule takes none."""
LR = {"moment": 0.7, "nibble": 0.4, "carry": 1.0, "votes": 1.0}
"""Default learning rate of each rule, where weights are trits."""
LR_OF_DIGITS = {"moment": 0.5, "nibble": 0.4, "carry": 0.25}
"""The same where they are all digits."""
LR_OF_FADING = LR_OF_DIGITS | {"moment": 0.35}
"""The same where they begin so, and end as trits."""
LR_OF_TUNING = 0.03
"""The same of a model that another program trained: as gentle as AdamW at 3e-4."""
LR_OF_FADING_TUNING = 0.2
"""The same of such a model whose weights fade to trits."""


VOTES_FIXES = ("threshold", "order", "start", "bound")
"""Changes of the rule `votes` to the reference system: see its file."""


@cache
def find_rule(name: str, digits: str = "trit", votes_fixes: tuple[str, ...] = ()) -> "Rule":
    """Load the rule of a name in `RULES`.

    Args:
        name: of the rule.
        digits: what weights are: one of `DIGITS`, of which `fade` begins as `all`, or of `FADED`.
        votes_fixes: of the rule `votes`, names of `VOTES_FIXES`.
    """
    module = import_module(f"arbcli.rules.{name}")
    if votes_fixes:
        return module.Votes(votes_fixes)
    if digits == "trit":
        return module.RULE
    return module.ALL_DIGITS.faded(FADED[digits]) if digits in FADED else module.ALL_DIGITS


@cache
def stage_rule(name: str, stage: str) -> "Rule":
    """Load the rule of a stage of a run whose weights fade: the same steps in each.

    The last one differs from `find_rule(name, "trit")`, whose steps may have other constants.
    """
    if stage != "trit":
        return find_rule(name, stage)
    return import_module(f"arbcli.rules.{name}").ALL_DIGITS.without_digits()
