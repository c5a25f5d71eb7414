"""Losses and flips of the last steps of a run: the next record averages them.

A checkpoint holds them, so the record after a resume averages the same steps as without the stop.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.checkpoint import Checkpoint
from arbcli.errors import ArbError
from arbcli.reading import check_schema
from arbcli.train.parallel.group import Group
from arbcli.train.record import finite

KEPT_STEPS = 10
"""Steps whose figures a checkpoint holds, at least: as many as a record averages."""
FIELD = "recent"
"""Key of a checkpoint's `data`; absent from checkpoints of earlier versions."""
SCHEMA = {
    FIELD: dict | None,
    f"{FIELD}.losses": list[float | None],
    f"{FIELD}.flips": list[int],
    f"{FIELD}.parts": dict[str, float | None],
    f"{FIELD}.gauges": dict[str, float | None],
}
"""Records as a checkpoint holds them; None is a number that is not finite."""


class Step(NamedTuple):
    """Figures of one step."""

    loss: float
    """Nats a byte, before the step."""
    flips: int | None
    """Trits that the step changed; None for a float twin."""


class RecentSteps:
    """Figures of the last steps, which stay on the device until they are read.

    Args:
        group: the processes of the run; each counts the flips of its own tensors.
        saved: what a checkpoint holds of the steps before; empty if it holds nothing.
        kept: how many steps.
    """

    def __init__(self, group: Group, saved: Mapping[str, Any], kept: int = KEPT_STEPS) -> None:
        self._group = group
        self._unread: list[tuple[Tensor, Tensor | None]] = []
        self._flips_before = 0
        losses = (_number(loss) for loss in saved.get("losses", ()))
        steps = map(Step, losses, saved.get("flips", ()))
        self._read = deque(steps, maxlen=kept)

    def add(self, loss: Tensor, flips: Tensor | None) -> None:
        """Append a step.

        Args:
            loss: float32 scalar, in nats a byte.
            flips: int64 scalar, the trits that this process has changed since the trainer was
                built; None for a float twin.
        """
        self._unread.append((loss, flips))

    def last(self, number: int) -> list[Step]:
        """Return the last steps, at most `number`; all processes call it. Waits for the device."""
        if self._unread:
            losses, totals = zip(*self._unread, strict=True)
            flips: Sequence[int | None] = totals
            if totals[0] is not None:
                counts = [self._flips_before, *torch.stack(totals).tolist()]
                own = torch.tensor(counts, device=self._group.device).diff()
                flips, self._flips_before = self._group.sum(own).tolist(), counts[-1]
            self._read.extend(map(Step, torch.stack(losses).tolist(), flips))
            self._unread.clear()
        return [*self._read][max(0, len(self._read) - number) :]

    def as_json(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the steps."""
        steps = self.last(self._read.maxlen or 0)
        return {
            "losses": finite([step.loss for step in steps]),
            "flips": [step.flips for step in steps],
        }


def as_numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    """Restore what `record.finite` replaced: None is a number that is not finite."""
    return {name: _number(value) for name, value in values.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def check_recent(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose figures of the last steps cannot be ones.

    Raises:
        ArbError: they cannot.
    """
    hint = "it was altered: name another"
    check_schema(checkpoint.data, SCHEMA, "its header", hint)
    saved = checkpoint.data.get(FIELD)
    if saved is None:
        return
    flips = saved["flips"]
    if len(saved["losses"]) != len(flips) or not all(0 <= each < 2**63 for each in flips):
        raise ArbError(f"its header has no valid `{FIELD}.flips`", hint=hint)
