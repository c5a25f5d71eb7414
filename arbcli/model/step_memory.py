"""Interface of parts whose integer state is updated after a step, without gradients."""

from typing import Any

from arbcli.model.packed import StateModule


class StepMemory(StateModule):
    """A part that records statistics in forward passes, and updates its state after the step."""

    def after_step(self) -> None:
        """Update the state from the recorded statistics, and clear them; does not synchronise."""
        raise NotImplementedError

    def join(self, group: Any) -> None:
        """Combine the statistics of all processes, before `after_step`.

        Args:
            group: the `arbcli.training.parallel.group.Group` of the run.
        """

    def forget(self) -> None:
        """Clear the statistics of a step that was aborted."""
