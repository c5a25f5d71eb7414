"""Records of a run and their file `metrics.jsonl`, and the final report."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbcli.base.atomic_files import open_to_append, write_file
from arbcli.base.errors import ArbError, os_errors, shell_word
from arbcli.base.reading import open_regular, parse_json, type_check
from arbcli.config.training import TrainConfig
from arbcli.training.schedule import Patience, is_evaluated, is_recorded

METRICS = "metrics.jsonl"
"""File of a run's records in JSON lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of `metrics.jsonl`."""

    step: int
    """Number of steps done."""
    loss: float
    """Mean training loss since the last record, in nats per byte."""
    bits_per_byte: float
    """`loss` in bits per byte."""
    val_loss: float | None
    """Held-out loss in nats per byte, if it was evaluated."""
    token_loss: float | None
    """`loss` in nats per token; None for a model of bytes."""
    token_val_loss: float | None
    """`val_loss` in nats per token."""
    lr: float
    """Learning rate of the last step."""
    bytes_seen: int
    """Bytes of text read by all steps so far, counting repetitions, without padding."""
    seconds: float
    """Time since the run began, including evaluations and saves, but not interruptions."""
    bytes_per_second: float | None
    """Training speed since the last record, without evaluations; None if no step was timed, as
    after a resume at a step whose record is missing."""
    mfu: float | None
    """Model FLOPs utilisation relative to the GPU's bf16 peak; None if the peak is unknown. See
    `model.operations`."""
    flip_share: float | None
    """Mean share of trits that a step changed, since the last record."""
    state_bytes: int
    """Persistent state: weights and the state of the rule or optimizer."""
    peak_bytes: int
    """Peak memory of the CUDA allocator, or of the process on a CPU."""
    seconds_left: float | None
    """Estimated remaining time; None if no step was timed."""
    nonfinite_steps: int
    """Number of steps so far with a gradient that was not finite."""
    parts: dict[str, float]
    """Auxiliary losses of the last step by name: see `LanguageModel.losses`."""
    gauges: dict[str, float]
    """Metrics of the model: see `LanguageModel.gauges`."""
    sample: str | None
    """Generated text, if a sample was due."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields, with None for numbers that are not finite, which JSON lacks.

        Unlike a `val_loss` that is missing, one that is not finite is also among the gauges.
        """
        fields = {name: finite(getattr(self, name)) for name in _TYPES}
        if fields["val_loss"] is None and self.val_loss is not None:
            fields["gauges"]["val_loss"] = None
        return fields


def finite(value: Any) -> Any:
    """Replace floats in a JSON value that are not finite by None."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_number(value: float | None) -> float:
    """Replace None, which stands for a number that is not finite, by NaN."""
    return math.nan if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first step of a process, in which kernels are compiled."""

    step: int
    """Number of the step: 1, unless the run was resumed."""
    loss: float
    """Loss before the update, in nats per byte."""
    seconds: float
    kernels_compiled: int
    kernels_loaded: int
    """Number of kernels that were loaded from the cache."""
    compile_seconds: float | None
    """Time for compiling and loading; None for a baseline under `torch.compile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Report of a finished or interrupted run."""

    run: str | None
    """None for a run that was not saved."""
    checkpoint: str | None
    """Path of the last checkpoint; None for a run that was not saved."""
    steps: int
    val_loss: float | None
    """Held-out loss in nats per byte; None without a final evaluation."""
    bits_per_byte: float | None
    entropy: float
    """Order-0 entropy of the held-out text in nats per byte."""
    seconds: float = 0.0
    """Time in this process; 0 if the run was already finished."""
    sample: str = ""
    """Generated text; empty if the run was stopped or already finished, or if its held-out text is
    mostly sounds and pictures."""
    stopped_by: str | None = None
    """Name of the signal that ended the run early."""
    first_step: FirstStep | None = None
    """The first step of this process; None if it made no step."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields like `Record.as_json`."""
        return finite(dataclasses.asdict(self))


def _append_line(run: Path, line: bytes) -> None:
    path = run / METRICS
    hint = f"free some space, then continue with `--resume {shell_word(run)}`"
    with os_errors("write", path, hint), open_to_append(path) as file:
        file.write(line)


def _line_of(record: Record) -> bytes:
    return json.dumps(record.as_json(), allow_nan=False).encode() + b"\n"


_TYPES: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Record)}
SCHEMA: dict[str, Any] = {
    name: kind if name == "step" else kind | None for name, kind in _TYPES.items()
} | {"parts": dict[str, float | None] | None, "gauges": dict[str, float | None] | None}
"""JSON schema of a record; earlier versions lack fields, and None stands for NaN or infinity."""


MAX_LINE = 2**20
"""Maximum size of a record in bytes."""
MAX_BYTES = 2**30
"""Maximum size of a run's file of records, enough for more than a million."""


_TESTS = {name: type_check(kind) for name, kind in SCHEMA.items()}


def _lines(run: Path, offset: int = 0) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield the lines of a run's file of records, each with its record, or None if invalid."""
    path = run / METRICS
    if not os.path.lexists(path):
        return
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            raise ArbError(
                f"`{path}` has {size:,} bytes, and records have at most {MAX_BYTES:,}",
                "restore it from a backup, or move it out of the run",
            )
        file.seek(offset)
        while line := file.readline(MAX_LINE):
            yield line, _parsed(line)


