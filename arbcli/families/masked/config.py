"""Models that can be trained to fill holes, or on masked bytes."""

from arbcli.base.errors import ArbError
from arbcli.config.model import MAX_SIZE, ModelConfig

MIN_FILL_CTX = 8


def check_masked(model: ModelConfig) -> None:
    """Check that all parts are bidirectional, and that a mask symbol can be added.

    Raises:
        ArbError: a part is causal, reads bytes, or has no place for the symbol.
    """
    reasons = {
        f"`{part.kind}`": part.causal or "it reads the bytes before a position"
        for _, part in model.specs_and_parts()
        if part.causal or part.reads_text
    }
    if model.outer:
        reasons["chunks"] = "one ends where the next begins"
    if model.tied:
        reasons["`tied`"] = "the head has no row for the symbol of a hidden byte"
    for name, reason in reasons.items():
        raise ArbError(
            f"`objective` is `masked`, and the model has {name}: {reason}",
            "use a preset of dense blocks, such as `base`, or `objective=next`",
            fields=("objective",),
        )


def check_fill(model: ModelConfig) -> None:
    """Check that no part reads marks as bytes, and that the length of a hole fits two symbols.

    Raises:
        ArbError: a part does not support marks, or `ctx` is out of bounds.
    """
    for name in [*model.byte_readers, *(["`tied`"] if model.tied else [])]:
        raise ArbError(
            f"`objective` is `fill`, and the model has {name}, which does not support holes",
            "use a preset of dense blocks, such as `base`, or `objective=next`",
            fields=("objective",),
        )
    maximum = min(MAX_SIZE, model.vocabulary**2 - 1)
    if not MIN_FILL_CTX <= model.ctx <= maximum:
        raise ArbError(
            f"`objective` is `fill`, and `ctx` is {model.ctx}",
            f"use a context of {MIN_FILL_CTX} to {maximum:,}",
            fields=("objective", "ctx"),
        )
