"""Compatibility of a run's model with the saved model of its initial weights."""

import dataclasses
from typing import Any

from arbcli.base.errors import ArbError, setting_error
from arbcli.config.model import ModelConfig
from arbcli.config.presets import SYMBOL_DIRECTIONS
from arbcli.config.short_forms import ARGUMENTS
from arbcli.model.rules import DIGITS, FADED

FREE = ("ctx", "digits", "direction")
"""Settings of a model that may differ from the saved model; `digits` only as in `digits_after`."""


def is_kept(name: str) -> bool:
    """Return whether a setting of a model must be that of the saved model."""
    return name in ARGUMENTS and name not in FREE


def check_initial(model: ModelConfig, saved: ModelConfig) -> None:
    """Check that a run's model matches the saved model of its initial weights.

    Equal shapes of tensors are not sufficient: the number of heads and norms without weights do not
    appear in them.

    Args:
        model: model of the run.
        saved: model of the initial weights.

    Raises:
        ArbError: another setting differs, or `digits` would change the weights' values.
    """
    symbols = ("symbol_digits",) if saved.digits == "all" else ()
    free = {name: getattr(saved, name) for name in (*FREE, *SYMBOL_DIRECTIONS, *symbols)}
    fields, saved_fields = map(dataclasses.asdict, (dataclasses.replace(model, **free), saved))
    if difference := first_difference(fields, saved_fields):
        name, ours, theirs = difference
        if name == "vocabulary":
            raise ArbError(
                f"the run has {ours:,} symbols, and the saved model {theirs:,}",
                "leave `--tokenizer` out: symbols are those of the saved model",
            )
        if name == "weights":
            raise ArbError(
                f"`weights` is {ours}, and {theirs} in the saved model",
                "keep it; or convert a model without sub-norms: `arb export --to hf`, then"
                " `arb import` of that folder",
                fields=(name,),
            )
        raise ArbError(
            f"`{name}` is {ours}, and {theirs} in the saved model",
            "build the run's configuration from the saved model, with `preset=saved_config(...)`",
            fields=(name,),
        )
    able = digits_after(saved.digits)
    if model.digits not in able:
        raise setting_error(
            f"`digits={model.digits}` does not match the saved weights",
            f"use {' or '.join(f'`digits={digits}`' for digits in able)}, which match them",
        )


def first_difference(first: Any, second: Any, name: str = "model") -> tuple[str, Any, Any] | None:
    """Return the first difference of two configurations, as nested dictionaries and lists.

    Returns:
        The name of the field, and both values, or both lengths of lists; None if they are equal.
    """
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        pairs = [(key, first[key], second[key]) for key in first]
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return f"number of {name}", len(first), len(second)
        pairs = [(name, *both) for both in zip(first, second, strict=True)]
    else:
        return None if first == second else (name, first, second)
    differences = (first_difference(ours, theirs, key) for key, ours, theirs in pairs)
    return next(filter(None, differences), None)


def digits_after(digits: str) -> tuple[str, ...]:
    """Return the `digits` that a run may have, by the `digits` of its initial weights.

    A run with `fade` starts with all digits. Weights from the middle of such a run match neither
    `trit` nor `all`, so any value is allowed.
    """
    if digits in FADED:
        return DIGITS
    return ("trit",) if digits == "trit" else ("all", "fade")
