"""The recorder of a run: means, times and memory of the steps since the last record."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from arbcli.kernels.runtime.device import peak_bytes, peak_operations
from arbcli.model.operations import step_operations
from arbcli.training.recent import KEPT_STEPS, RecentSteps, as_numbers
from arbcli.training.record import Record, RunRecords, finite
from arbcli.training.schedule import learning_rate
from arbcli.training.trainer import Trainer


class Resumed(NamedTuple):
    """State of a resumed run, in addition to that of the trainer."""

    recent: Mapping[str, Any]
    """Losses of the last steps in the checkpoint, see `recent.SCHEMA`; may be empty."""
    seconds: float
    """Training time so far."""
    records: RunRecords
    """Records up to the checkpoint; without a file except in the first process."""


class Recorder:
    """Averages and times steps, and writes records of them.

    Args:
        trainer: the trainer.
        records: records of the run.
        resumed: state of a resumed run; None for a new one.
    """

    def __init__(self, trainer: Trainer, records: RunRecords, resumed: Resumed | None) -> None:
        self._trainer, self._records = trainer, records
        self._resumed = resumed or Resumed({}, 0.0, records)
        self._resumed_step = trainer.step if resumed else None
        kept_steps = max(KEPT_STEPS, trainer.config.log_every or 0)
        self._recent = RecentSteps(trainer.group, self._resumed.recent, kept_steps)
        self.recorded_step = self._find_recorded() if resumed else 0
        """Step of the last record; the next one averages the steps since then."""
        self._bytes_seen, self._seen_step = 0, 0
        """Bytes of text in the steps before `_seen_step`."""
        self._timed_steps = 0
        """Number of steps since the last record that this process has done."""
        self._last_loss: Tensor | None = None
        self._peak_operations = peak_operations(trainer.device)
        self._state_bytes = 0
        """Size of the trainer's state; 0 before the first record."""
        self.started = self._last_record = time.perf_counter()
        self._paused = 0.0

    def _find_recorded(self) -> int:
        """Return the step of the last record; 0 if there is none."""
        recorded = max((record["step"] for record in self._records.read()), default=0)
        return self._trainer.group.broadcast_object(recorded)

    def step_done(self, loss: Tensor) -> None:
        """Count a step by its loss, a float32 scalar that a GPU may still be computing."""
        updater, self._last_loss = self._trainer.updater, loss
        self._recent.add(loss, updater.flips if updater else None)
        self._timed_steps += 1
        self._records.release(self._trainer.wire_gauges())

    @contextmanager
    def not_timed(self) -> Iterator[None]:
        """Exclude the block from the time of the steps."""
        if self._last_loss is not None:
            float(self._last_loss)  # wait until the GPU has finished the timed steps
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started

    def recent_as_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint: see `arbcli.training.recent`; collective."""
        parts, gauges = self._parts_and_gauges()
        recent = self._recent.as_json(self._trainer.step - self.recorded_step)
        return recent | {"parts": finite(parts), "gauges": finite(gauges)}

    def _parts_and_gauges(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the auxiliary losses of the last step, and the gauges of the model after it."""
        trainer, saved = self._trainer, self._resumed.recent
        if trainer.step == self._resumed_step:  # only the checkpoint has the values of its step
            parts, gauges = (saved.get(name, {}) for name in ("parts", "gauges"))
            return as_numbers(parts), as_numbers(gauges)
        parts = {k: float(v) for k, v in trainer.loss_parts.items() if k != "text"}
        return parts, trainer.model.gauges()

    def record(self, val_loss: float | None, sample: str | None = None) -> Record:
        """Record the steps since the last record; collective, and synchronises with the GPU.

        Args:
            val_loss: held-out loss in nats per byte, if it was evaluated.
            sample: generated text, if a sample was due.
        """
        trainer, config, texts = self._trainer, self._trainer.config, self._trainer.texts
        train_bytes, val_bytes = texts.train.symbol_bytes, texts.val.symbol_bytes
        # before steps are read, as a GPU is idle from then to the next step
        self._state_bytes = self._state_bytes or trainer.state_bytes()
        # maximum over processes
        state, peak = trainer.group.agree(self._state_bytes, peak_bytes(trainer.device))
        parts, gauges = self._parts_and_gauges()
        steps = self._recent.last(trainer.step - self.recorded_step)
        now, loss = time.perf_counter(), math.nan  # NaN if the checkpoint has no recent losses
        flip_share, nonfinite = None, 0
        if steps:
            loss = sum(step.loss for step in steps) / len(steps) / train_bytes
        if steps and trainer.updater:
            flips = sum(step.flips or 0 for step in steps)
            flip_share = flips / len(steps) / trainer.updater.num_weights
        if trainer.updater:
            nonfinite = trainer.updater.nonfinite_steps
        self._bytes_seen += trainer.bytes_of_steps(range(self._seen_step, trainer.step))
        self._seen_step = trainer.step
        mfu, seconds, bytes_per_second = None, None, None
        if self._timed_steps:
            seconds = max(now - self._last_record - self._paused, 1e-9) / self._timed_steps
            timed = trainer.bytes_of_steps(range(trainer.step - self._timed_steps, trainer.step))
            bytes_per_second = timed / self._timed_steps / seconds
        if self._peak_operations and seconds:
            needed = config.batch * config.accum * step_operations(config.model)
            mfu = needed / seconds / (self._peak_operations * trainer.group.size)
        has_tokens = texts.tokenizer is not None
        record = Record(
            step=trainer.step,
            loss=loss,
            bits_per_byte=loss / math.log(2),
            val_loss=val_loss,
            token_loss=loss * train_bytes if has_tokens else None,
            token_val_loss=val_loss * val_bytes if has_tokens and val_loss is not None else None,
            lr=learning_rate(config, trainer.step - 1),
            bytes_seen=self._bytes_seen,
            seconds=self._resumed.seconds + now - self.started,
            bytes_per_second=bytes_per_second,
            mfu=mfu,
            flip_share=flip_share,
            state_bytes=state,
            peak_bytes=peak,
            seconds_left=seconds * (config.steps - trainer.step) if seconds else None,
            nonfinite_steps=nonfinite,
            parts=parts,
            gauges=gauges | trainer.wire_gauges(),
            sample=sample,
        )
        self.recorded_step, self._timed_steps = trainer.step, 0
        self._last_record, self._paused = now, 0.0
        # only a step measures its traffic, which is the same in each; no checkpoint can hold it, as
        # the bytes of a checkpoint are the same for any number of processes
        is_pending = trainer.has_traffic and not trainer.wire_gauges()
        self._records.append(record, hold=is_pending and trainer.step < config.steps)
        return record
