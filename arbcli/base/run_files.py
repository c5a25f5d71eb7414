"""Names of runs and checkpoints, and how to find them, without importing torch."""

import re
from contextlib import suppress
from pathlib import Path

from arbcli.base.errors import ArbError, shell_word
from arbcli.base.reading import read_json

CONFIG = "config.json"
"""File of a run with its configuration, its text, and the versions at its start."""
TOKENIZER = "tokenizer.json"
"""File of a run with its tokenizer."""
COMPANIONS = "hugging_face"
"""Folder of a run with other files of an imported model, which exports include."""
RUNS = Path("runs")
"""Default directory of runs."""
_NAME = re.compile(r"(?:step|best)-([0-9]{6,})(?:\.float)?\.safetensors")


def checkpoint_path(directory: Path, step: int, weights: str = "ternary") -> Path:
    """Return the path of the checkpoint of a step; the name marks those of a baseline.

    Args:
        directory: directory of the run.
        step: number of steps done.
        weights: `weights` of the model: `ternary`, or that of a float baseline.
    """
    suffix = "" if weights == "ternary" else ".float"
    return directory / f"step-{step:06d}{suffix}.safetensors"


def is_baseline(path: Path) -> bool:
    """Return whether a run or a checkpoint is of a float baseline, by the names of checkpoints."""
    files = checkpoints(path) if path.is_dir() else [path]
    return any(file.name.endswith(".float.safetensors") for file in files)


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of a run, highest step first."""
    paths = directory.glob("step-*.safetensors")
    files = (path for path in paths if _NAME.fullmatch(path.name) and not path.is_dir())
    return sorted(files, key=step_of, reverse=True)


def best_checkpoints(directory: Path) -> list[Path]:
    """Return the best checkpoint of a run; two if `keep_best` was interrupted."""
    return sorted(p for p in directory.glob("best-*.safetensors") if _NAME.fullmatch(p.name))


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint or best checkpoint.

    Raises:
        ValueError: the file has another name.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"`{path.name}` is not the name of a checkpoint")
    return int(match[1])


def missing_checkpoint(directory: Path) -> ArbError:
    """Return the error for a directory without a checkpoint."""
    with suppress(ArbError):
        if "model_type" in read_json(directory / CONFIG, {}):
            return ArbError(
                f"`{directory}` is a model of Transformers, and no run",
                f"convert it to one: `arb import {shell_word(directory)}`",
            )
    hint = "name the directory of a run with a checkpoint"
    if best := best_checkpoints(directory):
        hint = f"name the best one of the run: `{shell_word(best[-1])}`"
    return ArbError(f"there is no checkpoint in `{directory}`", hint)


def run_of(path: Path) -> Path:
    """Return the directory of a checkpoint, or `path` itself if it is a directory."""
    return path if path.is_dir() else path.parent


def require_run(path: Path) -> Path:
    """Return the directory of a run, given the directory or a checkpoint in it.

    Raises:
        ArbError: the directory has no run, or only weights.
    """
    run = run_of(path)
    if not (run / CONFIG).exists() and checkpoints(run):
        raise ArbError(
            f"`{run}` has weights, and no settings of training, as after `arb import`",
            f"train from them: `arb train --init-from {shell_word(path)}`",
        )
    if not path.exists() or not (run / CONFIG).exists():
        raise ArbError(f"there is no run at `{path}`", "name a run directory or a checkpoint")
    return run


def latest_run(root: Path = RUNS) -> Path:
    """Return the most recently started run that has a checkpoint.

    Raises:
        ArbError: there is none, or a `config.json` is invalid.
    """
    runs = [path.parent for path in root.glob(f"*/{CONFIG}") if checkpoints(path.parent)]
    if not runs:
        raise ArbError(
            f"there is no run with a checkpoint in `{root}`",
            "name a run or a checkpoint, or start a run with `arb train`",
        )

    def order(run: Path) -> tuple[int, str, str]:
        # modification times change with copies, and the clock may have been set back
        facts = read_json(run / CONFIG, {"number": int | None, "started": str | None})
        return facts.get("number") or 0, facts.get("started") or "", run.name

    return max(runs, key=order)


def check_free(run: Path) -> None:
    """Check that a path can become the directory of a new run.

    Raises:
        ArbError: it is a file, or contains a run or its weights.
    """
    if run.is_file():
        raise ArbError(f"`{run}` is a file", "choose another `--out`")
    if not (run / CONFIG).exists() and (checkpoints(run) or best_checkpoints(run)):
        raise ArbError(
            f"`{run}` already contains weights, which a new run would replace",
            f"choose another `--out`; `--init-from {shell_word(run)}` starts from them",
        )
    if (run / CONFIG).exists():
        raise ArbError(
            f"`{run}` already contains a run",
            f"continue it with `--resume {shell_word(run)}`, or choose another `--out`",
        )
