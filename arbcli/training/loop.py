"""The training loop: steps, and evaluations, records, samples and checkpoints when they are due."""

import math
import signal as signals
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from arbcli.base.errors import ArbError, quoted
from arbcli.base.run_files import best_checkpoints
from arbcli.base.signals import RecordedSignal
from arbcli.kernels.runtime.compiling import counted_compiling
from arbcli.training.observer import Observer
from arbcli.training.record import FirstStep, RunRecords, TrainReport, held_out_losses
from arbcli.training.recorder import Recorder, Resumed
from arbcli.training.sample import sample_text
from arbcli.training.saving import Saver
from arbcli.training.schedule import Patience, is_evaluated, is_recorded
from arbcli.training.trainer import Trainer

MAX_NONFINITE_STEPS = 3


class _Diverged(ArbError):
    """Training has diverged, so that the state must not be saved."""


class Loop:
    """The training loop, from the trainer's step to the end or to a signal.

    Args:
        trainer: the trainer.
        run: directory of the run; None saves nothing.
        facts: contents of `config.json`.
        observer: callbacks.
        profile: number of steps to trace; None for no trace.
        resumed: state of a resumed run; None for a new one.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: Path | None,
        facts: dict[str, Any],
        observer: Observer,
        profile: int | None,
        resumed: Resumed | None,
    ) -> None:
        self.trainer, self.run_path, self.facts, self.observer = trainer, run, facts, observer
        self.config, self.group = trainer.config, trainer.group
        self.stopped_by: signals.Signals | None = None
        """The signal that ended the run, which any process may have received."""
        self._save_is_due = False
        """Whether the last checkpoint is too old; all processes agree."""
        records = resumed.records if resumed else RunRecords(run if self.group.first else None)
        self._records = records
        self.recorder = Recorder(trainer, records, resumed)
        # only the first process writes and reads records
        losses = self.group.broadcast_object(held_out_losses(records.read())) if resumed else ()
        self.patience = Patience(self.config.patience, losses)
        self.saver = Saver(
            trainer, run, facts, observer, records, self.patience, resumed=resumed is not None
        )
        self.first_step: FirstStep | None = None
        """First step of this process; None before it."""
        traced = profile if self.group.first else None
        self.trace: Any = None
        """The `StepTrace`, if steps are traced."""
        if run and traced:
            from arbcli.training.profiling import StepTrace

            self.trace = StepTrace(run, trainer, traced, observer.noted)

    def run(self) -> TrainReport:
        """Train to the end or to a signal, then evaluate, record, save and sample."""
        trainer, config = self.trainer, self.config
        self.observer.started(self.run_path, trainer, self.facts)
        val_loss, sample = None, ""
        with RecordedSignal(self._confirm_stop) as signal, self._saved_after_an_error():
            if self.saver.saved_step is None:
                self._save()
            elif self.recorder.recorded_step < trainer.step < config.steps:
                self._report_step()  # the run was killed between saving and recording this step
            self._keep_best()  # or between recording and keeping the best
            with self.trace or nullcontext():
                while not self._is_over(signal):
                    if self.first_step is None:
                        self._train_first_step()
                    else:
                        self._train_step()
                    if trainer.step < config.steps:
                        self._finish_step(trainer.step)
            # the final save is last: a run that is killed before it repeats the same record
            if not self._is_stopped(signal):
                if trainer.step < config.steps:  # the last evaluation is recorded
                    val_loss = self.patience.last
                    self._records.release({})  # no further step measures its traffic
                    self._note_early_stop()
                else:
                    val_loss = self._evaluate()
                    self._record(val_loss)
            elif trainer.step < config.steps:
                self._save()
                if self.recorder.recorded_step < trainer.step:
                    self._record(None)
            self._save()
            self._keep_best()
            if not self._is_stopped(signal):
                sample = self._sample() if self.group.first else ""
            self.group.agree(0)  # barrier before any process leaves
        report = TrainReport(
            run=None if self.run_path is None else str(self.run_path),
            checkpoint=None if self.saver.newest is None else str(self.saver.newest),
            steps=trainer.step,
            val_loss=val_loss,
            bits_per_byte=None if val_loss is None else val_loss / math.log(2),
            entropy=self.facts["text"]["entropy"],
            seconds=time.perf_counter() - self.recorder.started,
            sample=sample,
            stopped_by=self.stopped_by.name if self.stopped_by else None,
            first_step=self.first_step,
        )
        self.observer.ended(report)
        return report

    def _is_over(self, signal: RecordedSignal) -> bool:
        """Return whether all steps are done, or the run stops before."""
        if self.trainer.step == self.config.steps or self.patience.is_exhausted:
            return True
        return self._is_stopped(signal)

    def _note_early_stop(self) -> None:
        """Say why the run ends before its last step."""
        run, patience = self.saver.run, self.patience
        kept = [] if run is None else best_checkpoints(run)  # none from before `--patience`
        kept_as = f", kept as {quoted(kept)}" if kept else ""
        self.observer.noted(
            f"stopped after step {self.trainer.step:,}: the held-out loss has not fallen in"
            f" {patience.waited:,} evaluations; the lowest was {patience.best:.4f} nats a byte at"
            f" step {patience.best_step or 0:,}{kept_as}"
        )

    def _is_stopped(self, signal: RecordedSignal) -> bool:
        """Return whether any process was signalled to stop; also agree whether to save."""
        due = self.group.first and self.saver.is_due
        received, any_due = self.group.agree(signal.received or 0, due)
        self._save_is_due = bool(any_due)
        if received:
            self.stopped_by = signals.Signals(received)
        return bool(received)

    def _confirm_stop(self, received: signals.Signals) -> None:
        """Confirm a signal during a step, unless the launcher of several processes does."""
        if self.group.size == 1:
            with suppress(RuntimeError):  # it came during a write to the same stream
                self.observer.noted(
                    f"stopping by {received.name} after this step; a second signal stops at once"
                )

    @contextmanager
    def _saved_after_an_error(self) -> Iterator[None]:
        """Save a checkpoint if an error ends the run, unless training has diverged."""
        try:
            yield
        except _Diverged:
            raise
        except Exception:
            with suppress(Exception):  # report the original error
                single = self.group.size == 1  # other processes may be at another step, or lost
                if single and self.trainer.is_consistent and not self.saver.is_saved:
                    self._save()
                    step = self.trainer.step
                    self.observer.noted(f"step {step} is saved: continue with `--resume`")
            raise

    def _train_first_step(self) -> None:
        """Run the first step and report its time; unlike others, it synchronises with the GPU."""
        trainer, started = self.trainer, time.perf_counter()
        with counted_compiling() as compiling:
            loss = float(self._train_step())
        self.first_step = FirstStep(
            step=trainer.step,
            loss=loss / trainer.texts.train.symbol_bytes,
            seconds=time.perf_counter() - started,
            kernels_compiled=compiling.compiled,
            kernels_loaded=compiling.loaded,
            compile_seconds=None if trainer.is_compiled else compiling.seconds,
        )
        self.observer.first_step(self.first_step)

    def _train_step(self) -> Tensor:
        """Run a step; return its loss in nats per symbol."""
        loss = self.trainer.train_step()
        self.recorder.step_done(loss)
        self.observer.stepped(self.trainer.step)
        if self.trace:
            is_slow = self.trainer.step in self.trace.slow_steps
            with self.recorder.not_timed() if is_slow else nullcontext():
                self.trace.step_done()
        return loss

    def _finish_step(self, step: int) -> None:
        """Save, evaluate, record and sample, as far as due after a step that is not the last."""
        due = self._save_is_due if self.group.size > 1 else self.saver.is_due
        if due or step % self.config.save_every == 0:
            self._save()
        self._report_step()

    def _report_step(self) -> None:
        """Evaluate, sample, record and keep the best checkpoint, as far as due."""
        step, every = self.trainer.step, self.config.sample_every
        if not is_recorded(self.config, step):
            return
        shown = self.group.first and every is not None and step % every == 0
        self._record(self._evaluate(), self._try_sample() if shown else None)
        self._keep_best()

    def _try_sample(self) -> str | None:
        """Generate a sample, if it is text; running out of memory does not end the run."""
        try:
            return self._sample() or None
        except ArbError as error:
            self.observer.noted(f"no sample of step {self.trainer.step}: {error}")
            return None

    def _sample(self) -> str:
        with self.recorder.not_timed():
            return sample_text(self.trainer)

    def _evaluate(self) -> float | None:
        """Return the held-out loss in nats per byte; None if no evaluation is due."""
        if not is_evaluated(self.config, self.trainer.step):
            return None
        with self.recorder.not_timed():
            loss = self.trainer.evaluate() / self.trainer.texts.val.symbol_bytes
        self.patience.add(self.trainer.step, loss)
        return loss

    def _save(self) -> None:
        """Save a checkpoint, unless there is one of this step.

        Raises:
            ArbError: the weights of a float baseline are not finite, so that training has diverged.
        """
        if not self.saver.is_saved:
            if self.trainer.optimizer and not self.trainer.optimizer.is_finite:
                raise self._divergence("weights are not finite")
            with self.recorder.not_timed():
                self.saver.save(self.recorder.recent_as_json())

    def _keep_best(self) -> None:
        """Keep the checkpoint of this step as the best, if its held-out loss is the lowest."""
        if self.saver.is_best:
            self._save()
            self.saver.keep_best()

    def _record(self, val_loss: float | None, sample: str | None = None) -> None:
        """Record the steps since the last record.

        Raises:
            ArbError: training has diverged.
        """
        record = self.recorder.record(val_loss, sample)
        self.observer.recorded(record)
        if record.nonfinite_steps >= MAX_NONFINITE_STEPS:
            raise self._divergence(
                f"{record.nonfinite_steps} steps had gradients that are not finite; the last was"
                f" before step {record.step}"
            )
        if not math.isfinite(record.loss) and self.trainer.updater is None:
            raise self._divergence(f"the loss is {record.loss}")

    def _divergence(self, why: str) -> _Diverged:
        run = self.saver.run
        intact = "" if run is None else f"the checkpoints in `{run}` are intact; "
        return _Diverged(why, hint=f"{intact}try a smaller `--lr`")
