"""Training of float baselines, step by step."""

import torch
from torch import Tensor

from arbcli.model.language_model import LanguageModel
from arbcli.training.step import minimised


def losses_of_steps(lm: LanguageModel, ids: Tensor, lr: float, steps: int) -> list[dict]:
    """Train on (B, T + 1) symbols by AdamW; return the losses of each step by name."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses = lm.losses(ids[:, :-1], ids[:, 1:])
        minimised(losses, lm.loss_weights).backward()
        optimizer.step()
        lm.finish_step()
        history.append({name: loss.item() for name, loss in losses.items()})
    return history
