"""Parts whose integer state takes in what a step has seen, after the step."""

from typing import Any

from arbcli.model.packed import StateModule


class StepMemory(StateModule):
    """A part that learns after a step, and by no gradient; all of it on the device."""

    def after_step(self) -> None:
        """Take in what the step has seen, and forget it."""
        raise NotImplementedError

    def join(self, group: Any) -> None:
        """Bring together what each process has seen, before `after_step`.

        Args:
            group: `arbcli.train.parallel.group.Group`.
        """

    def forget(self) -> None:
        """Forget the forwards of a step that never ended."""
