"""Runs of tiny models, what observes them, and directories of runs without checkpoints."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.config.training import TrainConfig, train_config_dict
from arbcli.model.checkpoint import Checkpoint
from arbcli.model.language_model import LanguageModel
from arbcli.training.observer import Observer

TINY = {
    "dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2, "device": "cpu",
}  # fmt: skip


def train(folder: Path, text: bytes, **settings) -> Path:
    """Train a tiny model on a text that is written to a folder, and return the run next to it."""
    from arbcli.training.configure import new_config
    from arbcli.training.run import start_run

    (folder / "text.txt").write_bytes(text)
    config = new_config(**TINY | {"data": [str(folder / "text.txt")]} | settings)
    start_run(config, folder / "run", Observer())
    return folder / "run"


def record(step: int, loss: float, val_loss: float | None = None, **others) -> dict:
    return {
        "step": step, "loss": loss, "val_loss": val_loss, "lr": 0.5, "bytes_seen": 64 * step,
        "seconds": step / 10, "bytes_per_second": 600.0 + step, "flip_share": 0.01,
        "state_bytes": 3 << 20, "peak_bytes": (step + 1) << 20,
    } | others  # fmt: skip


TIMINGS = ("seconds", "bytes_per_second", "seconds_left", "mfu", "peak_bytes")
"""Fields of a record that differ from run to run."""


def read_records(run: Path) -> list[dict]:
    """Read the records of a run, without what differs from run to run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


def model_of(options: dict, **others) -> ModelConfig:
    """Configure the model of a run with some options, a preset among them."""
    given = {name: value for name, value in options.items() if name != "batch"} | others
    return preset(given.pop("preset"), **given)


def observer_with(**methods: Callable) -> Observer:
    """Make an observer of a run with some methods, such as `noted`."""
    observer = Observer()
    vars(observer).update(methods)
    return observer


def checkpoint_of(model: LanguageModel) -> Checkpoint:
    """Make a checkpoint of step 7 of a model."""
    return Checkpoint(
        step=7,
        config=dataclasses.asdict(model.config),
        counters={"nonfinite_steps": 0},
        data={"digest": "of a text", "seed": 3, "position": 7},
        tensors=model.state_dict(),
    )


def make_run(
    run: Path,
    records: list[dict],
    *,
    text: dict | None = None,
    model: dict | None = None,
    **settings,
) -> Path:
    """Write `config.json` and `metrics.jsonl` of a run of `preset("tiny")`."""
    config = TrainConfig(model=preset("tiny", **model or {}), **{"steps": 100} | settings)
    facts = {
        "config": train_config_dict(config), "number": 1, "started": "2026-01-02T03:04:05+00:00",
        "text": {"digest": "0" * 128, "entropy": 3.0, "split": None} | (text or {}),
    }  # fmt: skip
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(facts))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    return run
