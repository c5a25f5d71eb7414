"""Optimizers of the float baselines: torch's AdamW, and Muon batched over equal shapes.

All values that change between steps are tensors on the device, so that a step can be captured as a
CUDA graph.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from arbcli.model.baselines import FloatNumbers, averaged_latents
from arbcli.model.checkpoint import FLOAT_STATE, LATENT
from arbcli.model.language_model import LanguageModel
from arbcli.model.step_parameters import UNIT, average_rates

BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X X.T X and X X.T X X.T X in a step of Muon's iteration."""
NEWTON_SCHULZ_STEPS = 5
MIN_NORM = 1e-7


class FloatOptimizer:
    """AdamW for all weights, or Muon for those of the blocks and AdamW for the others.

    Args:
        model: a model with float weights.
        name: `adamw` or `muon`.
        weight_decay: weight decay, multiplied by the learning rate; Muon's is that of the blocks.
        average: time constant of averages of the weights in steps; 0 averages nothing.
        compiled: whether to compile the step of Muon.
    """

    def __init__(
        self,
        model: LanguageModel,
        name: str,
        weight_decay: float,
        average: int = 0,
        *,
        compiled: bool = False,
    ) -> None:
        blocks = list(model.blocks.parameters())
        block_ids = {id(parameter) for parameter in blocks}
        others = [p for p in model.parameters() if id(p) not in block_ids]
        self._parameters = blocks + others
        named = model.named_parameters()
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        self._lr = torch.zeros((), device=model.device)
        self._horizon, self._rate = average, torch.zeros((), device=model.device)
        averaged = self._parameters if average else []
        self._averages: dict[Tensor, Tensor] = {p: torch.empty_like(p) for p in averaged}
        self.start_averages()
        self._muon: Muon | None = None
        decay = weight_decay
        if name == "muon":
            self._muon = Muon(blocks, self._lr, weight_decay, compiled=compiled)
            blocks, decay = [], 0.0
        params = blocks + others
        # no weight decay for vectors with given initial values, such as gains and biases
        vectors = [
            part for part in model.modules() if isinstance(part, FloatNumbers) and part.values
        ]
        no_decay = {id(part.latent) for part in vectors}
        groups: list[dict[str, Any]] = [{"params": [p for p in params if id(p) not in no_decay]}]
        if no_decay:
            groups.append({"params": [p for p in params if id(p) in no_decay], "weight_decay": 0.0})
        self._adamw = torch.optim.AdamW(
            groups,
            lr=self._lr,
            betas=BETAS,
            weight_decay=decay,
            fused=True,
            capturable=model.device.type == "cuda",
        )
        for group in self._adamw.param_groups:
            for parameter in group["params"]:
                self._adamw.state[parameter] = {
                    "step": torch.zeros((), device=model.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    weighs_micro_batches = False
    """Gradients of micro-batches are summed, so the caller divides losses by their number."""
    normalises = False
    """See `Updater.normalises`."""

    def set_step(
        self, step: int, lr: float, accumulation: int = 1, counts: Sequence[int] | None = None
    ) -> None:
        """Set the learning rate of the next step, without synchronisation."""
        self._lr.fill_(lr)
        if self._averages:
            rate = average_rates(range(step, step + 1), self._horizon)[0]
            self._rate.fill_(float(rate) / UNIT)

    def begin_micro(self, micro: int) -> None:
        """Do nothing, as autograd accumulates gradients."""

    def finish(self) -> None:
        """Clip the gradients to a norm of `CLIP_NORM`, step all weights, and free the gradients."""
        nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        if self._muon:
            self._muon.step()
        self._adamw.step()
        for parameter in self._parameters:
            parameter.grad = None
        for weight, average in self._averages.items():
            average.lerp_(weight.detach(), self._rate)

    @property
    def is_finite(self) -> bool:
        """Whether weights and state are finite; synchronises with the device."""
        tensors = (*self._parameters, *self.state_dict().values())
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    @torch.no_grad()
    def start_averages(self) -> None:
        """Set averages to the weights."""
        for parameter, average in self._averages.items():
            average.copy_(parameter)

    def averaged(self) -> AbstractContextManager[None]:
        """Read averages in place of the weights within the block."""
        return averaged_latents(self._averages)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state by name, float32, for a checkpoint: views, each of a weight's shape."""
        first, second, momentum, average = FLOAT_STATE
        states: dict[str, dict[Tensor, Tensor]] = {
            first: {p: state["exp_avg"] for p, state in self._adamw.state.items()},
            second: {p: state["exp_avg_sq"] for p, state in self._adamw.state.items()},
            momentum: self._muon.momentum_by_parameter() if self._muon else {},
            average: self._averages,
        }
        return {
            self._names[parameter].removesuffix(LATENT) + kind: tensor
            for kind, tensors in states.items()
            for parameter, tensor in tensors.items()
        }

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Copy the state from a checkpoint after `step` steps.

        Args:
            tensors: the names, shapes and dtypes of `state_dict`; other names are ignored.
            step: number of steps, for AdamW's correction of the bias.

        Raises:
            KeyError: a tensor is missing.
        """
        for name, tensor in self.state_dict().items():
            tensor.copy_(tensors[name])
        for state in self._adamw.state.values():
            state["step"].fill_(step)


class Muon:
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, batched over matrices of a shape.

    Source: K. Jordan et al., "Muon",
    https://kellerjordan.github.io/posts/muon/; J. Liu et al., "Muon is Scalable for LLM Training",
    https://arxiv.org/abs/2502.16982, eq. 4.

    Args:
        parameters: float32 matrices.
        lr: float32 scalar tensor on their device, read in each step.
        weight_decay: weight decay, multiplied by `lr`.
        compiled: whether to compile the step of a batch.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: Tensor, weight_decay: float, *, compiled: bool
    ) -> None:
        batches: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            batches.setdefault(parameter.shape, []).append(parameter)
        self._batches = list(batches.values())
        self.momenta = [p[0].new_zeros(len(p), *p[0].shape) for p in self._batches]
        """Momentum of each batch, (matrices, N, K) float32."""
        self._lr, self._weight_decay = lr, weight_decay
        self._step = torch.compile(step_batch, dynamic=False) if compiled else step_batch

    def momentum_by_parameter(self) -> dict[Tensor, Tensor]:
        """Return the momentum of each matrix, a view of its shape."""
        batches = zip(self._batches, self.momenta, strict=True)
        return {
            p: part for batch, momenta in batches for p, part in zip(batch, momenta, strict=True)
        }

    @torch.no_grad()
    def step(self) -> None:
        """Step all matrices by their gradients."""
        for batch, momentum in zip(self._batches, self.momenta, strict=True):
            grads = [parameter.grad for parameter in batch if parameter.grad is not None]
            self._step(batch, grads, momentum, self._lr, self._weight_decay)


def step_batch(
    parameters: list[Tensor], grads: list[Tensor], momentum: Tensor, lr: Tensor, weight_decay: float
) -> None:
    """Step matrices of one shape by Muon with Nesterov momentum, in place.

    Args:
        parameters: (N, K) float32 each.
        grads: (N, K) float32 each.
        momentum: (matrices, N, K) float32, updated in place.
        lr: float32 scalar tensor.
        weight_decay: weight decay, multiplied by `lr`.
    """
    grad = torch.stack(grads)
    momentum.lerp_(grad, 1 - MOMENTUM)
    update = orthogonalise(grad.lerp(momentum, MOMENTUM))
    size = 0.2 * math.sqrt(max(momentum.shape[1:]))  # matches the RMS of AdamW's steps
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_add_(parameters, list((update.float() * (-size * lr)).unbind()))


def orthogonalise(update: Tensor) -> Tensor:
    """Orthogonalise a batch of matrices by Newton-Schulz iterations in bfloat16.

    Args:
        update: (matrices, N, K) float32.

    Returns:
        (matrices, N, K) bfloat16 with singular values near 1.
    """
    linear, cubic, quintic = NEWTON_SCHULZ
    tall = update.shape[1] > update.shape[2]
    x = update.bfloat16().mT if tall else update.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear
        )
    return x.mT if tall else x
