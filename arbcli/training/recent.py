"""Losses and flips of the last steps, which the next record averages.

Checkpoints contain them, so that the record after a resume averages the same steps.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.base.reading import check_schema
from arbcli.model.checkpoint import Checkpoint
from arbcli.training.parallel.group import Group
from arbcli.training.record import as_number, finite
from arbcli.training.schedule import LOG_EVERY

KEPT_STEPS = LOG_EVERY
"""Minimum number of steps in a checkpoint, which is the interval of records."""
FIELD = "recent"
"""Key of a checkpoint's `data`; absent from checkpoints of earlier versions."""
SCHEMA = {
    FIELD: dict | None,
    f"{FIELD}.losses": list[float | None],
    f"{FIELD}.flips": list[int | None],
    f"{FIELD}.parts": dict[str, float | None],
    f"{FIELD}.gauges": dict[str, float | None],
}
"""Schema of the field in checkpoints; None stands for a number that is not finite."""


class Step(NamedTuple):
    """Loss and flips of a step."""

    loss: float
    """Loss before the step, in nats per byte."""
    flips: int | None
    """Number of trits that the step changed; None for a float baseline."""


class RecentSteps:
    """Losses and flips of the last steps, which stay on the device until they are read.

    Args:
        group: the processes of the run, each of which counts the flips of its own tensors.
        saved: the field of a checkpoint for earlier steps; may be empty.
        kept: maximum number of steps.
    """

    def __init__(self, group: Group, saved: Mapping[str, Any], kept: int = KEPT_STEPS) -> None:
        self._group = group
        self._unread: list[tuple[Tensor, Tensor | None]] = []
        self._flips_before = 0
        losses = (as_number(loss) for loss in saved.get("losses", ()))
        steps = map(Step, losses, saved.get("flips", ()))
        self._kept = kept
        # more while records are due less often than before the resume
        self._read = deque(steps, maxlen=kept + len(saved.get("losses", ())))

    def add(self, loss: Tensor, flips: Tensor | None) -> None:
        """Append a step.

        Args:
            loss: float32 scalar, in nats per byte.
            flips: int64 scalar, number of trits that this process has changed since the trainer was
                built; None for a float baseline.
        """
        self._unread.append((loss, flips))

    def last(self, number: int) -> list[Step]:
        """Return up to `number` last steps; collective, and synchronises with the device."""
        if self._unread:
            losses, totals = zip(*self._unread, strict=True)
            flips: Sequence[int | None] = totals
            if totals[0] is not None:
                counts = [self._flips_before, *torch.stack(totals).tolist()]
                local_flips = torch.tensor(counts, device=self._group.device).diff()
                flips, self._flips_before = self._group.sum(local_flips).tolist(), counts[-1]
            self._read.extend(map(Step, torch.stack(losses).tolist(), flips))
            self._unread.clear()
        return [*self._read][max(0, len(self._read) - number) :]

    def as_json(self, number: int) -> dict[str, Any]:
        """Return the field for a checkpoint, with at least `number` last steps."""
        steps = self.last(max(self._kept, number))
        return {
            "losses": finite([step.loss for step in steps]),
            "flips": [step.flips for step in steps],
        }


def as_numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    """Replace each None by NaN: see `as_number`."""
    return {name: as_number(value) for name, value in values.items()}


def check_recent(checkpoint: Checkpoint) -> None:
    """Check the field of a checkpoint.

    Raises:
        ArbError: the field is invalid.
    """
    hint = "the file was modified: use another one"
    check_schema(checkpoint.data, SCHEMA, "its header", hint)
    saved = checkpoint.data.get(FIELD)
    if saved is None:
        return
    flips = saved["flips"]
    counts = [count for count in flips if count is not None]
    if len(saved["losses"]) != len(flips) or not all(0 <= count < 2**63 for count in counts):
        raise ArbError(f"its header has no valid `{FIELD}.flips`", hint)
