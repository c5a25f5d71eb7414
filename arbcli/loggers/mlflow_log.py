"""MLflow: wherever `MLFLOW_TRACKING_URI` says, or where MLflow itself chooses."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlflow

from arbcli.loggers import base


class Logger(base.Logger):
    """Hands on to `mlflow`, as a run of its own each time that training begins or goes on."""

    name = "mlflow"

    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Begin."""
        experiment = mlflow.set_experiment(base.PROJECT).experiment_id
        self._client = mlflow.MlflowClient()
        name = run.resolve().name
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        for setting, value in base.flat_settings(facts).items():
            self._client.log_param(self._id, setting, value)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Hand on numbers."""
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def histograms(self, step: int, values: dict[str, base.Histogram]) -> None:
        """Hand on histograms as a file; there is nothing else for them."""
        bars = {name: asdict(found) for name, found in values.items()}
        self._client.log_dict(self._id, bars, f"histograms/step-{step:06d}.json")

    def text(self, step: int, text: str) -> None:
        """Hand on a sample as a file."""
        self._client.log_text(self._id, text, f"samples/step-{step:06d}.txt")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)
