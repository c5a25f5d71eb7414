"""Runs: start or resume training, with checkpoints, evaluations, records and samples."""

import dataclasses
import math
import os
import signal as signals
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.chat_template import keep_template
from arbcli.chats import has_documents
from arbcli.checkpoint import (
    Accept,
    Checkpoint,
    keep_best,
    latest_checkpoint,
    load_checkpoint,
    run_lock,
    save_checkpoint,
    set_aside,
    write_file,
    write_json,
)
from arbcli.config.initial import check_initial
from arbcli.config.training import (
    FADE_LEARNT_TO,
    TrainConfig,
    train_config_dict,
    train_config_from,
)
from arbcli.data import Texts
from arbcli.device import (
    check_compute,
    cpu_threads,
    deterministic,
    emulates_nvfp4,
    explained_out_of_memory,
    peak_bytes,
    peak_operations,
    resolve_backend,
    resolve_device,
)
from arbcli.errors import ArbError
from arbcli.imports.companions import copy_companions
from arbcli.infer.generation import Sampling, generate
from arbcli.infer.holes import filled
from arbcli.infer.load import SavedModel, check_saved, check_trainable, saved_config
from arbcli.infer.tokens import DIGEST, check_digest, symbols_of
from arbcli.kernels.runtime.compiling import counted_compiling
from arbcli.model.operations import step_operations
from arbcli.run_files import (
    COMPANIONS,
    CONFIG,
    best_checkpoints,
    check_free,
    checkpoint_path,
    checkpoints,
    directory_of,
    step_of,
)
from arbcli.signals import RememberedSignal
from arbcli.tokens import FILE
from arbcli.train.directory import (
    THREADS_OF_A_CPU,
    check_same_run,
    check_same_text,
    field_digests,
    make_directory,
    make_next_directory,
    open_run_texts,
    open_texts_again,
    read_facts,
    run_config,
    run_facts,
)
from arbcli.train.parallel.group import Group, joined, own_device
from arbcli.train.profiling import StepTrace
from arbcli.train.recent import FIELD, KEPT_STEPS, RecentSteps, as_numbers, check_recent
from arbcli.train.record import (
    FirstStep,
    Record,
    TrainReport,
    append_record,
    best_step,
    finite,
    keep_records,
    read_records,
    seconds_until,
)
from arbcli.train.schedule import learning_rate
from arbcli.train.teacher import read_teacher
from arbcli.train.text_warnings import text_warnings
from arbcli.train.trainer import (
    EAGER_STEPS,
    EVAL_BATCHES,
    Trainer,
    check_shares,
    text_digest,
)

EMULATED = "NVFP4 products are emulated on this device: same results, at most the speed of bf16"
MOST_MINUTES = 60 * 24 * 366
LOG_EVERY = KEPT_STEPS
"""Default interval of records in steps; reading a loss synchronises with the GPU."""
SAVE_SECONDS = 300
"""Maximum age of the last checkpoint, whatever `save_every` is."""
MAX_NONFINITE_STEPS = 3
TIMED_STEPS = 20
"""Maximum number of steps that are timed, and discarded, to convert minutes to steps."""
TIMED_SHARE = 0.1
"""Maximum share of the minutes for the timed steps."""
TIMED_BATCHES = 4
"""Number of batches of an evaluation that are timed."""
SAMPLE_BYTES = 256
SAMPLE_STEPS = 32
"""Forward passes for a sample of a masked model."""
PROMPT = b"\n"
PROMPT_BYTES = 16
"""Length of the prompt from the held-out text, if the tokenizer drops `PROMPT`."""


class Observer:
    """Callbacks of a run; the methods do nothing by default."""

    def started(self, run: Path | None, trainer: Trainer, facts: dict[str, Any]) -> None:
        """Called when a run starts or resumes, at `trainer.step`.

        Args:
            run: directory of the run; None if it is not saved.
            trainer: the trainer.
            facts: contents of `config.json`.
        """

    def first_step(self, first: FirstStep) -> None:
        """Called after the first step of this process."""

    def stepped(self, step: int) -> None:
        """Called after each step; a GPU may still be computing it."""

    def recorded(self, record: Record) -> None:
        """Called after a record was written."""

    def noted(self, message: str) -> None:
        """Called with messages for the user."""

    def ended(self, report: TrainReport) -> None:
        """Called at the end of the run or after a signal, but not after an error."""