def complete_lines(run: Path, offset: int) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield the lines of a run's file of records, except a last one that is still being written.

    Args:
        run: directory of the run.
        offset: position of the first line in the file.

    Yields:
        A line, and its record; None if it is invalid.

    Raises:
        ArbError: the file cannot be read.
    """
    for line, record in _lines(run, offset):
        if not line.endswith(b"\n") and len(line) < MAX_LINE:
            break
        yield line, record


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a record; None if the line is truncated or invalid."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    fits = type(record) is dict and all(test(record.get(name)) for name, test in _TESTS.items())
    return {name: record[name] for name in SCHEMA if name in record} if fits else None


def read_records(run: Path) -> list[dict[str, Any]]:
    """Read the records of a run as dictionaries, without invalid lines.

    Raises:
        ArbError: the file cannot be read.
    """
    return read_all_records(run)[0]


def read_all_records(run: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the records of a run, and count the invalid lines.

    Raises:
        ArbError: the file cannot be read.
    """
    lines = [record for _, record in _lines(run)]
    records = [record for record in lines if record is not None]
    return records, len(lines) - len(records)


def keep_records(run: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the records of a run for which `keep` is false, and invalid lines.

    Raises:
        ArbError: the file cannot be read or written; it is unchanged then.
    """
    lines = [line for line, _ in _lines(run)]
    if (kept := _kept_lines(run, keep)) != lines:
        write_file(run / METRICS, lambda file: file.writelines(kept))


def _kept_lines(run: Path, keep: Callable[[dict[str, Any]], bool]) -> list[bytes]:
    """Return the valid lines whose record satisfies `keep`, each with its newline."""
    return [
        line.rstrip(b"\r\n") + b"\n"
        for line, record in _lines(run)
        if record is not None and keep(record)
    ]


def best_step(records: Iterable[dict[str, Any]]) -> int | None:
    """Return the step with the lowest held-out loss; None if none was evaluated."""
    return Patience(None, held_out_losses(records)).best_step


def held_out_losses(records: Iterable[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the steps and held-out losses of the records that have one; NaN if not finite."""
    losses = []
    for record in records:
        loss = record.get("val_loss")
        if loss is not None or "val_loss" in (record.get("gauges") or ()):
            losses.append((record["step"], as_number(loss)))
    return losses


class RunRecords:
    """The records of a run that is training.

    A run that resumes from a checkpoint before its newest one replaces the later records. Until the
    first checkpoint of the new branch is saved and the later ones are set aside, a kill leaves the
    run at its newest checkpoint, so the file keeps the records of the old branch until then, and
    those of the new one are in memory.

    Args:
        run: directory of the run; None reads and writes no file.
        keep: whether a record precedes the step of the resume; None is a new run.
        branches: whether the run has checkpoints of later steps.

    Raises:
        ArbError: the file cannot be read or written.
    """

    def __init__(
        self,
        run: Path | None,
        keep: Callable[[dict[str, Any]], bool] | None = None,
        *,
        branches: bool = False,
    ) -> None:
        self._run = run
        self._branch: list[bytes] | None = None
        """Lines of the new branch, while the file has those of the old one."""
        self._held: Record | None = None
        if run is not None and keep is not None:
            if branches:
                self._branch = _kept_lines(run, keep)
            else:
                keep_records(run, keep)

    def append(self, record: Record, *, hold: bool = False) -> None:
        """Append a record.

        Args:
            record: the record.
            hold: keep it in memory until `release`, which adds gauges.

        Raises:
            ArbError: it cannot be written.
        """
        if self._run is None:
            return
        if hold:
            self._held = record
        elif self._branch is not None:
            self._branch.append(_line_of(record))
        else:
            _append_line(self._run, _line_of(record))

    def release(self, gauges: dict[str, float]) -> None:
        """Append the record that is held, if there is one, with more gauges."""
        if self._held is not None:
            record, self._held = self._held, None
            self.append(dataclasses.replace(record, gauges=record.gauges | gauges))

    def read(self) -> list[dict[str, Any]]:
        """Return all records of the branch."""
        if self._branch is not None:
            records = [record for line in self._branch if (record := _parsed(line)) is not None]
        else:
            records = [] if self._run is None else read_records(self._run)
        return [*records, *([self._held.as_json()] if self._held else [])]

    def merge_branches(self) -> None:
        """Write the records of the new branch, followed by later records of the old branch."""
        if self._run is not None and self._branch is not None:
            last = max((record["step"] for record in self.read()), default=0)
            self._write(self._branch + _kept_lines(self._run, lambda old: old["step"] > last))

    def drop_old_branch(self) -> None:
        """Drop the records of the old branch, once its checkpoints are set aside."""
        if self._run is not None and self._branch is not None:
            self._write(self._branch)
            self._branch = None

    def _write(self, lines: list[bytes]) -> None:
        assert self._run is not None
        write_file(self._run / METRICS, lambda file: file.writelines(lines))


def is_kept(record: dict[str, Any], step: int, config: TrainConfig, has_recent: bool) -> bool:
    """Return whether a record is kept when the run resumes from the checkpoint of a step.

    Later records are written again, and so is that of the step if its evaluation is missing. An
    extra record of a stop is dropped, as its steps are included in the next one.

    Args:
        record: see `Record.as_json`.
        step: step of the checkpoint.
        config: configuration of the run.
        has_recent: whether the checkpoint has losses of the last steps.
    """
    if record["step"] != step or record.get("val_loss") is not None:
        return record["step"] <= step
    if is_evaluated(config, step):
        return False
    # the sample may be from before `sample_every` was changed
    return is_recorded(config, step) or record.get("sample") is not None or not has_recent
