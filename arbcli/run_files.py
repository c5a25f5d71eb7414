"""Which runs and checkpoints there are, by the names of their files; it takes no torch to tell."""

import re
from pathlib import Path

from arbcli.errors import ArbError
from arbcli.reading import read_json

CONFIG = "config.json"
"""File of what a run computes, of its text, and of the versions that began it."""
COMPANIONS = "hugging_face"
"""Folder in a run with the files that came with an imported model, and go along when it leaves."""
RUNS = Path("runs")
"""Where runs are kept unless another place is named."""
_FILE_NAME = re.compile(r"step-([0-9]{6,})\.safetensors")
_BEST_NAME = re.compile(r"best-([0-9]{6,})\.safetensors")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return directory / f"step-{step:06d}.safetensors"


def checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run by their names, the highest step first."""
    paths = directory.glob("step-*.safetensors")
    found = (path for path in paths if _FILE_NAME.fullmatch(path.name) and not path.is_dir())
    return sorted(found, key=step_of, reverse=True)


def best_checkpoints(directory: Path) -> list[Path]:
    """List what `keep_best` has named, at most one unless it was ended in between."""
    return sorted(p for p in directory.glob("best-*.safetensors") if _BEST_NAME.fullmatch(p.name))


def step_of(path: Path) -> int:
    """Read the step off the name of a checkpoint, or of one that is kept as the best.

    Raises:
        ValueError: the file has another name.
    """
    named = _FILE_NAME.fullmatch(path.name) or _BEST_NAME.fullmatch(path.name)
    if named is None:
        raise ValueError(f"`{path.name}` does not name a checkpoint")
    return int(named[1])


def without_checkpoint(directory: Path) -> ArbError:
    """Make the error of a directory that has none."""
    return ArbError(
        f"there is no checkpoint in `{directory}`",
        hint="give the directory of a run that has saved one",
    )


def run_of(path: Path) -> Path:
    """Return the directory of a checkpoint, or a directory itself, whether it has a run or not."""
    return path if path.is_dir() else path.parent


def directory_of(path: Path) -> Path:
    """Return the directory of a run, given the directory or a checkpoint in it.

    Raises:
        ArbError: the directory has no run.
    """
    run = run_of(path)
    if not path.exists() or not (run / CONFIG).exists():
        raise ArbError(f"there is no run at `{path}`", hint="name a run directory or a checkpoint")
    return run


def latest_run(root: Path = RUNS) -> Path:
    """Find the run that was started last, of those with a checkpoint.

    Raises:
        ArbError: there is none, or a `config.json` is not JSON.
    """
    runs = [path.parent for path in root.glob(f"*/{CONFIG}") if checkpoints(path.parent)]
    if not runs:
        raise ArbError(
            f"there is no run in `{root}` that has saved anything",
            hint="name a run or a checkpoint, or start a run with `arb train`",
        )

    def begun(run: Path) -> tuple[int, str, str]:
        # no time of a file: a copy has another; and a clock may be set back
        facts = read_json(run / CONFIG, {"number": int | None, "started": str | None})
        return facts.get("number") or 0, facts.get("started") or "", run.name

    return max(runs, key=begun)


def check_free(run: Path) -> None:
    """Refuse a directory that holds a run, or is a file.

    Raises:
        ArbError: it does, or is.
    """
    if run.is_file():
        raise ArbError(f"`{run}` is a file", hint="choose another `--out`")
    if (run / CONFIG).exists():
        raise ArbError(
            f"`{run}` holds a run already",
            hint=f"continue it with `--resume {run}`, or choose another `--out`",
        )
