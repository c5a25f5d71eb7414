"""Traces of training steps by torch's profiler, for https://ui.perfetto.dev."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from arbcli.base.atomic_files import replace_file
from arbcli.kernels.runtime.device import EAGER_STEPS
from arbcli.training.trainer import Trainer

WARMUP_STEPS = 1
"""Traced steps that are discarded, as the profiler's first step is slow."""


class StepTrace:
    """Context manager that traces the first steady-state steps of a trainer.

    Steps that compile or capture a CUDA graph are skipped, and so is one more.

    Args:
        run: directory of the trace.
        trainer: the trainer.
        steps: number of steps to trace.
        note: called with a message that has the path of the trace, or the reason for its absence.
    """

    def __init__(
        self, run: Path, trainer: Trainer, steps: int, note: Callable[[str], None]
    ) -> None:
        self.note = note
        # the first replay of a graph is skipped too, as it still loads code
        skipped = EAGER_STEPS + 1 if trainer.captures else 1
        first = trainer.step + skipped + WARMUP_STEPS + 1
        self.slow_steps = (first - WARMUP_STEPS - 1, first - 1, first + steps - 1)
        """Steps after which the profiler warms up, starts and writes, which takes time."""
        self.path = run / f"trace-{first:06d}.json.gz"
        self._steps_to_skip = skipped + WARMUP_STEPS
        uses_gpu = trainer.device.type == "cuda"
        self._device_type = DeviceType.CUDA if uses_gpu else DeviceType.CPU
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if uses_gpu else [])],
            schedule=schedule(wait=skipped, warmup=WARMUP_STEPS, active=steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._is_written = False

    def __enter__(self) -> "StepTrace":
        self._profiler.start()
        return self

    def step_done(self) -> None:
        """Count a step; the last traced one writes the trace."""
        if not self._is_written:
            self._steps_to_skip -= 1
            self._profiler.step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write a partial trace, if the run ends within it."""
        if not self._is_written:
            self._profiler.stop()
        if not self._is_written:
            self.note("no step was traced: the run ended during the warm-up of `--profile`")

    def _write(self, profiler: profile) -> None:
        if self._steps_to_skip >= 0:  # no step was traced
            return
        self._is_written = True
        try:
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder, self.path.name)
                profiler.export_chrome_trace(str(trace))  # takes no open file
                with trace.open("rb") as source:
                    replace_file(self.path, lambda file: shutil.copyfileobj(source, file))
        except OSError as error:
            self.note(f"cannot write `{self.path}`: {error.strerror or error}; the run continues")
        else:
            self.note(f"the trace is `{self.path}`: open it at https://ui.perfetto.dev")
            kinds = {event.device_type for event in profiler.events()}
            if self._device_type not in kinds:  # drivers may restrict profiling to administrators
                self.note("the trace has no GPU events: the driver does not permit profiling")
