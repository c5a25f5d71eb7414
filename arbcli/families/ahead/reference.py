"""The head that predicts bytes beyond the next one, a position at a time."""

import torch
from torch import Tensor

from arbcli.families.ahead.config import AheadConfig
from arbcli.verify.parts.base import Reading, Weights, gated, norm, under


def ahead(w: Weights, s: Tensor, reading: Reading) -> None:
    """Note the losses of each byte beyond the next one.

    Args:
        w: weights of the part.
        s: (T, D), the stream after the last block.
        reading: with the bytes of the text.
    """
    config, text = reading.config_of(AheadConfig), [*reading.text]
    mlp, losses_by_name = under(w, "mlp"), dict[str, list[Tensor]]()
    for t in range(len(text)):
        state = s[t]
        following = text[t + 1 : t + 1 + config.positions]
        for k in range(1, len(following)):
            x = w["carry"] @ norm(state, w.get("norm")) + w["embedding"][following[k - 1]]
            hidden = gated(mlp["gate_up"] @ norm(x, w.get("mlp_norm")))
            state = x + mlp["output"] @ norm(hidden, mlp.get("sub_norm"))
            logits = w["head"] @ norm(state, w.get("head_norm"))
            loss = torch.logsumexp(logits, dim=0) - logits[following[k]]
            losses_by_name.setdefault(f"next_{k + 1}", []).append(loss)
    for name, losses in losses_by_name.items():
        reading.note(name, torch.stack(losses))
