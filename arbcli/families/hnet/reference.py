"""The boundaries of chunks in a reference, and the loss of their number."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.families.hnet.modeling import Stage

if TYPE_CHECKING:
    from arbcli.verify.reference import Reference


def find_starts(model: "Reference", name: str, stage: Stage, p: Tensor) -> Tensor:
    """Adopt the boundaries that the model chose, as far as there is room: `Stage.starts`.

    Args:
        model: the reference.
        name: name of the stage in the model.
        stage: the stage.
        p: (T,) boundary probabilities.

    Returns:
        (chunks,) int64, positions that begin chunks.
    """
    begins, model_choice = p > 0.5, model.model_choice(f"{name}.router") if stage.router else None
    if model_choice:
        begins, either = model_choice[0][: len(p)].bool(), torch.stack([1 - p, p], dim=1)
        model.judge(either.gather(1, begins.long()[:, None]), either)
    if stage.router:
        model.note("ratio", name, torch.stack([p, begins.to(p)], dim=1))
    index, starts = model.stage_of(name), begins.nonzero()[:, 0]
    if not model.endless:
        starts = starts[: model.slots[index + 1]]
    model.position_ids[index + 1, model.row] = model.position_ids[index, model.row][starts]
    return starts


def ratio_loss(p: Tensor, begins: Tensor, length: int) -> Tensor:
    """Compute the ratio loss, a scalar that is 1 for chunks of `length` positions on average.

    Args:
        p: (T,) boundary probabilities.
        begins: (T,), 1 where a chunk begins and 0 elsewhere, in the dtype of p.
        length: target length.
    """
    f, g = begins.mean(), p.mean()
    return length / (length - 1) * ((length - 1) * f * g + (1 - f) * (1 - g))
