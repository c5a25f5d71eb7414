"""Summaries of runs from `config.json` and `metrics.jsonl`, and comparisons of runs.

Nothing here imports torch.
"""

import os
import re
import stat
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbcli.base.errors import ArbError
from arbcli.base.reading import read_json
from arbcli.base.run_files import CONFIG
from arbcli.training.record import METRICS, complete_lines, finite
from arbcli.training.schedule import Patience

_SCHEMA = {
    "config": dict, "config.seed": int, "config.steps": int, "init_from": str | None,
    "init_digest": str | None, "number": int | None, "started": str | None, "text": dict,
    "text.digest": str, "text.split": str | None,
}  # fmt: skip
_MAX_SPEEDS = 1000
"""Number of last records over which the median speed is computed."""
SPREADS = "loss", "val_loss", "best_val_loss", "seconds", "bytes_per_second"
"""Fields of runs of which a group has mean and standard deviation."""
_DIGEST_DIGITS = 12
"""Number of hexadecimal digits of a digest in tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Settings and last results of a run."""

    run: str
    """Path of the directory."""
    number: int
    """Number of the run in its folder, in order of starts; 0 if it has none."""
    started: str | None
    """Time of the start in ISO 8601."""
    seed: int
    settings: dict[str, Any]
    """All settings except the seed, flattened: `lr`, `ctx`, `mixer.heads`. `blocks` counts equal
    blocks, whose fields are listed once."""
    step: int
    """Step of the last record; 0 without records."""
    steps: int
    """Configured number of steps."""
    loss: float | None
    """Training loss of the last record in nats per byte."""
    val_loss: float | None
    """Last held-out loss in nats per byte; None if it was never evaluated."""
    best_val_loss: float | None
    """Lowest held-out loss in nats per byte."""
    best_step: int | None
    state_bytes: int | None
    """Size of the persistent training state."""
    peak_bytes: int | None
    """Maximum peak memory of all records."""
    seconds: float | None
    """Training time, including evaluations and saves."""
    bytes_per_second: float | None
    """Median training speed of the last 1,000 records."""


class RunReader:
    """Reads the summary of a run repeatedly; of its records only new ones are read.

    Args:
        run: directory of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._files: list[tuple[int, int, int] | None] = []
        self._summary: RunSummary
        self._begin()

    def _begin(self) -> None:
        self.branch = time.time()
        """Time of the first read; it changes when existing records are replaced."""
        self._offset, self._line = 0, b""
        """Offset of the next line in the file of records, and the line before it."""
        self._last: dict[str, Any] = {}
        self._losses = Patience(None)
        self._peak_bytes: int | None = None
        self._speeds: deque[float] = deque(maxlen=_MAX_SPEEDS)

    def read(self) -> RunSummary:
        """Read changes, and return the summary.

        Raises:
            ArbError: the run cannot be read, or is damaged.
        """
        files = [_file_state(self._run / name) for name in (CONFIG, METRICS)]
        if files == self._files:
            return self._summary
        facts = read_json(self._run / CONFIG, _SCHEMA)
        self._read_records()
        last, losses = self._last, self._losses
        self._summary = RunSummary(
            run=str(self._run),
            number=facts.get("number") or 0,
            started=facts.get("started"),
            seed=facts["config"]["seed"],
            settings=_settings(facts),
            step=last.get("step", 0),
            steps=facts["config"]["steps"],
            loss=last.get("loss"),
            val_loss=losses.last,
            best_val_loss=None if losses.best_step is None else losses.best,
            best_step=losses.best_step,
            state_bytes=last.get("state_bytes"),
            peak_bytes=self._peak_bytes,
            seconds=last.get("seconds"),
            bytes_per_second=statistics.median(self._speeds) if self._speeds else None,
        )
        self._files = files
        return self._summary

    def _read_records(self) -> None:
        lines = complete_lines(self._run, self._offset - len(self._line))
        if self._line and next(lines, (b"",))[0] != self._line:
            self._begin()
            lines = complete_lines(self._run, 0)
        for line, record in lines:
            self._offset, self._line = self._offset + len(line), line
            if record is not None:
                self._add_record(record)

    def _add_record(self, record: dict[str, Any]) -> None:
        self._last = record
        if (loss := record.get("val_loss")) is not None:
            self._losses.add(record["step"], loss)
        if peak := record.get("peak_bytes"):
            self._peak_bytes = max(self._peak_bytes or 0, peak)
        if speed := record.get("bytes_per_second"):
            self._speeds.append(speed)


def read_run(run: Path) -> RunSummary:
    """Read the summary of a run.

    Raises:
        ArbError: the run cannot be read, or is damaged.
    """
    return RunReader(run).read()


def _file_state(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and modification time of a file, in ns; None if it is missing."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def list_runs(folder: Path) -> list[Path]:
    """List the runs in a folder by name.

    Links, which may lead out of the folder, and names with unprintable characters are left out.

    Raises:
        ArbError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            directories = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise ArbError(f"cannot read `{folder}`: {error.strerror}", "name a folder") from None
    return sorted(run for run in directories if run.name.isprintable() and _is_run(run))


