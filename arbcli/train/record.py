"""What a run tells while it goes on and when it ends, and the file of its records."""

import dataclasses
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbcli.checkpoint import write_text
from arbcli.errors import ArbError

METRICS = "metrics.jsonl"
"""File of a run's records, a JSON object a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of `metrics.jsonl`."""

    step: int
    """Steps done."""
    loss: float
    """Mean since the last record, nats a byte."""
    bits_per_byte: float
    """The same in bits."""
    val_loss: float | None
    """Nats a byte of held-out text, where it was evaluated."""
    lr: float
    """Learning rate of the last step."""
    bytes_per_second: float
    """Text seen a second since the last record, evaluation not counted."""
    flip_share: float | None
    """Share of the trits that changed in a step, on average since the last record."""
    state_bytes: int
    """What survives a step: weights and whatever the rule or the optimizer keeps."""
    peak_bytes: int
    """The most memory held at once: of the CUDA allocator, or of the process on a CPU."""
    seconds_left: float
    nonfinite_steps: int
    """Steps so far in which a gradient was not finite."""
    parts: dict[str, float]
    """What else the last step minimised, by name: see `LOSS_WEIGHTS`."""
    gauges: dict[str, float]
    """What the model measures of itself."""

    def as_json(self) -> dict[str, Any]:
        """List the fields; a number that is not finite, which JSON has not, is None."""
        return _finite(dataclasses.asdict(self))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What a finished or interrupted run reports."""

    run: str
    checkpoint: str | None
    """None for a float twin, which is measured and not kept."""
    steps: int
    val_loss: float | None
    """Nats a byte; None if the run was stopped before its last evaluation."""
    bits_per_byte: float | None
    entropy: float
    """Order-0 entropy of the held-out text, nats a byte."""
    seconds: float
    sample: str
    stopped_by: str | None
    """Name of the signal that ended the run early."""


def append_record(run: Path, record: Record) -> None:
    """Add a line to the records of a run.

    Raises:
        ArbError: it cannot be written.
    """
    path = run / METRICS
    try:
        with path.open("a") as file:
            file.write(json.dumps(record.as_json(), allow_nan=False) + "\n")
    except OSError as error:
        raise ArbError(
            f"cannot write `{path}`: {error.strerror}",
            hint=f"free some space, then continue with `--resume {run}`",
        ) from error


def best_step(run: Path) -> int | None:
    """Find the step with the lowest held-out loss of a run; None if there is none yet."""
    path = run / METRICS
    best: tuple[float, int] | None = None
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)
            if record["val_loss"] is not None:
                found = float(record["val_loss"]), int(record["step"])
                best = min(best or found, found)
    return None if best is None else best[1]


def drop_records_after(run: Path, step: int) -> None:
    """Drop the records after `step`, which will be written again, and lines that are none.

    Raises:
        ArbError: the file cannot be read or written; what was there before is intact.
    """
    path = run / METRICS
    try:
        text = path.read_text(errors="replace") if path.exists() else ""
    except OSError as error:
        raise ArbError(
            f"cannot read `{path}`: {error.strerror}", hint="check the path and its permissions"
        ) from error
    kept = "".join(line + "\n" for line in text.splitlines() if _is_until(step, line))
    if kept != text:
        write_text(path, kept)


def _is_until(step: int, line: str) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
