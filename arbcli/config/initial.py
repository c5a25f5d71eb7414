"""What a run that begins with saved weights keeps of their model, and what it may choose."""

import dataclasses

from arbcli.config.dense import ModelConfig
from arbcli.config.presets import KINDS
from arbcli.errors import ArbError
from arbcli.rules import DIGITS, FADED

FREE = ("ctx", "digits")
"""Settings of a model that may be others than the saved ones; `digits` as far as weights begin as
they were read."""
KEPT = {
    field.name
    for kind in KINDS.values()
    for field in dataclasses.fields(kind)
    if field.name not in FREE
}
"""The others, of models of every kind."""


def check_initial(model: ModelConfig, saved: ModelConfig) -> None:
    """Refuse to begin a run with the weights of another model than its own.

    Tensors of the same shapes do not make the same model: heads, norms without weights and
    directions have none.

    Args:
        model: of the run.
        saved: what the weights are of.

    Raises:
        ArbError: a setting of `KEPT` differs, or `digits` read the weights in another way.
    """
    hint = "make the run's configuration of the saved model's, with `preset=saved_config(...)`"
    if model.kind != saved.kind:
        raise ArbError(
            f"the model of the run is of the kind {model.kind}, and the saved one of {saved.kind}",
            hint=hint,
        )
    own = [field.name for field in dataclasses.fields(model) if field.name in KEPT]
    for name in own:
        wanted, found = getattr(model, name), getattr(saved, name)
        if wanted != found:
            raise ArbError(
                f"`{name}` is {wanted}, and in the saved model {found}", hint=hint, fields=(name,)
            )
    able = digits_after(saved.digits)
    if model.digits not in able:
        raise ArbError(
            f"`digits={model.digits}` reads other weights than those that are saved",
            hint=f"theirs are {saved.digits}: use `digits` of {' or '.join(able)}",
            fields=("digits",),
        )


def digits_after(digits: str) -> tuple[str, ...]:
    """List the `digits` that a run may have if it begins with weights of some.

    Those of a run that fades begin as all. What was in the middle of that is nothing that a run can
    begin as, so its user may choose.
    """
    if digits in FADED:
        return DIGITS
    return ("trit",) if digits == "trit" else ("all", "fade")