def _is_run(run: Path) -> bool:
    """Return whether a directory has the configuration of a run, and its files are no links."""
    modes = {}
    for name in (CONFIG, METRICS):
        with suppress(OSError):
            modes[name] = os.lstat(run / name).st_mode
    return CONFIG in modes and all(map(stat.S_ISREG, modes.values()))


def _settings(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run except its seed, with digests of text and initial weights."""
    settings = dict(flat_items(finite(facts["config"])))
    del settings["seed"]
    if facts["text"].get("split") != "files":  # files are held out by the seed
        settings["text"] = facts["text"]["digest"][:_DIGEST_DIGITS]
    if origin := facts.get("init_from"):
        digest = facts.get("init_digest") or ""
        settings["init_from"] = f"{origin} {digest[:_DIGEST_DIGITS]}".strip()
    prefix = re.compile(r"^model\.(stages\.(?!\d)(blocks\.(?!\d))?)?")
    return {prefix.sub("", name): value for name, value in settings.items()}


def flat_items(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested objects with keys joined by dots; see `RunSummary.settings`."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from flat_items(value, f"{path}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield path, len(value)
            if all(item == value[0] for item in value):
                yield from flat_items(value[0], f"{path}.")
            else:
                yield from flat_items({str(n): item for n, item in enumerate(value)}, f"{path}.")
        else:
            yield path, value


def differing_settings(runs: Sequence[RunSummary]) -> list[str]:
    """Return the names of settings that differ between runs; a missing setting is None."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    first = runs[0].settings if runs else {}
    return [
        name for name in names if any(run.settings.get(name) != first.get(name) for run in runs)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and standard deviation of a result over runs that differ only in their seed."""

    mean: float
    deviation: float | None
    """Sample standard deviation; None for a single run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """Runs that differ only in their seed, and statistics of their results."""

    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    """Settings that differ between groups."""
    steps: tuple[int, int]
    """Minimum and maximum number of completed steps."""
    loss: Spread | None
    """Training loss of the last records in nats per byte."""
    val_loss: Spread | None
    """Last held-out loss in nats per byte."""
    best_val_loss: Spread | None
    """Lowest held-out loss in nats per byte."""
    state_bytes: int | None
    peak_bytes: int | None
    """Maximum over the runs."""
    seconds: Spread | None
    bytes_per_second: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Comparison of several runs."""

    settings: tuple[str, ...]
    """Names of the settings that differ."""
    groups: tuple[RunGroup, ...]
    runs: tuple[RunSummary, ...]


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Compare runs; those that differ only in their seed form one group.

    Raises:
        ArbError: a run is named twice, cannot be read, or has no records.
    """
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ArbError(f"`{path}` is named twice", "name each run once")
    runs = [read_run(path) for path in paths]
    for run in runs:
        if not run.step:
            raise ArbError(f"`{run.run}` has no records", "leave it out, or train it first")
    differing = differing_settings(runs)
    grouped: dict[str, list[RunSummary]] = {}
    for run in runs:
        grouped.setdefault(repr([run.settings.get(name) for name in differing]), []).append(run)
    return RunComparison(
        settings=tuple(differing),
        groups=tuple(_group(members, differing) for members in grouped.values()),
        runs=tuple(runs),
    )


def _group(runs: Sequence[RunSummary], differing: Sequence[str]) -> RunGroup:
    def values(name: str) -> list[Any]:
        return [value for run in runs if (value := getattr(run, name)) is not None]

    def spread(name: str) -> Spread | None:
        if not (numbers := values(name)):
            return None
        deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
        return Spread(mean=statistics.fmean(numbers), deviation=deviation)

    return RunGroup(
        runs=tuple(run.run for run in runs),
        seeds=tuple(run.seed for run in runs),
        settings={name: runs[0].settings.get(name) for name in differing},
        steps=(min(values("step")), max(values("step"))),
        state_bytes=max(values("state_bytes"), default=None),
        peak_bytes=max(values("peak_bytes"), default=None),
        **{name: spread(name) for name in SPREADS},
    )
