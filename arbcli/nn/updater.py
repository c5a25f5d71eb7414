"""The updater of modules that are not used in every micro-batch of a step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from arbcli.kernels.update.gradient_gains import GradientGains
from arbcli.kernels.update.moment_squares import moment_squares
from arbcli.model.packed import TernaryTensor
from arbcli.model.updater import Unstepped, Updater


class ModuleUpdater(Updater):
    """An `Updater` of tensors whose first gradient of a step may be late, or whose last early."""

    @contextmanager
    def late(self) -> Iterator[None]:
        """Take the gradients in the block as the first of their tensors in a later micro-batch.

        Their moments decay before them; their weights step in `end_early`, or after a later
        gradient of the step.
        """
        self.step_held()
        controls = self.controls
        flags = controls.first, controls.last
        controls.first, controls.last = True, False
        try:
            yield
            self.step_held()
        finally:
            controls.first, controls.last = flags

    def end_early(self, tensors: Iterable[TernaryTensor]) -> None:
        """Step weights whose step ends before its last micro-batch, along their moments.

        Args:
            tensors: those that had a gradient in the step.
        """
        self.step_held()
        self.controls.first, self.controls.last = False, True
        for tensor in tensors:
            if not tensor.steps_once:
                continue  # its matrices have stepped with each gradient
            for number in range(tensor.matrices):
                state, index = tensor.matrix(number), self.index_of(tensor) + number
                control = self.controls.select(tensor, state, index)
                ok = torch.ones_like(control.step)
                tensor.updates += 1
                tensor.rule.end_scales(state, control)
                if not tensor.rule.moment_range:
                    continue  # its weights have stepped with each gradient
                squares = control.squares.zero_()  # of its last gradient, maybe an earlier one
                moment_squares(tensor.rule.moment_bytes(state), squares, tensor.rule.share_a_byte)
                if tensor.direction is None or not tensor.gradient_moment:
                    tensor.rule.step_along_moment(state, ok, control)
                    continue
                gains = GradientGains(ok, *[torch.empty(0, device=self.device)] * 4)
                self._step_along([Unstepped(tensor, tensor.direction, state, gains, control)])
