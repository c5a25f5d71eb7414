"""Logger for MLflow, at `MLFLOW_TRACKING_URI` or MLflow's default location."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlflow

from arbcli.loggers import base


class Logger(base.Logger):
    """Logs to `mlflow`, as a new MLflow run whenever training starts or resumes."""

    name = "mlflow"

    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Create a run: see `base.Logger.open`."""
        experiment = mlflow.set_experiment(base.PROJECT).experiment_id
        self._client = mlflow.MlflowClient()
        self._id = self._client.create_run(experiment, run_name=run.resolve().name).info.run_id
        settings = base.flat_settings(facts).items()
        params = [mlflow.entities.Param(name, str(value)) for name, value in settings]
        self._client.log_batch(self._id, params=params)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log metrics in one request."""
        now = int(1000 * time.time())
        metrics = [mlflow.entities.Metric(name, x, now, step) for name, x in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def histograms(self, step: int, values: dict[str, base.Histogram]) -> None:
        """Log histograms as a JSON file, as MLflow has no histograms."""
        bars = {name: asdict(histogram) for name, histogram in values.items()}
        self._client.log_dict(self._id, bars, f"histograms/step-{step:06d}.json")

    def text(self, step: int, text: str) -> None:
        """Log a sample as a text file."""
        self._client.log_text(self._id, text, f"samples/step-{step:06d}.txt")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)