class Observers(Observer):
    """Forwards all calls to several observers in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def started(self, run: Path | None, trainer: Trainer, facts: dict[str, Any]) -> None:
        """Forward the call."""
        for observer in self.observers:
            observer.started(run, trainer, facts)

    def stepped(self, step: int) -> None:
        """Forward the call."""
        for observer in self.observers:
            observer.stepped(step)

    def first_step(self, first: FirstStep) -> None:
        """Forward the call."""
        for observer in self.observers:
            observer.first_step(first)

    def recorded(self, record: Record) -> None:
        """Forward the call."""
        for observer in self.observers:
            observer.recorded(record)

    def noted(self, message: str) -> None:
        """Forward the call."""
        for observer in self.observers:
            observer.noted(message)

    def ended(self, report: TrainReport) -> None:
        """Forward the call."""
        for observer in self.observers:
            observer.ended(report)


def start_run(
    config: TrainConfig,
    run: Path | None,
    observer: Observer,
    *,
    minutes: float | None = None,
    initial: SavedModel | None = None,
    profile: int | None = None,
    check: Callable[[TrainConfig], None] = lambda _: None,
    save: bool = True,
) -> TrainReport:
    """Start a run in a new directory, or without files.

    Args:
        config: configuration of the run.
        run: directory to create, which must not contain a run; None is the next free one in `RUNS`.
        observer: callbacks.
        minutes: training time; the number of steps follows from timing a few.
        initial: initial weights with their training state, of the model of `config`: see
            `check_initial`. Weights with all digits fade from the first step, unless
            `config.fade_from` is set.
        profile: number of steps to trace with torch's profiler, to a file in the directory: see
            `StepTrace`.
        check: may raise to refuse the run, after the text is opened and before files are created.
        save: whether to write files; otherwise records only go to the observer.

    Raises:
        ArbError: a failure that the user can fix; earlier checkpoints stay intact.
        ValueError: `save` is False, and `run` or `profile` is given.
    """
    if not save and (run is not None or profile is not None):
        raise ValueError("a run that is not saved has no directory and no trace")
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        raise ArbError(f"`--minutes` is {minutes}", hint=f"use a number up to {MOST_MINUTES:,}")
    if initial is not None:
        check_trainable(initial.checkpoint)
        begun = saved_config(initial.checkpoint)
        check_initial(config.model, begun)
        if (begun.digits, config.model.digits, config.fade_from) == ("all", "fade", None):
            # the digits are already trained
            end = FADE_LEARNT_TO if config.fade_to is None else config.fade_to
            config = dataclasses.replace(config, fade_from=0.0, fade_to=end)
    if run is not None:
        check_free(run)
    config = dataclasses.replace(config, device=str(own_device(torch.device(config.device))))
    with joined(torch.device(config.device), "train") as group:
        observer = observer if group.first else Observer()
        check_shares(config, group.size)
        texts = open_run_texts(config)
        if initial is not None and texts.tokenizer:
            trained_with = initial.checkpoint.data.get(DIGEST)
            check_digest(texts.tokenizer, trained_with, Path(str(config.tokenizer)))
        initial_digest = initial and initial.checkpoint.digest
        teacher = read_teacher(config, observer.noted)
        if teacher is not None:  # the checkpoint's own path, as its run may write later ones
            config = dataclasses.replace(config, teacher=os.path.abspath(teacher.path))
        digests = {"teacher": teacher and teacher.checkpoint.digest, "init_from": initial_digest}
        _compare_settings(config, texts, group, minutes=minutes, save=save, **digests)
        check(config)
        for warning in text_warnings(texts):
            observer.noted(warning)
        if config.compute == "nvfp4" and emulates_nvfp4(torch.device(config.device)):
            observer.noted(EMULATED)
        if group.first and save:
            if run is None:
                run = make_next_directory(config)
            else:
                make_directory(run)
        run = group.broadcast_object(run)
        with _locked(run, group), deterministic():
            if group.first and save:
                check_free(run)  # the lock keeps other processes from starting a run here
            if minutes is not None:
                config = _fit_to_minutes(config, texts, minutes, group, teacher)
            facts = run_facts(run, config, texts)
            trainer = _build(config, texts, group, teacher)
            if teacher is not None:
                facts["teacher_digest"] = trainer.teacher_digest
                del teacher  # it may be large
            if initial is not None:
                trainer.take_weights(initial.checkpoint)
                facts["init_from"] = os.path.abspath(initial.path)
                facts["init_digest"] = initial.checkpoint.digest
                if group.first and save:
                    copy_companions(initial.path.parent / COMPANIONS, run / COMPANIONS)
                del initial  # it may be large
            if group.first and save:
                if texts.tokenizer:
                    write_file(run / FILE, lambda file: file.write(texts.tokenizer.content))
                if has_documents(config.field):
                    keep_template(str(config.tokenizer), run)
                write_json(run / CONFIG, facts)
            return _run(trainer, run, facts, observer, profile)


def resume_run(
    path: Path,
    observer: Observer,
    *,
    device: str | None = None,
    backend: str | None = None,
    steps: int | None = None,
    profile: int | None = None,
) -> TrainReport:
    """Resume a run from its newest intact checkpoint, or from a given checkpoint.

    Args:
        path: a run directory, or a checkpoint in one.
        observer: callbacks.
        device: device to compute on; None is that of the run. Results are only bitwise reproducible
            on the same kind of machine.
        backend: kernel backend; None is that of the run.
        steps: new total number of steps, which also changes the schedule.
        profile: number of steps to trace with torch's profiler: see `start_run`.

    Raises:
        ArbError: there is no usable checkpoint, or the text has changed.
    """
    run = directory_of(path)
    facts = read_facts(run)
    config = run_config(run, facts)
    place = own_device(resolve_device(device or config.device))
    backend = resolve_backend(backend or (None if device else config.backend), place)
    check_compute(config.compute, place)
    config = dataclasses.replace(config, device=str(place), backend=backend)
    if config.model.weights != "ternary":
        raise ArbError(
            "float baselines have no checkpoints to resume from",
            hint="start a new run with `--out`",
        )
    if config.compute == "nvfp4" and emulates_nvfp4(torch.device(config.device)):
        observer.noted(EMULATED)
    threads = facts.get("threads", now := torch.get_num_threads())
    if threads > THREADS_OF_A_CPU * (os.cpu_count() or 1):
        observer.noted(
            f"the run began with {threads:,} threads, too many for this machine: computing with"
            f" {now}, with different rounding"
        )
        threads = now
    elif threads != now and place.type == "cpu":
        observer.noted(
            f"computing with {threads} threads like before, as {now} would round differently"
        )
    with joined(place, "train --resume") as group:
        observer = observer if group.first else Observer()
        check_shares(config, group.size)
        with _locked(run, group), deterministic(), cpu_threads(threads):
            group.compare({"steps": steps or config.steps}, "setting")
            accept = accept_of(run, facts, config)
            checkpoint = None
            if path == run and not checkpoints(run) and can_begin_again(run, facts):
                observer.noted("the run has no checkpoint yet: starting again from step 0")
            else:
                checkpoint = (
                    latest_checkpoint(run, observer.noted, accept)
                    if path == run
                    else load_checkpoint(path, accept)
                )
            group.compare({"checkpoint": checkpoint and checkpoint.digest}, "file")
            done = 0 if checkpoint is None else checkpoint.step
            if done >= config.steps and steps in (None, config.steps):
                report = _finished_report(run, facts, config, observer, group)
                if report is not None:
                    return report
            texts = open_texts_again(facts, config)
            _compare_settings(config, texts, group, steps=steps or config.steps)
            new_run = "start a new run on the new text with `--out`"
            check_same_text(run, facts, text_digest(texts), new_run)
            teacher = teacher_again(facts, config)
            if steps not in (None, config.steps):
                config, facts = _extended(run, facts, config, done, steps, observer, group)
            trainer = _build(config, texts, group, teacher)
            del teacher  # it may be large
            if checkpoint is None:
                return _run(trainer, run, facts, observer, profile)
            trainer.restore(checkpoint)
            saved, seconds = checkpoint.data.get(FIELD) or {}, 0.0
            del checkpoint  # it may be large
            if group.first:
                seconds = seconds_until(run, done)
                keep_records(run, lambda record: stays(record, done, config, bool(saved)))
            return _run(trainer, run, facts, observer, profile, Resumed(saved, seconds))


def _finished_report(
    run: Path, facts: dict[str, Any], config: TrainConfig, observer: Observer, group: Group
) -> TrainReport | None:
    """Return the report of a finished run; None if its last record is incomplete."""
    found = None
    if group.first:
        last = [record for record in read_records(run) if record["step"] == config.steps]
        found = (last[-1].get("val_loss"),) if last else None
    found = group.broadcast_object(found)
    if found is None or (found[0] is None and is_evaluated(config, config.steps)):
        return None
    (val_loss,) = found
    saved = checkpoint_path(run, config.steps)
    if group.first and config.keep_best and best_step(run) == config.steps:
        keep_best(saved)  # in case the run was killed before it did so
    held_out = "" if val_loss is None else f", held-out loss {val_loss:.4f} nats a byte"
    observer.noted(
        f"the run is finished: all {config.steps:,} steps are done{held_out};"
        f" `--resume {run} --steps N` continues it to step N"
    )
    return TrainReport(
        run=str(run),
        checkpoint=str(saved),
        steps=config.steps,
        val_loss=val_loss,
        bits_per_byte=None if val_loss is None else val_loss / math.log(2),
        entropy=facts["text"]["entropy"],
        seconds=0.0,
        sample="",
        stopped_by=None,
        first_step=None,
    )


def _intervals(config: TrainConfig) -> list[int]:
    """Return the intervals in steps at which a run writes records."""
    others = filter(None, [config.eval_interval, config.sample_every])
    return [config.log_every or LOG_EVERY, *others]


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Return whether a run evaluates held-out text after a step."""
    interval = config.eval_interval
    return interval > 0 and (step == config.steps or (step > 0 and step % interval == 0))


