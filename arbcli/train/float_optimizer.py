"""The optimizers of the float twins: AdamW and Muon, both torch's own."""

import torch
from torch import Tensor

from arbcli.model.dense import ByteLM

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


class FloatOptimizer:
    """AdamW for every weight, or Muon for those of the blocks and AdamW for the rest.

    Args:
        model: with float weights.
        name: `adamw` or `muon`.
        lr: of the schedule's top, for every weight.
    """

    def __init__(self, model: ByteLM, name: str, lr: float) -> None:
        self.model, self.lr = model, lr
        blocks = list(model.blocks.parameters())
        others = [p for p in model.parameters() if all(p is not block for block in blocks)]
        fused = {"betas": BETAS, "fused": True}
        if name == "adamw":
            adamw = torch.optim.AdamW(blocks + others, lr=lr, weight_decay=WEIGHT_DECAY, **fused)
            self._parts: list[torch.optim.Optimizer] = [adamw]
        else:
            muon = torch.optim.Muon(
                blocks, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
            )
            adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0.0, **fused)
            self._parts = [muon, adamw]

    def step(self, share: float) -> None:
        """Step every weight at `share` of the learning rate, and drop the gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.lr * share
            part.step()
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> list[Tensor]:
        """List what the optimizers keep between steps."""
        states = (state for part in self._parts for state in part.state.values())
        return [v for state in states for v in state.values() if isinstance(v, Tensor)]
