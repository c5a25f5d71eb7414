"""Logger for TensorBoard, with event files in `RUN/tensorboard`."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from arbcli.base.atomic_files import make_folder
from arbcli.loggers import base


class Logger(base.Logger):
    """Writes event files."""

    name = "tensorboard"

    def open(self, run: Path, step: int, facts: dict[str, Any]) -> None:
        """Create the writer; events of later steps from an earlier process are purged."""
        make_folder(run / "tensorboard")
        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
        settings = "".join(f"    {k}: {v}\n" for k, v in base.flat_settings(facts).items())
        self._writer.add_text("settings", settings, step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def histograms(self, step: int, values: dict[str, base.Histogram]) -> None:
        """Write histograms with their own bins."""
        for name, histogram in values.items():
            centres = [(left + right) / 2 for left, right in pairwise(histogram.edges)]
            bins = list(zip(centres, histogram.counts, strict=True))
            self._writer.add_histogram_raw(
                name,
                min=histogram.edges[0],
                max=histogram.edges[-1],
                num=sum(histogram.counts),
                sum=sum(centre * count for centre, count in bins),
                sum_squares=sum(centre**2 * count for centre, count in bins),
                bucket_limits=histogram.edges[1:],
                bucket_counts=histogram.counts,
                global_step=step,
            )

    def text(self, step: int, text: str) -> None:
        """Write a sample, indented, so that it is not rendered as Markdown."""
        lines = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer.add_text("sample", lines, step)

    def close(self) -> None:
        """Flush all data and close the files."""
        self._writer.close()
