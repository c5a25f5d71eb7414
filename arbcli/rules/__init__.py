"""Update rules: how a step changes packed weights, and what is stored beside them. One file each.

To add a rule, write its file and add its name here. A name is known without importing torch.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arbcli.rules.base import Rule

RULES = ("moment", "nibble", "carry", "votes")
"""Names of rules, each that of its file here, which defines `RULE`."""

DIGITS = ("trit", "all")
"""What a weight is: the trit of z = T * P + A, or all digits of z."""
WITH_DIGITS = ("moment", "nibble", "carry")
"""Rules that keep digits below the trit; their files define `ALL_DIGITS` too."""


@cache
def find_rule(name: str, digits: str = "trit") -> "Rule":
    """Load the rule of a name in `RULES`, for weights that are the trit or all digits."""
    module = import_module(f"arbcli.rules.{name}")
    return module.RULE if digits == "trit" else module.ALL_DIGITS
