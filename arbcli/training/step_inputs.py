"""Inputs of steps on a GPU: windows, and parameters of updates, in a single copy per step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from arbcli.config.training import TrainConfig
from arbcli.model.updater import Updater
from arbcli.training.schedule import learning_rate

STEPS_AHEAD = 32
"""Maximum number of steps whose parameters are computed together."""
PINNED_BYTES = 2**20
"""Maximum size of the windows that are pinned together, unless a single step has more."""


class StepInputs:
    """Copies the inputs of each step to the same memory of a GPU, where a graph reads them.

    Args:
        config: configuration of the run.
        device: the GPU.
        updater: updater whose parameters are copied with the windows; None for windows only.
    """

    def __init__(self, config: TrainConfig, device: torch.device, updater: Updater | None) -> None:
        self.updater, self._config, self._device = updater, config, device
        self._pinned: dict[int, tuple[Tensor, Tensor]] = {}
        """Inputs of the next steps in pinned memory, and the part of them that holds windows.

        Each is copied once. torch's allocator reuses the memory when all copies from it have run.
        """
        self._device_inputs: Tensor | None = None
        self._micro_batches: list[tuple[Tensor, ...]] = []
        self.weights: Tensor | None = None
        """See `TrainingStep.weights`; in the same memory for every step."""

    def load(
        self,
        step: int,
        batches: list[tuple[Tensor, ...]],
        counts: Sequence[int] | None = None,
        weights: Tensor | None = None,
    ) -> list[tuple[Tensor, ...]]:
        """Begin a step: copy its micro-batches and parameters, without synchronisation.

        Args:
            step: number of the step.
            batches: its micro-batches on the host, (B, T) int64 each; windows are read step by
                step, so that a file is not missed before its windows are needed.
            counts: see `Updater.set_step`; given in every step or in none.
            weights: see `TrainingStep.weights`, on the host; given if `counts` is.

        Returns:
            The micro-batches on the GPU, in the same memory for every step.
        """
        parts = [part for batch in batches for part in batch]
        if step not in self._pinned:
            self._pin(step, parts, counts, 0 if weights is None else len(weights))
        inputs, windows = self._pinned.pop(step)
        torch.stack(parts, out=windows)
        if weights is not None:
            _weights_view(inputs, windows.numel(), len(weights)).copy_(weights)
        if self._device_inputs is None:
            self._device_inputs = inputs.to(self._device)
            size = windows.numel()
            stacked = self._device_inputs[:size].view(len(batches), -1, *windows.shape[1:])
            self._micro_batches = [tuple(micro_batch) for micro_batch in stacked]
            if weights is not None:
                self.weights = _weights_view(self._device_inputs, size, len(weights))
                size += (len(weights) + 1) // 2
            # `data`: updates write sums into it, which changes no window that is saved
            self._parameters = self._device_inputs[size:].data
        else:
            self._device_inputs.copy_(inputs, non_blocking=True)
        if self.updater:
            self.updater.begin_step(self._parameters, self._config.accum)
        return self._micro_batches

    def _pin(
        self, step: int, parts: list[Tensor], counts: Sequence[int] | None, num_weights: int
    ) -> None:
        """Allocate the inputs of the next steps, with the parameters of their updates.

        Args:
            step: number of the first step.
            parts: tensors of its micro-batches.
            counts: see `load`; they are only known for one step.
            num_weights: number of weights of micro-batches.
        """
        config, size = self._config, sum(part.numel() for part in parts)
        ahead = STEPS_AHEAD if counts is None else 1
        stop = step + max(1, min(ahead, PINNED_BYTES // (8 * size)))
        if step < config.steps:  # rates of later steps are never used, and may overflow
            stop = min(stop, config.steps)
        steps = range(step, stop)
        parameters = torch.empty(len(steps), 0, dtype=torch.int64, device="cpu")
        if self.updater:
            rates = [learning_rate(config, number) for number in steps]
            parameters = self.updater.step_parameters(steps, rates, config.accum, counts)
        # not pinned as a copy: the system would map the pages of a large tensor anew each time
        before, pin_memory = size + (num_weights + 1) // 2, torch.cuda.is_available()
        shape = len(steps), before + parameters.shape[1]
        rows = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=pin_memory)
        rows[:, before:] = parameters
        windows = rows[:, :size].unflatten(1, (len(parts), *parts[0].shape))
        self._pinned = dict(zip(steps, zip(rows, windows, strict=True), strict=True))


def _weights_view(inputs: Tensor, begin: int, number: int) -> Tensor:
    """View the weights of micro-batches among the inputs of a step, from an int64 index on."""
    return inputs[begin : begin + (number + 1) // 2].view(torch.float32)[:number]