def is_recorded(config: TrainConfig, step: int) -> bool:
    """Return whether an uninterrupted run writes a record after a step."""
    due = any(step % interval == 0 for interval in _intervals(config))
    return step == config.steps or (step > 0 and due)


def stays(record: dict[str, Any], step: int, config: TrainConfig, has_recent: bool) -> bool:
    """Return whether a record is kept when the run resumes from the checkpoint of a step.

    Later records are written again, and so is that of the step if its evaluation is missing. An
    extra record of a stop is dropped, as its steps are included in the next one.

    Args:
        record: see `Record.as_json`.
        step: step of the checkpoint.
        config: configuration of the run.
        has_recent: whether the checkpoint has losses of the last steps.
    """
    if record["step"] != step or record.get("val_loss") is not None:
        return record["step"] <= step
    return not is_evaluated(config, step) and (is_recorded(config, step) or not has_recent)


def _compare_settings(config: TrainConfig, texts: Texts, group: Group, **others: Any) -> None:
    """Check that all processes have the same settings; a single process skips it.

    Args:
        config: configuration in this process.
        texts: texts of this process.
        group: the processes of the run.
        others: other values to compare, by name.
    """
    if group.size > 1:
        group.compare(shared_settings(config, texts) | others, "setting")


def shared_settings(config: TrainConfig, texts: Texts) -> dict[str, Any]:
    """Return the settings that must be the same in all processes of a run, by name."""
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"
    return field_digests(config) | {
        "text": text_digest(texts),
        "tokenizer": texts.tokenizer and texts.tokenizer.digest,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "backend": config.backend,
        "threads": None if on_gpu else torch.get_num_threads(),
        "save_every": config.save_every,
        "eval_every": config.eval_every,
        "log_every": config.log_every,
        "keep_best": config.keep_best,
        "wire": config.wire,
        "sample_every": config.sample_every,
    }


