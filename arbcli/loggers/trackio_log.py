"""Trackio: on this machine unless it is set up otherwise; `trackio show` draws."""

from pathlib import Path
from typing import Any

import trackio

from arbcli.loggers import base


class Logger(base.Logger):
    """Hands on to `trackio`."""

    name = "trackio"

    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Begin; a run that goes on is the same one there."""
        settings = base.flat_settings(facts)
        name = run.resolve().name
        trackio.init(project=base.PROJECT, name=name, config=settings, resume="allow", embed=False)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Hand on numbers."""
        trackio.log(values, step=step)

    def histograms(self, step: int, values: dict[str, base.Histogram]) -> None:
        """Hand on histograms."""
        bars = {k: trackio.Histogram(np_histogram=(v.counts, v.edges)) for k, v in values.items()}
        trackio.log(bars, step=step)

    def text(self, step: int, text: str) -> None:
        """Hand on a sample, indented: it is not Markdown."""
        lines = "".join(f"    {line}\n" for line in text.splitlines())
        trackio.log({"sample": trackio.Markdown(lines)}, step=step)

    def close(self) -> None:
        """Send what is left."""
        trackio.finish()
