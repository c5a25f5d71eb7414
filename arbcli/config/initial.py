"""Settings that a run with initial weights inherits from their model, and those it may change."""

import dataclasses
from typing import Any

from arbcli.config.model import ModelConfig
from arbcli.config.short_forms import ARGUMENTS
from arbcli.errors import ArbError
from arbcli.rules import DIGITS, FADED

FREE = ("ctx", "digits")
"""Settings of a model that may be others than the saved ones; `digits` as far as weights begin as
they were read."""
KEPT = frozenset(ARGUMENTS) - frozenset(FREE)
"""The other options of models."""


def check_initial(model: ModelConfig, saved: ModelConfig) -> None:
    """Refuse to begin a run with the weights of another model than its own.

    Tensors of the same shapes do not make the same model: heads, norms without weights and
    directions have none.

    Args:
        model: of the run.
        saved: what the weights are of.

    Raises:
        ArbError: a setting other than `FREE` differs, or `digits` read the weights in another way.
    """
    free = {name: getattr(saved, name) for name in FREE}
    wanted, found = map(dataclasses.asdict, (dataclasses.replace(model, **free), saved))
    if difference := first_difference(wanted, found):
        name, ours, theirs = difference
        raise ArbError(
            f"`{name}` is {ours}, and {theirs} in the saved model",
            hint="make the run's configuration of the saved model's, with"
            " `preset=saved_config(...)`",
            fields=(name,),
        )
    able = digits_after(saved.digits)
    if model.digits not in able:
        raise ArbError(
            f"`digits={model.digits}` does not match the saved weights",
            hint=f"use {' or '.join(f'`digits={one}`' for one in able)}, which match them",
            fields=("digits",),
        )


def first_difference(first: Any, second: Any, name: str = "model") -> tuple[str, Any, Any] | None:
    """Find where two configurations differ, as dictionaries, lists and values.

    Returns:
        The name of the field, and both values; None where there is no difference. Of lists of
        other lengths the values are the lengths.
    """
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        pairs = [(key, first[key], second[key]) for key in first]
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return f"number of {name}", len(first), len(second)
        pairs = [(name, *both) for both in zip(first, second, strict=True)]
    else:
        return None if first == second else (name, first, second)
    found = (first_difference(ours, theirs, key) for key, ours, theirs in pairs)
    return next(filter(None, found), None)


def digits_after(digits: str) -> tuple[str, ...]:
    """List the `digits` that a run may have if it begins with weights of some.

    Those of a run that fades begin as all. What was in the middle of that is nothing that a run can
    begin as, so its user may choose.
    """
    if digits in FADED:
        return DIGITS
    return ("trit",) if digits == "trit" else ("all", "fade")
