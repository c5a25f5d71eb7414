"""The choices of a gate in a reference."""

from typing import TYPE_CHECKING

from torch import Tensor

from arbcli.families.experts.modeling import Gate

if TYPE_CHECKING:
    from arbcli.verify.reference import Reference


def choose_experts(model: "Reference", name: str, gate: Gate, chances: Tensor) -> Tensor:
    """Adopt the experts that the model chose, and judge them by their scores: `Gate.choose`.

    Args:
        model: the reference.
        name: name of the gate in the model.
        gate: the gate.
        chances: (T, E) float64 scores.

    Returns:
        (T, k) int64.
    """
    model_choice = model.model_choice(name)
    if model_choice is None:
        return Gate.choose(gate, chances)
    call = model.notes[name] = model.notes.get(name, -1) + 1  # several on a text, of iterations
    chosen = model_choice[call][: len(chances)]
    model.judge(chances.gather(1, chosen), chances)
    return chosen
