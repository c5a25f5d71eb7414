"""The computation of one training step, shared by runs, CUDA graphs and the audit."""

from collections.abc import Callable, Iterable
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbcli.model.language_model import LanguageModel
from arbcli.model.updater import Updater
from arbcli.training.parallel.group import Group

if TYPE_CHECKING:
    from arbcli.training.dropout import DropoutKeys
    from arbcli.training.float_optimizer import FloatOptimizer


def total_loss(parts: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Return the weighted sum of float32 scalars; the text's loss, if present, has weight 1."""
    others = [weights[name] * part for name, part in parts.items() if name != "text"]
    return sum(others, parts["text"]) if "text" in parts else sum(others[1:], others[0])


class TrainingStep:
    """Forward, backward and updates of all micro-batches of a step.

    It does not synchronise with the host, so that it can be captured as a CUDA graph. Values that
    change between steps, such as batches and learning rates, are written to the device before: see
    `Updater.set_step`.

    Args:
        model: the model to train.
        updates: updater of packed weights, which steps in the backward, or a float optimizer, which
            steps after it.
        accumulation: number of micro-batches in a step, over all processes.
        group: the processes that share the step.
    """

    def __init__(
        self,
        model: LanguageModel,
        updates: "Updater | FloatOptimizer",
        accumulation: int,
        group: Group,
    ) -> None:
        self.model, self.updates, self.accumulation = model, updates, accumulation
        self.group = group
        self.losses: Callable[..., dict[str, Tensor]] | None = None
        """Replacement for the model's `losses`."""
        self.dropout: DropoutKeys | None = None
        """Keys of the dropout of this step; None drops nothing."""
        self.scale_routes: dict[tuple[str, ...], frozenset[str]] = {}
        """Areas whose scales are stepped by certain losses only, by the names of these losses."""
        self.weights: Tensor | None = None
        """(micro-batches of this process,) float32 on the device: the number of learnt symbols of
        each micro-batch, relative to the mean over the step; None if all are equal."""
        self._unit_grad: Tensor | None = None
        """Gradient of the loss, which every step would fill anew."""

    def __call__(
        self,
        micro_batches: Iterable[tuple[Tensor, ...]],
        reached: Callable[[str], None] = lambda stage: None,
    ) -> dict[str, Tensor]:
        """Run the step.

        Args:
            micro_batches: arguments of `LanguageModel.losses` on the device, for this process.
            reached: called at the end of each phase of a micro-batch: `forward`, then `backward`.

        Returns:
            The terms of the loss before the update, float32 scalars by name, averaged over
            micro-batches by the numbers of their learnt symbols.
        """
        shares: dict[str, list[Tensor]] = {}
        self.model.forget_uses()
        local = len(self.group.local(self.accumulation))
        for micro, inputs in enumerate(micro_batches):
            self.updates.begin_micro(micro)
            for names, areas in self.scale_routes.items():
                self._accumulate_slopes(names, areas, micro, inputs)
            parts = self.compute_losses(micro, inputs)
            reached("forward")
            loss = total_loss(parts, self.model.loss_weights)
            if self._unit_grad is None:
                self._unit_grad = torch.ones_like(loss)
            weight = self._unit_grad if self.weights is None else self.weights[micro]
            scale = self._unit_grad if self.updates.normalises else weight
            (loss if self.updates.weighs_micro_batches else loss / local).backward(scale)
            reached("backward")
            for name, part in parts.items():
                share = part.detach()
                if self.weights is not None:
                    share = share * weight
                if self.accumulation > 1:
                    share = share / self.accumulation
                shares.setdefault(name, []).append(share)
        self.updates.finish()
        self.model.join(self.group)
        self.model.finish_step()
        return {name: reduce(add, self.group.gather(parts)) for name, parts in shares.items()}

    def compute_losses(self, micro: int, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Compute the terms of the loss of a micro-batch of this process, with its dropout.

        Args:
            micro: number of the micro-batch among those of this process.
            inputs: arguments of `LanguageModel.losses` on the device.

        Returns:
            Float32 scalars by name: see `LanguageModel.losses`.
        """
        return (self.losses or self.model.losses)(*inputs, **self._dropout_arguments(micro))

    def _dropout_arguments(self, micro: int) -> dict[str, Any]:
        """Return the dropout of a micro-batch of this process as an argument of `losses`."""
        if self.dropout is None:
            return {}
        return {"dropout": self.dropout.select(self.group.local(self.accumulation)[micro])}

    def _accumulate_slopes(
        self, names: tuple[str, ...], areas: frozenset[str], micro: int, inputs: tuple[Tensor, ...]
    ) -> None:
        """Compute the slopes of areas' scales from the given losses, without an update."""
        if not isinstance(self.updates, Updater):
            raise ValueError("slopes need packed weights, and a single process")
        with self.updates.finding_slopes(areas):
            parts = self.model.losses(*inputs, **self._dropout_arguments(micro))
            chosen = {name: parts[name] for name in names if name in parts}
            if chosen:
                total_loss(chosen, self.model.loss_weights).backward()
        self.model.forget_uses()
