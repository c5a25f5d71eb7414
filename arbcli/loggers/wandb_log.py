"""Logger for Weights & Biases; with `WANDB_MODE=offline` it writes to the run's directory."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import wandb

from arbcli.base.atomic_files import make_folder
from arbcli.loggers import base


class Logger(base.Logger):
    """Logs to `wandb`."""

    name = "wandb"

    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Create a run, or continue the same run after a resume."""
        make_folder(run / "wandb")
        identity = f"{run.resolve()} {facts.get('started')}"
        self._run = wandb.init(
            project=base.PROJECT,
            name=run.resolve().name,
            id=sha256(identity.encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run),
            config=base.flat_settings(facts),
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log scalars."""
        self._run.log(values, step=step)

    def histograms(self, step: int, values: dict[str, base.Histogram]) -> None:
        """Log histograms."""
        bars = {k: wandb.Histogram(np_histogram=(v.counts, v.edges)) for k, v in values.items()}
        self._run.log(bars, step=step)

    def text(self, step: int, text: str) -> None:
        """Log a sample, as a table with one cell."""
        self._run.log({"sample": wandb.Table(["step", "text"], [[step, text]])}, step=step)

    def close(self) -> None:
        """Flush all data and end the run."""
        self._run.finish()
