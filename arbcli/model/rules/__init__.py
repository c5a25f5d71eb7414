"""Update rules: the training state stored next to packed weights, and the step that changes both.

Each rule is one module of this package. To add one, write its module and add its name to `RULES`,
which can be read without importing torch.
"""

from fractions import Fraction
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from arbcli.families import RULES as FAMILY_RULES

if TYPE_CHECKING:
    from arbcli.model.rules.base import Rule

RULES = ("moment", "nibble", "carry", *FAMILY_RULES)
"""Names of the rules; each is a module of this package, or of a family, that defines `RULE`."""

DIGITS = ("trit", "all", "fade")
"""Forms of a weight z = T * P + A: `trit` is T, `all` is z, `fade` begins as z and ends as T."""
FADE_PARTS = 16
"""Number of steps in which the contribution of a fading remainder falls from 1 to 0."""
_SHARES = tuple(Fraction(kept, FADE_PARTS) for kept in range(FADE_PARTS - 1, 0, -1))
STAGES = ("all", *map(str, _SHARES), "trit")
"""Stages of fading weights, in order; intermediate ones are named by the remainder's share."""
FADED = dict(zip(STAGES[1:-1], _SHARES, strict=True)) | {
    name: Fraction(1, parts) for name, parts in (("half", 2), ("quarter", 4), ("eighth", 8))
}
"""Remainder's share of each intermediate stage, by its name in checkpoints; the last three names
are those of older checkpoints."""
WITH_DIGITS = ("moment", "nibble", "carry")
"""Rules that keep digits below the trit; their modules define `ALL_DIGITS` too."""
FADING = ("moment", "nibble")
"""Rules that support fading weights."""

DIRECTION = {"moment": "orthogonal", "nibble": "orthogonal", "carry": "factored", "votes": None}
"""Default direction of each rule; None for a rule without one."""
LR = {"moment": 0.7, "nibble": 0.4, "carry": 1.0, "votes": 1.0}
"""Default learning rate of each rule with `trit` weights."""
LR_OF_DIGITS = {"moment": 0.5, "nibble": 0.4, "carry": 0.25}
"""Default learning rate with `all` digits."""
LR_OF_FADING = LR_OF_DIGITS | {"moment": 0.35}
"""Default learning rate with `fade`."""
LR_OF_TUNING = 0.003
"""Default learning rate for fine-tuning an imported model; about as large as 1e-4 of AdamW."""
LR_OF_FADING_TUNING = 0.2
"""Default learning rate for fine-tuning an imported model with fading digits."""


def relative_lr(name: str, other: str, digits: str) -> float:
    """Return the learning rate of a rule relative to that of another, from their defaults.

    With `fade`, the rates are those of weights that have faded, which are the ones of `trit`.

    Args:
        name: one of `WITH_DIGITS`.
        other: another of them.
        digits: form of the weights.
    """
    rates = LR_OF_DIGITS if digits == "all" else LR
    return rates[name] / rates[other]


VOTES_FIXES = ("threshold", "order", "start", "bound", "scales")
"""Optional changes of the rule `votes` relative to the reference system: see its module."""


def _module(name: str) -> ModuleType:
    family = FAMILY_RULES.get(name)
    path = f"arbcli.families.{family}.rule" if family else f"arbcli.model.rules.{name}"
    return import_module(path)


@cache
def find_rule(name: str, digits: str = "trit", votes_fixes: tuple[str, ...] = ()) -> "Rule":
    """Load a rule by its name.

    Args:
        name: one of `RULES`.
        digits: form of the weights: one of `DIGITS`, with `fade` as `all`, or a stage of `FADED`.
        votes_fixes: names of `VOTES_FIXES`, for the rule `votes`.
    """
    module = _module(name)
    if votes_fixes:
        return module.Votes(votes_fixes)
    if digits == "trit":
        return module.RULE
    return module.ALL_DIGITS.faded(FADED[digits]) if digits in FADED else module.ALL_DIGITS


@cache
def stage_rule(name: str, stage: str) -> "Rule":
    """Load the rule for one of `STAGES` of a run whose weights fade; all of them step alike.

    The rule of the stage `trit` differs from `find_rule(name, "trit")`, which may have other
    constants.
    """
    if stage != "trit":
        return find_rule(name, stage)
    return _module(name).ALL_DIGITS.strip_digits()