def _locked(run: Path | None, group: Group) -> AbstractContextManager:
    """Lock the directory of a run, if any, in the first process."""
    return run_lock(run) if group.first and run is not None else nullcontext()


def can_begin_again(run: Path, facts: dict[str, Any]) -> bool:
    """Return whether a run has no state yet, so that it can restart from step 0.

    The first checkpoint is saved before the first record. Runs with initial weights need these.
    """
    return "init_from" not in facts and not read_records(run)


def accept_of(run: Path, facts: dict[str, Any], config: TrainConfig) -> Accept:
    """Return a check that a run can resume from a checkpoint.

    Args:
        run: directory of the run.
        facts: contents of `config.json`.
        config: the configuration in `facts`.
    """

    def accept(checkpoint: Checkpoint) -> None:
        check_same_run(run, facts, config, checkpoint)
        check_recent(checkpoint)
        check_saved(checkpoint)

    return accept


def check_steps(run: Path, done: int, steps: int) -> None:
    """Check that a new total number of steps exceeds the steps that are done.

    Raises:
        ArbError: it does not.
    """
    if steps <= done:
        raise ArbError(
            f"the run has done {done:,} steps",
            hint=f"use a larger `--steps`, or only `--resume {run}`",
        )


def _extended(
    run: Path,
    facts: dict[str, Any],
    config: TrainConfig,
    done: int,
    steps: int,
    observer: Observer,
    group: Group,
) -> tuple[TrainConfig, dict[str, Any]]:
    """Change the total number of steps, with a note about the learning rate."""
    check_steps(run, done, steps)
    longer = dataclasses.replace(config, steps=steps)
    rates = [learning_rate(each, min(done, each.steps)) for each in (config, longer)]
    observer.noted(
        f"{steps:,} steps instead of {config.steps:,}: the `{config.schedule}` schedule changes at"
        f" step {done:,}, where the learning rate is {rates[1]:.4g} instead of {rates[0]:.4g}"
    )
    # a later resume must not load a checkpoint of the old schedule
    if group.first:
        _note_aside([set_aside(path) for path in _later(run, done)], observer)
    changes = [*facts.get("extended", []), {"at": done, "from": config.steps, "to": steps}]
    recorded = train_config_dict(dataclasses.replace(train_config_from(facts), steps=steps))
    facts |= {"config": recorded, "digests": field_digests(longer), "extended": changes}
    if group.first:
        write_json(run / CONFIG, facts)
    return longer, facts


