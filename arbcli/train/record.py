"""What a run tells while it goes on and when it ends, and the file of its records."""

import dataclasses
import json
import math
from collections.abc import Iterator
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
    bytes_seen: int
    """Of text, by all steps so far; what is seen again counts again."""
    seconds: float
    """Since the run began, evaluations and saves too, but not while it was stopped."""
    bytes_per_second: float
    """Text seen a second since the last record, evaluation not counted."""
    mfu: float | None
    """Model FLOPs utilisation: the operations that the model needs, as a share of what the GPU can
    do in bf16; None where the peak of the device is not known. See `model.operations`."""
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
    sample: str | None
    """What the model wrote at this step, where a sample was due."""

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

    def as_json(self) -> dict[str, Any]:
        """List the fields, as `Record.as_json` does."""
        return _finite(dataclasses.asdict(self))


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


def read_records(run: Path) -> Iterator[dict[str, Any]]:
    """Read the records of a run, as `Record.as_json` has them; a line that is none is left out."""
    path = run / METRICS
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def count_records(run: Path, step: int) -> tuple[int, int, int]:
    """Count the records of a run, the lines that are none, and the records after a step."""
    path = run / METRICS
    good = bad = after = 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        if not _is_until(math.inf, line):
            bad += 1
        else:
            good += 1
            after += not _is_until(step, line)
    return good, bad, after


def best_step(run: Path) -> int | None:
    """Find the step with the lowest held-out loss of a run; None if there is none yet."""
    best: tuple[float, int] | None = None
    for record in read_records(run):
        with suppress(ValueError, KeyError, TypeError):  # one without a loss among them
            found = float(record["val_loss"]), int(record["step"])
            best = min(best or found, found)
    return None if best is None else best[1]


def seconds_so_far(run: Path) -> float:
    """Find how long a run has taken until its last record; one of an earlier version has none."""
    found = [record.get("seconds") for record in read_records(run)]
    return max((s for s in found if type(s) in (int, float)), default=0.0)


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


def _is_until(step: float, line: str) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
