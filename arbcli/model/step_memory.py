"""Interfaces of parts that record statistics in a step."""

from typing import Any

from arbcli.model.packed import StateModule


class JoinedStatistics:
    """A part that records statistics in forward passes, which processes combine after a step."""

    def join(self, group: Any) -> None:
        """Combine the statistics of all processes.

        Args:
            group: the `arbcli.training.parallel.group.Group` of the run.
        """


class StepMemory(StateModule, JoinedStatistics):
    """A part whose integer state is updated after a step, without gradients."""

    def after_step(self) -> None:
        """Update the state from the recorded statistics, and clear them; does not synchronise."""
        raise NotImplementedError

    def forget(self) -> None:
        """Clear the statistics of a step that was aborted."""
