"""A trace of a few steps of a run, by torch's profiler, for https://ui.perfetto.dev."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from arbcli.train.trainer import EAGER_STEPS, Trainer

DISCARDED = 1
"""Steps that are traced and thrown away, as the first one of a profiler is slow."""


class StepTrace:
    """Traces the first steps of a trainer that are like all later ones; used as a context.

    Steps that compile, or that record a CUDA graph, are left out, and so is one more.

    Args:
        run: directory that the trace is written to.
        trainer: whose steps they are.
        steps: how many to trace.
        tell: is told where the trace is, or why there is none.
    """

    def __init__(
        self, run: Path, trainer: Trainer, steps: int, tell: Callable[[str], None]
    ) -> None:
        self.tell = tell
        # the first step of a graph is its first replay, whatever that still loads
        passed = EAGER_STEPS + 1 if trainer.captures else 1
        first = trainer.step + passed + DISCARDED + 1
        self.turns = (first - DISCARDED - 1, first - 1, first + steps - 1)
        """Steps after which the profiler gets ready, begins, and writes: it takes its time."""
        self.path = run / f"trace-{first:06d}.json.gz"
        self._left_out = passed + DISCARDED
        on_gpu = trainer.device.type == "cuda"
        self._wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=schedule(wait=passed, warmup=DISCARDED, active=steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._done = False

    def __enter__(self) -> "StepTrace":
        self._profiler.start()
        return self

    def step_done(self) -> None:
        """Count a step; after the last one that is traced the trace is written."""
        if not self._done:
            self._left_out -= 1
            self._profiler.step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write what there is of a trace, if the run ends within it."""
        if not self._done:
            self._profiler.stop()
        if not self._done:
            self.tell("no step was traced: the run ended before those that `--profile` waits for")

    def _write(self, profiler: profile) -> None:
        if self._left_out >= 0:  # none was traced
            return
        self._done = True
        unfinished = self.path.with_name(f".{self.path.name}.tmp.gz")
        try:
            profiler.export_chrome_trace(str(unfinished))
            unfinished.replace(self.path)
        except OSError as error:
            self.tell(f"cannot write `{self.path}`: {error.strerror or error}; the run goes on")
            unfinished.unlink(missing_ok=True)
        else:
            self.tell(f"the trace is `{self.path}`: open it at https://ui.perfetto.dev")
            kinds = {event.device_type for event in profiler.events()}
            if self._wanted not in kinds:  # a driver may keep its counters to an administrator
                self.tell("the trace has nothing of the GPU: its driver did not let it be traced")
