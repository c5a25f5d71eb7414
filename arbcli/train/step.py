"""One training step: what a run, its captured replay and the audit have in common."""

from collections.abc import Callable, Iterable

from torch import Tensor

from arbcli.model.language_model import LanguageModel
from arbcli.train.float_optimizer import FloatOptimizer
from arbcli.train.parallel.group import Group
from arbcli.train.parallel.shared_updater import SharedUpdater
from arbcli.train.updater import Updater


def minimised(parts: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Add the other parts of a loss, each times its weight, to that of the text, if that is one."""
    others = [weights[name] * part for name, part in parts.items() if name != "text"]
    return sum(others, parts["text"]) if "text" in parts else sum(others[1:], others[0])


class TrainingStep:
    """Forward, backward and updates of every micro-batch of a step.

    All of it happens on the device, and nothing waits for the host: a step can be captured as one
    CUDA graph. What changes from step to step, the updater's control and the batches, is written
    before: see `Updater.set_step`.

    Args:
        model: to train.
        updates: of packed weights, which step in the backward, or of float ones, after it.
        accumulation: micro-batches of a step, of all processes.
        group: the processes that share the step.
    """

    def __init__(
        self,
        model: LanguageModel,
        updates: Updater | SharedUpdater | FloatOptimizer,
        accumulation: int,
        group: Group,
    ) -> None:
        self.model, self.updates, self.accumulation = model, updates, accumulation
        self.group = group
        self.losses: Callable[..., dict[str, Tensor]] | None = None
        """Computes the losses instead of the model."""
        self.scale_routes: dict[tuple[str, ...], frozenset[str]] = {}
        """Areas by the parts of the loss that alone move their scales."""

    def __call__(
        self,
        micro_batches: Iterable[tuple[Tensor, ...]],
        reached: Callable[[str], None] = lambda stage: None,
    ) -> dict[str, Tensor]:
        """Do the step.

        Args:
            micro_batches: of this process: what `LanguageModel.losses` takes, on the device.
            reached: is told of each stage of a micro-batch that ends: `forward`, then `backward`.

        Returns:
            The parts of the loss before the step, float32 scalars by name, means of micro-batches.
        """
        totals: dict[str, Tensor] = {}
        shares: dict[str, list[Tensor]] = {}
        self.model.forget_uses()
        local = self.accumulation // self.group.size
        for micro, given in enumerate(micro_batches):
            self.updates.begin_micro(micro)
            for names, areas in self.scale_routes.items():
                self._find_slopes(names, areas, given)
            parts = (self.losses or self.model.losses)(*given)
            reached("forward")
            loss = minimised(parts, self.model.loss_weights)
            (loss if self.updates.averages else loss / local).backward()
            reached("backward")
            for name, part in parts.items():
                share = part.detach() / self.accumulation
                if self.group.size == 1:
                    totals[name] = totals.get(name, 0) + share
                else:
                    shares.setdefault(name, []).append(share)
        self.updates.finish()
        self.model.join(self.group)
        self.model.after_step()
        for name, own in shares.items():
            for share in self.group.in_order(own):
                totals[name] = totals.get(name, 0) + share
        return totals

    def _find_slopes(
        self, names: tuple[str, ...], areas: frozenset[str], given: tuple[Tensor, ...]
    ) -> None:
        """Find the slopes of the scales of some areas by parts of the loss, and step nothing."""
        if not isinstance(self.updates, Updater):
            raise ValueError("slopes need packed weights and a single process")
        with self.updates.finding_slopes(areas):
            parts = self.model.losses(*given)
            chosen = {name: parts[name] for name in names if name in parts}
            if chosen:
                minimised(chosen, self.model.loss_weights).backward()
        self.model.forget_uses()
