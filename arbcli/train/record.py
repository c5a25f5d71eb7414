"""Records of a run, its final report, and the file of records."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbcli.checkpoint import write_file
from arbcli.errors import ArbError
from arbcli.reading import open_regular, parse_json, test_of

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
    token_loss: float | None
    """`loss` in nats a token; None of a model of bytes."""
    token_val_loss: float | None
    """`val_loss` in nats a token."""
    lr: float
    """Learning rate of the last step."""
    bytes_seen: int
    """Of text, by all steps so far; what is seen again counts again."""
    seconds: float
    """Since the run began, evaluations and saves too, but not while it was stopped."""
    bytes_per_second: float | None
    """Text seen a second since the last record, evaluation not counted; None if no step was timed,
    as where a run goes on at a step whose record is missing."""
    mfu: float | None
    """Model FLOPs utilisation: the operations that the model needs, as a share of what the GPU can
    do in bf16; None where the peak of the device is not known. See `model.operations`."""
    flip_share: float | None
    """Share of the trits that changed in a step, on average since the last record."""
    state_bytes: int
    """Persistent state: weights and whatever the rule or the optimizer stores."""
    peak_bytes: int
    """The most memory held at once: of the CUDA allocator, or of the process on a CPU."""
    seconds_left: float | None
    """None if no step was timed."""
    nonfinite_steps: int
    """Steps so far in which a gradient was not finite."""
    parts: dict[str, float]
    """Other losses of the last step, by name: see `LanguageModel.losses`."""
    gauges: dict[str, float]
    """Measurements that the model takes of itself."""
    sample: str | None
    """Sample of this step, where one was due."""

    def as_json(self) -> dict[str, Any]:
        """List the fields; a number that is not finite, which JSON has not, is None."""
        return finite(dataclasses.asdict(self))


def finite(value: Any) -> Any:
    """Replace every float in a JSON value that is not finite by None."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first step that a process does: kernels are compiled in it."""

    step: int
    """Its number: 1, unless the run was resumed."""
    loss: float
    """Loss on its text before it changes the weights, nats a byte."""
    seconds: float
    kernels_compiled: int
    kernels_loaded: int
    """Kernels that were compiled by a process before this one."""
    compile_seconds: float | None
    """Time that both took; None for a float twin that torch compiles, which does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Report of a finished or interrupted run."""

    run: str | None
    """None for a run that was not saved."""
    checkpoint: str | None
    """None for a run that was not saved, and for a float twin, which is measured and not kept."""
    steps: int
    val_loss: float | None
    """Nats a byte; None if the run is never evaluated, or was stopped before its last
    evaluation."""
    bits_per_byte: float | None
    entropy: float
    """Order-0 entropy of the held-out text, nats a byte."""
    seconds: float
    sample: str
    """Empty if the run was stopped, or finished before."""
    stopped_by: str | None
    """Name of the signal that ended the run early."""
    first_step: FirstStep | None
    """None if this process did no step."""

    def as_json(self) -> dict[str, Any]:
        """List the fields, as `Record.as_json` does."""
        return finite(dataclasses.asdict(self))


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


_TYPES: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Record)}
SCHEMA: dict[str, Any] = {
    name: kind if name == "step" else kind | None for name, kind in _TYPES.items()
} | {"parts": dict[str, float | None] | None, "gauges": dict[str, float | None] | None}
"""Fields of a record as JSON has them. A version may lack some, and None is a number that is not
finite."""


LONGEST_LINE = 2**20
"""Bytes of a record."""


_TESTS = {name: test_of(kind) for name, kind in SCHEMA.items()}


def _lines(run: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Read the lines of the records of a run, each with what it holds; None: no record."""
    path = run / METRICS
    if not os.path.lexists(path):
        return
    with open_regular(path) as file:
        while line := file.readline(LONGEST_LINE):
            yield line, _parsed(line)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the records; None if it is torn, or no record."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    fits = type(record) is dict and all(test(record.get(name)) for name, test in _TESTS.items())
    return {name: record[name] for name in SCHEMA if name in record} if fits else None


def read_records(run: Path) -> list[dict[str, Any]]:
    """Read the records of a run, as `Record.as_json` has them; lines that are none are left out.

    Raises:
        ArbError: the file cannot be read.
    """
    return read_all_records(run)[0]


def read_all_records(run: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the records of a run, and count the lines that are none: torn, or altered.

    Raises:
        ArbError: the file cannot be read.
    """
    found = [record for _, record in _lines(run)]
    records = [record for record in found if record is not None]
    return records, len(found) - len(records)


def keep_records(run: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the records of a run that `keep` is false for, and lines that are none.

    Raises:
        ArbError: the file cannot be read or written; what was there before is intact.
    """
    lines = [*_lines(run)]
    kept = [line for line, record in lines if record is not None and keep(record)]
    if len(kept) < len(lines) or not all(line.endswith(b"\n") for line in kept):
        ended = [line.rstrip(b"\r\n") + b"\n" for line in kept]
        write_file(run / METRICS, lambda file: file.writelines(ended))


def best_step(run: Path) -> int | None:
    """Return the step with the lowest held-out loss of a run; None if it was never evaluated."""
    found = [
        (record["val_loss"], record["step"])
        for record in read_records(run)
        if record.get("val_loss") is not None
    ]
    return min(found)[1] if found else None


def seconds_until(run: Path, step: int) -> float:
    """Return how long a run took until its last record up to a step; 0 if no record says so."""
    records = (record for record in read_records(run) if record["step"] <= step)
    return max((record.get("seconds") or 0.0 for record in records), default=0.0)
