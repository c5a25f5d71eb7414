"""Logger for Trackio, which stores data locally by default; `trackio show` displays it."""

from pathlib import Path
from typing import Any

import trackio

from arbcli.loggers import base


class Logger(base.Logger):
    """Logs to `trackio`."""

    name = "trackio"

    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Create a run, or continue the same run after a resume."""
        settings = base.flat_settings(facts)
        name = run.resolve().name
        trackio.init(project=base.PROJECT, name=name, config=settings, resume="allow", embed=False)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Log scalars."""
        trackio.log(values, step=step)

    def histograms(self, step: int, values: dict[str, base.Histogram]) -> None:
        """Log histograms."""
        bars = {k: trackio.Histogram(np_histogram=(v.counts, v.edges)) for k, v in values.items()}
        trackio.log(bars, step=step)

    def text(self, step: int, text: str) -> None:
        """Log a sample, indented, so that it is not rendered as Markdown."""
        lines = "".join(f"    {line}\n" for line in text.splitlines())
        trackio.log({"sample": trackio.Markdown(lines)}, step=step)

    def close(self) -> None:
        """Flush all data and end the run."""
        trackio.finish()
