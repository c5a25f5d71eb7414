"""Measurements as files: `benchmarks/results/NAME.json`, one a benchmark.

A file is `{"name": ..., "runs": [...]}`, and a run says where its rows come from: `command`,
`commit`, `dirty` (whether the tree had changes), `hardware`, `versions`. A row that is
measured again leaves its old run, and a run without rows the file. No file holds a date: git knows.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
CYCLES = 1_000_000
"""Cycles that a clock rate is measured over, half a millisecond."""
KEYS = {
    "quality": ("preset", "options", "seed"),
    "code": ("preset", "options", "seed"),
    "code_base": ("preset", "options", "seed", "steps"),
    "training_step": ("preset", "kind"),
    "peaks": ("preset", "kind"),
    "generation": ("preset", "prompt_bytes", "kind"),
    "several_texts": ("preset", "batch", "kind"),
    "checked_texts": ("preset", "prompt", "way", "size", "has_head", "favour"),
    "products": ("size", "rows", "what"),
    "arb_3b": ("kind", "batch", "recompute"),
    "many_gpus": ("part", "preset", "kind", "gpus", "seed"),
    "cpu_step": ("preset", "kind", "compute"),
    "cpu_text": ("preset", "digits", "task", "program", "threads", "level"),
    "large_tuning": ("shape", "kind", "ctx", "batch", "accum"),
    "tuning": ("part", "kind", "lr", "seed"),
    "tuning_tokens": ("part", "text", "kind", "lr", "seed"),
    "ternary_tuning": ("kind", "lr", "taught", "fade_from", "fade_to", "seed"),
    "ternary_tuning_tokens": ("kind", "lr", "taught", "fade_from", "fade_to", "seed"),
    "hnet": ("preset", "kind"),
    "families": ("preset", "kind"),
    "frontier": ("kind", "shape", "way"),
    "scaling": ("kind", "shape", "steps", "seed"),
    "step_budget": ("model",),
    "shakespeare": ("kind", "seed"),
}
"""Fields that name a row, by file."""
RUN_FIELDS = ("command", "commit", "dirty", "hardware", "versions", "rows")
HARDWARE_FIELDS = ("gpu", "driver", "cuda", "cpu", "cpu_cores")
VERSION_FIELDS = ("arb", "torch", "triton", "python")


def load(name: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Read the runs of a benchmark, in the order of the file; none if there is no file.

    Raises:
        ValueError: the file has another layout.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if content.get("name") != name or set(content) != {"name", "runs"}:
        raise ValueError(f"{path}: not the results of {name}")
    for run in content["runs"]:
        for part, fields in (
            (run, RUN_FIELDS),
            (run.get("hardware", {}), HARDWARE_FIELDS),
            (run.get("versions", {}), VERSION_FIELDS),
        ):
            if set(part) != set(fields):
                raise ValueError(f"{path}: fields {sorted(part)}, not {sorted(fields)}")
    return content["runs"]


def save(name: str, rows: Sequence[dict[str, Any]], *, command: str, folder: Path = FOLDER) -> None:
    """Add a run of this machine and commit to the file of a benchmark.

    Args:
        name: of the benchmark.
        rows: of plain values.
        command: that measured them.
        folder: where the file is; made if it is not there.
    """
    commit, dirty = find_commit()
    run = {
        "command": command,
        "commit": commit,
        "dirty": dirty,
        "hardware": find_hardware(),
        "versions": find_versions(),
        "rows": list(rows),
    }
    add_runs(name, [run], folder)


def add_runs(name: str, runs: Iterable[dict[str, Any]], folder: Path = FOLDER) -> None:
    """Add runs to a file, and drop what they measured again.

    Args:
        name: of the benchmark.
        runs: as `load` returns them.
        folder: where the file is; made if it is not there.
    """
    runs = list(runs)
    new = {_key(name, row) for run in runs for row in run["rows"]}
    kept_runs = []
    for run in load(name, folder):
        rows = [row for row in run["rows"] if _key(name, row) not in new]
        if rows:
            kept_runs.append(run | {"rows": rows})
    folder.mkdir(parents=True, exist_ok=True)
    content = {"name": name, "runs": kept_runs + runs}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _key(name: str, row: dict[str, Any]) -> tuple:
    return tuple(row[field] for field in KEYS[name])


def find_commit() -> tuple[str, bool]:
    """Return the commit, and whether the tree has changes.

    `ARB_COMMIT` says it where the tree is a copy without its history; `+` at its end says that
    there are changes.

    Raises:
        SystemExit: nothing says it.
    """
    given = os.environ.get("ARB_COMMIT")
    if given:
        return given.rstrip("+"), given.endswith("+")
    try:
        commit = _output("git", "rev-parse", "--short=7", "HEAD")
        return commit, bool(_output("git", "status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        sys.exit("no commit is known: set ARB_COMMIT")


def _output(*command: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def find_hardware() -> dict[str, str | int | None]:
    """Name the GPU with its driver and CUDA, None where there is none, and the CPU."""
    import torch

    gpu = driver = None
    if torch.cuda.is_available():
        gpu, driver = torch.cuda.get_device_name(), query_gpu("driver_version")
    return {
        "gpu": gpu,
        "driver": driver,
        "cuda": torch.version.cuda if gpu else None,
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
    }


def query_gpu(field: str) -> str | None:
    """Query the driver about the GPU, like `nvidia-smi --query-gpu`; None if that fails."""
    try:
        return _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i0")
    except (OSError, subprocess.CalledProcessError):
        return None


def read_clock() -> dict[str, float]:
    """Measure the clock rate of the GPU's processors in MHz, after the work that is queued.

    A kernel waits for a number of cycles. Drivers of some virtual machines do not tell the rate.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    return {"sm_mhz": round(CYCLES / (1e3 * start.elapsed_time(end)))}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def find_versions() -> dict[str, str | None]:
    """List the versions that decide what is measured."""
    from arbcli.version import __version__

    versions: dict[str, str | None] = {"arb": __version__, "python": platform.python_version()}
    for name in ("torch", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


class Options(argparse.ArgumentParser):
    """Options of a benchmark, which ends before it measures if rows could not name a commit."""

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """Read the options, then look for a commit, which `--help` does not need."""
        arguments = super().parse_known_args(*given, **named)
        find_commit()
        return arguments


def options(name: str, what: str) -> argparse.ArgumentParser:
    """Begin the options of a benchmark with those that all have.

    Args:
        name: of the module in `benchmarks`.
        what: it does, in a sentence.
    """
    parser = Options(prog=f"python -m benchmarks.{name}", description=what)
    parser.add_argument(
        "--out", type=Path, default=FOLDER, metavar="DIR", help="folder of the JSON file"
    )
    return parser


def command_line(name: str, *words: str) -> str:
    """Write how a benchmark was called."""
    return " ".join(["python -m", f"benchmarks.{name}", *words])
