"""Weights & Biases; `WANDB_MODE=offline` keeps all of it in the run's directory."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import wandb

from arbcli.loggers import base


class Logger(base.Logger):
    """Hands on to `wandb`."""

    name = "wandb"

    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Begin; a run that goes on is the same one there."""
        began = f"{run.resolve()} {facts.get('started')}"
        self._run = wandb.init(
            project=base.PROJECT,
            name=run.resolve().name,
            id=sha256(began.encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run),
            config=base.flat_settings(facts),
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Hand on numbers."""
        self._run.log(values, step=step)

    def histograms(self, step: int, values: dict[str, base.Histogram]) -> None:
        """Hand on histograms."""
        bars = {k: wandb.Histogram(np_histogram=(v.counts, v.edges)) for k, v in values.items()}
        self._run.log(bars, step=step)

    def text(self, step: int, text: str) -> None:
        """Hand on a sample, as a table of one cell."""
        self._run.log({"sample": wandb.Table(["step", "text"], [[step, text]])}, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
