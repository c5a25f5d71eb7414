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


@cache
def find_rule(name: str) -> "Rule":
    """Load the rule of a name in `RULES`."""
    return import_module(f"arbcli.rules.{name}").RULE