def _times(texts: Texts) -> dict[Path, tuple[int, int]]:
    """Return size and modification time of each file of both texts."""
    return texts.train.times() | texts.val.times()


def teacher_again(facts: dict[str, Any], config: TrainConfig) -> SavedModel | None:
    """Read the teacher of a resumed run.

    Raises:
        ArbError: it is missing or has changed.
    """
    teacher = read_teacher(config)
    if teacher is not None and teacher.checkpoint.digest != facts.get("teacher_digest"):
        raise ArbError(
            f"`{teacher.path}` is not the teacher that the run began with",
            hint="restore it, or start a new run with `--out`",
        )
    return teacher


def _build(config: TrainConfig, texts: Texts, group: Group, teacher: SavedModel | None) -> Trainer:
    with explained_out_of_memory():
        return Trainer(
            config, texts, capture=True, group=group, teacher=teacher and teacher.checkpoint
        )


def _fit_to_minutes(
    config: TrainConfig,
    texts: Texts,
    minutes: float,
    group: Group,
    teacher: SavedModel | None,
) -> TrainConfig:
    """Convert minutes to steps by timing a few steps of a temporary trainer.

    The time for this and for evaluations is subtracted.
    """
    started, most = time.perf_counter(), minutes * 60
    trainer = _build(config, texts, group, teacher)
    for _ in range(EAGER_STEPS + 1 if trainer.captures else 1):
        loss = trainer.train_step()
    float(loss)  # synchronises with the GPU
    begun, done = time.perf_counter(), 0

    def is_enough() -> bool:
        return done > 0 and time.perf_counter() - started >= TIMED_SHARE * most

    while done < TIMED_STEPS and not any(group.agree(is_enough())):
        loss = trainer.train_step()
        done += 1
    float(loss)
    ended = time.perf_counter()
    if config.eval_interval:
        trainer.evaluate(TIMED_BATCHES)
    trainer.release_graph()
    now = time.perf_counter()
    step_seconds = (ended - begun) / done
    evaluation_seconds = (now - ended) * EVAL_BATCHES / TIMED_BATCHES
    left = most - (now - started)
    steps = max(1, int(left / step_seconds))
    for _ in range(3):  # the number of evaluations depends on the number of steps
        interval = dataclasses.replace(config, steps=steps).eval_interval
        evaluations = -(-steps // interval) if interval else 0
        steps = max(1, int((left - evaluations * evaluation_seconds) / step_seconds))
    return dataclasses.replace(config, steps=group.broadcast_object(steps))


class Resumed(NamedTuple):
    """State of a resumed training loop, in addition to that of the trainer."""

    recent: Mapping[str, Any]
    """Losses of the last steps in the checkpoint, see `recent.SCHEMA`; may be empty."""
    seconds: float
    """Training time so far."""


def _run(
    trainer: Trainer,
    run: Path | None,
    facts: dict[str, Any],
    observer: Observer,
    profile: int | None,
    resumed: Resumed | None = None,
) -> TrainReport:
    try:
        with explained_out_of_memory():
            return _Loop(trainer, run, facts, observer, profile, resumed).run()
    finally:
        trainer.release_graph()


def _later(run: Path | None, step: int) -> list[Path]:
    if run is None:
        return []
    saved = [*checkpoints(run), *best_checkpoints(run)]
    return [path for path in saved if step_of(path) > step]


def _note_aside(aside: Sequence[Path], observer: Observer) -> None:
    if aside:
        names = ", ".join(f"`{name}`" for name in aside)
        observer.noted(f"checkpoints of later steps are set aside: {names}")


class _Diverged(ArbError):
    """Training has diverged, so that the state must not be saved."""


class _Loop:
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
        self.config, self.group, self.texts = trainer.config, trainer.group, trainer.texts
        self.stopped_by: signals.Signals | None = None
        """The signal that ended the run, which any process may have received."""
        self._old = False
        self.saves = run is not None and trainer.updater is not None
        """Whether to write checkpoints; float baselines have none."""
        self.saved_step = trainer.step if resumed else None
        """Step of the newest checkpoint; None if there is none."""
        self.resumed, self.resumed_step = resumed or Resumed({}, 0.0), self.saved_step
        kept = max(KEPT_STEPS, self.config.log_every or 0)
        self.recent = RecentSteps(self.group, self.resumed.recent, kept)
        self.recorded_step = self._find_recorded() if resumed else 0
        """Step of the last record; the next one averages the steps since then."""
        self.timed_steps = 0
        """Number of steps since the last record that this process has done."""
        self.last_loss: Tensor | None = None
        self.first_step: FirstStep | None = None
        """First step of this process; None before it."""
        traced = profile if self.group.first else None
        self.trace = StepTrace(run, trainer, traced, observer.noted) if run and traced else None
        self.later_ones = _later(run, trainer.step)
        """Checkpoints of later steps, which are set aside at the first save."""
        self.times = _times(trainer.texts)
        """Sizes and modification times of the text's files at the last check."""
        self.peak_operations = peak_operations(trainer.device)
        self.started = self.last_record = self.last_save = time.perf_counter()
        self.paused = 0.0

    @property
    def folder(self) -> Path:
        """Directory of a run that is saved."""
        assert self.run_path is not None
        return self.run_path

    def _find_recorded(self) -> int:
        """Return the step of the last record, or of the last one that was due if it is missing."""
        step, found = self.trainer.step, 0
        if self.group.first:
            found = max((record["step"] for record in read_records(self.folder)), default=0)
        due = max((step - 1) // interval * interval for interval in _intervals(self.config))
        return self.group.broadcast_object(max(found, due))

    def run(self) -> TrainReport:
        """Train to the end or to a signal, then evaluate, record, save and sample."""
        trainer, config = self.trainer, self.config
        self.observer.started(self.run_path, trainer, self.facts)
        val_loss, sample = None, ""
        with RememberedSignal() as signal, self._saved_after_an_error():
            if self.saved_step is None:
                self._save()
            elif self.recorded_step < trainer.step < config.steps:
                self._report_step()  # the run was killed between saving and recording this step
            self._keep_best()  # or between recording and keeping the best
            with self.trace or nullcontext():
                while trainer.step < config.steps and not self._is_stopped(signal):
                    if self.first_step is None:
                        self._train_first_step()
                    else:
                        self._train_step()
                    if trainer.step < config.steps:
                        self._after_step(trainer.step)
            # the final save is last: a run that is killed before it repeats the same record
            if not self._is_stopped(signal):
                val_loss = self._evaluate() if is_evaluated(config, trainer.step) else None
                self._record(val_loss)
            elif trainer.step < config.steps:
                self._save_if_new()
                if self.recorded_step < trainer.step:
                    self._record(None)
            self._save_if_new()
            self._keep_best()
            if not self._is_stopped(signal):
                sample = self._sample() if self.group.first else ""
            self.group.agree(0)  # barrier before any process leaves
        saved = self.saved_step is not None and checkpoint_path(self.folder, self.saved_step)
        report = TrainReport(
            run=None if self.run_path is None else str(self.run_path),
            checkpoint=str(saved) if saved else None,
            steps=trainer.step,
            val_loss=val_loss,
            bits_per_byte=None if val_loss is None else val_loss / math.log(2),
            entropy=self.facts["text"]["entropy"],
            seconds=time.perf_counter() - self.started,
            sample=sample,
            stopped_by=self.stopped_by.name if self.stopped_by else None,
            first_step=self.first_step,
        )
        self.observer.ended(report)
        return report

    def _is_stopped(self, signal: RememberedSignal) -> bool:
        """Return whether any process was signalled to stop; also agree whether to save."""
        old = self.group.first and time.perf_counter() - self.last_save >= SAVE_SECONDS
        received, any_old = self.group.agree(signal.received or 0, old)
        self._old = bool(any_old)
        if received:
            self.stopped_by = signals.Signals(received)
        return bool(received)

    @contextmanager
    def _saved_after_an_error(self) -> Iterator[None]:
        """Save a checkpoint if an error ends the run, unless training has diverged."""
        try:
            yield
        except _Diverged:
            raise
        except Exception:
            with suppress(Exception):  # report the original error
                alone = self.group.size == 1  # other processes may be at another step, or lost
                new = self.saves and self.saved_step != self.trainer.step
                if alone and self.trainer.between_steps and new:
                    self._save()
                    step = self.trainer.step
                    self.observer.noted(f"step {step} is saved: continue with `--resume`")
            raise

    def _train_first_step(self) -> None:
        """Run the first step and report its time; unlike others, it synchronises with the GPU."""
        trainer, started = self.trainer, time.perf_counter()
        with counted_compiling() as compiling:
            self._train_step()
            assert self.last_loss is not None
            loss = float(self.last_loss)
        self.first_step = FirstStep(
            step=trainer.step,
            loss=loss / self.texts.train.symbol_bytes,
            seconds=time.perf_counter() - started,
            kernels_compiled=compiling.compiled,
            kernels_loaded=compiling.loaded,
            compile_seconds=None if trainer.is_compiled else compiling.seconds,
        )
        self.observer.first_step(self.first_step)

    def _train_step(self) -> None:
        trainer = self.trainer
        self.last_loss = trainer.train_step()
        self.recent.add(self.last_loss, trainer.updater.flips if trainer.updater else None)
        self.timed_steps += 1
        self.observer.stepped(trainer.step)
        self._count_traced()

    def _after_step(self, step: int) -> None:
        """Save, evaluate, record and sample, as far as due after a step that is not the last."""
        old = time.perf_counter() - self.last_save >= SAVE_SECONDS
        if self.group.size > 1:
            old = self._old  # agreed by all processes
        if old or step % self.config.save_every == 0:
            self._save()
        self._report_step()

    def _report_step(self) -> None:
        """Evaluate, sample, record and keep the best checkpoint, as far as due."""
        step, every = self.trainer.step, self.config.sample_every
        if not is_recorded(self.config, step):
            return
        evaluating = is_evaluated(self.config, step)
        shown = self.group.first and every is not None and step % every == 0
        val_loss = self._evaluate() if evaluating else None
        self._record(val_loss, self._sample_on_the_way() if shown else None)
        if evaluating:
            self._keep_best()

    def _count_traced(self) -> None:
        if self.trace:
            turns = self.trainer.step in self.trace.turns
            with self._not_timed() if turns else nullcontext():
                self.trace.step_done()

    def _sample_on_the_way(self) -> str | None:
        """Generate a sample; running out of memory does not end the run."""
        try:
            return self._sample()
        except ArbError as error:
            self.observer.noted(f"no sample of step {self.trainer.step}: {error}")
            return None

    def _sample(self) -> str:
        model, config = self.trainer.model, self.config
        sampling, prompt = Sampling(seed=config.seed), PROMPT
        if not symbols_of(model, prompt):  # the tokenizer drops it
            prompt = self.texts.val.source.read(0, PROMPT_BYTES)
        # large float baselines are compiled block by block, for training only; `set_stance` imports
        # torch's compiler, which takes 2 s
        compiled = self.trainer.is_compiled
        eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with self._not_timed(), eager:
            if config.model.is_masked:
                length = min(SAMPLE_BYTES, config.model.ctx)
                text = filled(model, length, SAMPLE_STEPS, sampling, backend=config.backend)
            else:
                text = generate(model, prompt, SAMPLE_BYTES, sampling, backend=config.backend)
            return b"".join(text).decode(errors="replace")

    @contextmanager
    def _not_timed(self) -> Iterator[None]:
        if self.last_loss is not None:
            float(self.last_loss)  # wait until the GPU has finished the timed steps
        started = time.perf_counter()
        yield
        self.paused += time.perf_counter() - started

    def _save(self) -> None:
        if not self.saves:
            return
        with self._not_timed():
            self._check_text()
            self.trainer.check_agreement()
            digests = self.facts["text"]["digest"], self.facts.get("init_digest")
            checkpoint = self.trainer.checkpoint(*digests)
            parts, gauges = self._parts_and_gauges()
            recent = self.recent.as_json() | {"parts": finite(parts), "gauges": finite(gauges)}
            checkpoint.data[FIELD] = recent
            aside = self._write(checkpoint) if self.group.first else []
            self.saved_step, self.last_save = checkpoint.step, time.perf_counter()
        self.later_ones = []
        _note_aside(aside, self.observer)

    def _check_text(self) -> None:
        """Check that the text has not changed since the run began.

        Raises:
            ArbError: in all processes, if a file was changed.
        """
        texts, same = self.trainer.texts, True
        if self.group.first and (times := _times(texts)) != self.times:
            same = text_digest(texts) == self.facts["text"]["digest"]
            self.times = times if same else self.times
        if not self.group.broadcast_object(same):
            raise ArbError(
                "the text was changed while the run read it",
                hint=f"restore it, and continue with `--resume {self.run_path}`",
            )

    def _write(self, checkpoint: Checkpoint) -> list[Path]:
        """Write a checkpoint; return the files that were set aside."""
        path = checkpoint_path(self.folder, checkpoint.step)
        aside = [set_aside(path, leave=True)] if path in self.later_ones else []
        save_checkpoint(self.folder, checkpoint, self.config.keep)
        return aside + [set_aside(later) for later in self.later_ones if later != path]

    def _save_if_new(self) -> None:
        if self.saved_step != self.trainer.step:
            self._save()

    def _keep_best(self) -> None:
        """Keep the checkpoint of this step as the best, if its held-out loss is the lowest."""
        if not (self.saves and self.config.keep_best):
            return
        # only the first process writes and reads records
        best = self.group.first and best_step(self.folder) == self.trainer.step
        if any(self.group.agree(best)):
            self._save_if_new()
            if self.group.first:
                keep_best(checkpoint_path(self.folder, self.trainer.step))

    def _evaluate(self) -> float:
        with self._not_timed():
            return self.trainer.evaluate() / self.texts.val.symbol_bytes

    def _parts_and_gauges(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the auxiliary losses of the last step, and the gauges of the model after it."""
        trainer, saved = self.trainer, self.resumed.recent
        if trainer.step == self.resumed_step:  # only the checkpoint has the values of its step
            parts, gauges = (saved.get(name, {}) for name in ("parts", "gauges"))
            return as_numbers(parts), as_numbers(gauges)
        parts = {k: float(v) for k, v in trainer.loss_parts.items() if k != "text"}
        return parts, trainer.model.gauges()

    def _token_losses(self, loss: float, val_loss: float | None) -> dict[str, float | None]:
        """Convert nats per byte to nats per token; None for a model of bytes."""
        train, val = self.texts.train.symbol_bytes, self.texts.val.symbol_bytes
        if self.texts.tokenizer is None:
            return {"token_loss": None, "token_val_loss": None}
        token_val_loss = None if val_loss is None else val_loss * val
        return {"token_loss": loss * train, "token_val_loss": token_val_loss}

    def _record(self, val_loss: float | None, sample: str | None = None) -> None:
        trainer, config = self.trainer, self.config
        steps = self.recent.last(trainer.step - self.recorded_step)  # synchronises with the GPU
        now, loss = time.perf_counter(), math.nan  # NaN if the checkpoint has no recent losses
        flip_share, nonfinite = None, 0
        if steps:
            loss = sum(step.loss for step in steps) / len(steps) / self.texts.train.symbol_bytes
        if steps and trainer.updater:
            flips = sum(step.flips or 0 for step in steps)
            flip_share = flips / len(steps) / trainer.updater.num_weights
        if trainer.updater:
            nonfinite = trainer.updater.counters()["nonfinite_steps"]
        positions = config.batch * config.accum * config.model.ctx
        step_bytes = round(positions * self.texts.train.symbol_bytes)
        mfu, seconds = None, None
        if self.timed_steps:
            seconds = max(now - self.last_record - self.paused, 1e-9) / self.timed_steps
        if self.peak_operations and seconds:
            needed = config.batch * config.accum * step_operations(config.model)
            mfu = needed / seconds / (self.peak_operations * self.group.size)
        # maximum over processes
        state, peak = self.group.agree(trainer.state_bytes(), peak_bytes(trainer.device))
        parts, gauges = self._parts_and_gauges()
        record = Record(
            step=trainer.step,
            loss=loss,
            bits_per_byte=loss / math.log(2),
            val_loss=val_loss,
            **self._token_losses(loss, val_loss),
            lr=learning_rate(config, trainer.step - 1),
            bytes_seen=trainer.step * step_bytes,
            seconds=self.resumed.seconds + now - self.started,
            bytes_per_second=step_bytes / seconds if seconds else None,
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
        self.recorded_step, self.timed_steps = trainer.step, 0
        self.last_record, self.paused = now, 0.0
        if self.group.first and self.run_path is not None:
            append_record(self.run_path, record)
        self.observer.recorded(record)
        if nonfinite >= MAX_NONFINITE_STEPS:
            intact = f"the checkpoints in `{self.run_path}` are intact; " if self.saves else ""
            raise _Diverged(
                f"{nonfinite} steps had gradients that are not finite; the last was before step"
                f" {trainer.step}",
                hint=f"{intact}try a smaller `--lr`",
            )
        if not math.isfinite(loss) and trainer.updater is None:
            raise _Diverged(f"the loss is {loss}", hint="try a smaller `--lr`")
