"""A number of bytes with a unit, such as `6GiB`."""

import re

from arbcli.base.errors import ArbError

UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": (1024 if infix else 1000) ** power
    for power, prefix in enumerate("kmgt", 1)
    for infix in ("", "i")
}
UNITS |= {prefix: 1024**power for power, prefix in enumerate("kmgt", 1)}


def budget_bytes(budget: str) -> int:
    """Read a number of bytes: `6GiB`, `6G`, `4GB`.

    Raises:
        ArbError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", budget.lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or not unit:
        raise ArbError(f"`--budget` is `{budget}`", hint="use a number and a unit, such as `6GiB`")
    return int(float(match[1]) * unit)
