"""The losses of the head that predicts bytes beyond the next one, a position at a time."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from arbcli.families.ahead.config import AheadConfig
from arbcli.interop.huggingface.modeling_core import gated, norm

if TYPE_CHECKING:
    from arbcli.verify.reference import Reference


def ahead(model: "Reference", s: Tensor) -> None:
    """Note the losses of each byte beyond the next one of the text that is read.

    Args:
        model: the reference.
        s: (T, D), the stream after the last block.
    """
    text, losses_by_name = model.text[model.row].tolist(), dict[str, list[Tensor]]()
    prefix, config = "ahead.", model.config.ahead
    assert isinstance(config, AheadConfig), "the model has such a head"
    w = {name[len(prefix) :]: of for name, of in model.weights.items() if name.startswith(prefix)}
    gains = {name: weight.flatten() for name, weight in w.items() if name.endswith("norm")}
    for t in range(len(text)):
        state = s[t]
        following = text[t + 1 : t + 1 + config.positions]
        for k in range(1, len(following)):
            x = w["carry"] @ norm(state, gains.get("norm")) + w["embedding"][following[k - 1]]
            hidden = gated(w["mlp.gate_up"] @ norm(x, gains.get("mlp_norm")))
            state = x + w["mlp.output"] @ norm(hidden)
            logits = w["head"] @ norm(state, gains.get("head_norm"))
            loss = torch.logsumexp(logits, dim=0) - logits[following[k]]
            losses_by_name.setdefault(f"next_{k + 1}", []).append(loss)
    for name, losses in losses_by_name.items():
        model.note(name, "ahead", torch.stack(losses))
