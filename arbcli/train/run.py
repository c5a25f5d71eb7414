"""A run: train a model in a new directory, or go on with one; save, evaluate, record, sample."""

import dataclasses
import math
import os
import signal as signals
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbcli import __version__
from arbcli.checkpoint import (
    Accept,
    Checkpoint,
    best_checkpoints,
    checkpoint_path,
    checkpoints,
    keep_best,
    latest_checkpoint,
    load_checkpoint,
    run_lock,
    save_checkpoint,
    set_aside,
    step_of,
    write_json,
)
from arbcli.config.initial import check_initial
from arbcli.config.training import TrainConfig, train_config_dict, train_config_from
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
from arbcli.infer.generation import Sampling, generate
from arbcli.infer.load import SavedModel, check_saved, check_trainable, saved_config
from arbcli.model.operations import step_operations
from arbcli.signals import RememberedSignal
from arbcli.train.directory import (
    CONFIG,
    check_free,
    check_same_run,
    check_same_text,
    field_digests,
    make_directory,
    make_next_directory,
    open_run_texts,
    open_texts_again,
    read_facts,
    run_facts,
)
from arbcli.train.parallel.group import Group, joined, own_device
from arbcli.train.profiling import StepTrace
from arbcli.train.record import (
    Record,
    TrainReport,
    append_record,
    best_step,
    drop_records_after,
    read_records,
    seconds_so_far,
)
from arbcli.train.schedule import learning_rate
from arbcli.train.text_warnings import text_warnings
from arbcli.train.trainer import (
    EAGER_STEPS,
    EVAL_BATCHES,
    Trainer,
    check_shares,
    text_digest,
)

EMULATED = "products in four bits are emulated: the same numbers, at the speed of bf16 or less"
MOST_MINUTES = 60 * 24 * 366
LOG_EVERY = 10
"""Steps between records; reading a loss makes a GPU wait."""
SAVE_SECONDS = 300
"""A checkpoint is written as soon as the last is so old, whatever `save_every` says."""
MAX_NONFINITE_STEPS = 3
TIMED_STEPS = 20
"""Steps that are timed at most, and thrown away, to turn minutes into a number of steps."""
TIMED_SHARE = 0.1
"""Of the minutes, that these take at most."""
TIMED_BATCHES = 4
"""Of an evaluation, that are timed."""
SAMPLE_BYTES = 256
PROMPT = b"\n"


class Observer:
    """Is told what happens in a run; what it does with that is its own affair."""

    def started(self, run: Path, trainer: Trainer, facts: dict[str, Any]) -> None:
        """A run begins, or goes on, at `trainer.step`; `facts` is what `config.json` says."""

    def recorded(self, record: Record) -> None:
        """A record was written."""

    def noted(self, message: str) -> None:
        """Something that a person should know."""

    def ended(self, report: TrainReport) -> None:
        """The run has come to its end, or to a signal; an error is not told."""


class Observers(Observer):
    """Tells several observers, in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def started(self, run: Path, trainer: Trainer, facts: dict[str, Any]) -> None:
        """Tell that the run begins."""
        for observer in self.observers:
            observer.started(run, trainer, facts)

    def recorded(self, record: Record) -> None:
        """Tell of a record."""
        for observer in self.observers:
            observer.recorded(record)

    def noted(self, message: str) -> None:
        """Tell what a person should know."""
        for observer in self.observers:
            observer.noted(message)

    def ended(self, report: TrainReport) -> None:
        """Tell how the run ended."""
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
) -> TrainReport:
    """Start a run in a new directory.

    Args:
        config: what to compute.
        run: directory to make; it must not hold a run. None is the next free one in `RUNS`.
        observer: is told of progress.
        minutes: sets the number of steps by timing a few.
        initial: what to begin with: the weights, and all that rule and direction keep beside them;
            it must be of the model of `config`: see `check_initial`.
        profile: steps to trace by torch's profiler, to a file in the directory: see `StepTrace`.
        check: may refuse the run, once its text is known and before anything is made for it.

    Raises:
        ArbError: something the user can fix; whatever was saved before is intact.
    """
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        raise ArbError(f"`--minutes` is {minutes}", hint=f"use a number up to {MOST_MINUTES:,}")
    if initial is not None:
        check_trainable(initial.checkpoint)
        check_initial(config.model, saved_config(initial.checkpoint))
    if run is not None:
        check_free(run)
    config = dataclasses.replace(config, device=str(own_device(torch.device(config.device))))
    with joined(torch.device(config.device)) as group:
        observer = observer if group.first else Observer()
        check_shares(config, group.size)
        texts = open_run_texts(config)
        _compare_settings(config, texts, group)
        check(config)
        for warning in text_warnings(texts):
            observer.noted(warning)
        if config.compute == "nvfp4" and emulates_nvfp4(torch.device(config.device)):
            observer.noted(EMULATED)
        if group.first:
            if run is None:
                run = make_next_directory(config)
            else:
                make_directory(run)
        run = group.tell(run)
        with _locked(run, group), deterministic():
            if group.first:
                check_free(run)  # nobody else can start one here from now on
            if minutes is not None:
                config = _fit_to_minutes(config, texts, minutes, group)
            facts = run_facts(config, texts)
            trainer = _build(config, texts, group)
            if initial is not None:
                trainer.take_weights(initial.checkpoint)
                facts["init_from"] = os.path.abspath(initial.path)
                facts["init_digest"] = initial.checkpoint.digest
                del initial  # it may be large
            if group.first:
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
    """Continue a run from its newest intact checkpoint, or from the checkpoint that is named.

    Args:
        path: a run directory, or a checkpoint in one.
        observer: is told of progress.
        device: where to go on; None is where it was. The same bits come only from the same kind
            of machine.
        backend: what runs the kernels; None is what ran them.
        steps: that the run is to have from now on; its schedule becomes that of so many.
        profile: steps to trace by torch's profiler, as `start_run` has it.

    Raises:
        ArbError: there is nothing to continue, or the text has changed.
    """
    if not path.exists():
        raise ArbError(f"there is no run at `{path}`", hint="name a run directory or a checkpoint")
    run = path if path.is_dir() else path.parent
    facts = read_facts(run)
    config = train_config_from(facts)
    place = own_device(resolve_device(device or config.device))
    backend = resolve_backend(backend or (None if device else config.backend), place)
    check_compute(config.compute, place)
    config = dataclasses.replace(config, device=str(place), backend=backend)
    if config.model.weights != "ternary":
        raise ArbError("a float twin keeps no checkpoint", hint="start it again with `--out`")
    if config.compute == "nvfp4" and emulates_nvfp4(torch.device(config.device)):
        observer.noted(EMULATED)
    threads = facts.get("threads", now := torch.get_num_threads())
    if threads != now and place.type == "cpu":
        observer.noted(f"computing with {threads} threads, as the run began: {now} give other bits")
    with joined(place) as group:
        observer = observer if group.first else Observer()
        check_shares(config, group.size)
        with _locked(run, group), deterministic(), cpu_threads(threads):
            texts = open_texts_again(facts, config)
            _compare_settings(config, texts, group)
            new_run = "start a new run on the new text with `--out`"
            check_same_text(run, facts, text_digest(texts), new_run)
            accept = accept_of(run, facts, config)
            checkpoint = None
            if path == run and not checkpoints(run) and can_begin_again(run, facts):
                observer.noted("the run was ended before it saved anything: it begins again")
            else:
                checkpoint = (
                    latest_checkpoint(run, observer.noted, accept)
                    if path == run
                    else load_checkpoint(path, accept)
                )
                group.compare({"checkpoint": checkpoint.digest}, "file")
            done = 0 if checkpoint is None else checkpoint.step
            if steps not in (None, config.steps):
                config, facts = _extended(run, facts, config, done, steps, observer, group)
            trainer = _build(config, texts, group)
            if checkpoint is None:
                return _run(trainer, run, facts, observer, profile)
            trainer.restore(checkpoint)
            if group.first:
                drop_records_after(run, trainer.step)
            return _run(trainer, run, facts, observer, profile, resumed=True)


def _compare_settings(config: TrainConfig, texts: Texts, group: Group) -> None:
    """Refuse processes that would train differently; one alone need not read its text for that."""
    if group.size > 1:
        group.compare(what_decides(config, texts), "setting")


def what_decides(config: TrainConfig, texts: Texts) -> dict[str, Any]:
    """List what must be the same in all processes of a run, by name."""
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"
    return field_digests(config) | {
        "text": text_digest(texts),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "backend": config.backend,
        "threads": None if on_gpu else torch.get_num_threads(),
        "save_every": config.save_every,
        "eval_every": config.eval_every,
        "keep_best": config.keep_best,
        "wire": config.wire,
        "sample_every": config.sample_every,
        "version of arb": __version__,
        "version of torch": torch.__version__,
    }


def _locked(run: Path, group: Group) -> AbstractContextManager:
    """Lock a run, which its first process does for all of them."""
    return run_lock(run) if group.first else nullcontext()


def can_begin_again(run: Path, facts: dict[str, Any]) -> bool:
    """Tell whether a run never got to save anything, and needs no weights of another run.

    The first checkpoint is saved before the first record.
    """
    return "init_from" not in facts and next(read_records(run), None) is None


def accept_of(run: Path, facts: dict[str, Any], config: TrainConfig) -> Accept:
    """Make what refuses a checkpoint that a run cannot go on from.

    Args:
        run: its directory.
        facts: what `config.json` says.
        config: made of that.
    """

    def accept(checkpoint: Checkpoint) -> None:
        check_same_run(run, facts, config, checkpoint)
        check_saved(checkpoint)

    return accept


def check_steps(run: Path, done: int, steps: int) -> None:
    """Refuse a number of steps that a run has behind it.

    Raises:
        ArbError: it is not above the steps that are done.
    """
    if steps <= done:
        raise ArbError(
            f"the run has {done:,} steps behind it",
            hint=f"use more than that, or `--resume {run}` alone",
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
    """Give a run another number of steps, and say what that does to its learning rate."""
    check_steps(run, done, steps)
    longer = dataclasses.replace(config, steps=steps)
    rates = [learning_rate(each, min(done, each.steps)) for each in (config, longer)]
    observer.noted(
        f"{steps:,} steps instead of {config.steps:,}: the `{config.schedule}` schedule is that of"
        f" {steps:,} from step {done:,} on, and its rate there {rates[1]:.4g} instead of"
        f" {rates[0]:.4g}"
    )
    # who is ended after this goes on from the same checkpoint, and not from one of the old schedule
    if group.first:
        _note_aside([set_aside(path) for path in _later(run, done)], observer)
    changes = [*facts.get("extended", []), {"at": done, "from": config.steps, "to": steps}]
    recorded = train_config_dict(dataclasses.replace(train_config_from(facts), steps=steps))
    facts |= {"config": recorded, "digests": field_digests(longer), "extended": changes}
    if group.first:
        write_json(run / CONFIG, facts)
    return longer, facts


def _build(config: TrainConfig, texts: Texts, group: Group) -> Trainer:
    with explained_out_of_memory():
        return Trainer(config, texts, capture=True, group=group)


def _fit_to_minutes(config: TrainConfig, texts: Texts, minutes: float, group: Group) -> TrainConfig:
    """Turn minutes into steps by timing a few, on a trainer that is thrown away.

    What that takes comes off the minutes, and so do evaluations.
    """
    started, most = time.perf_counter(), minutes * 60
    trainer = _build(config, texts, group)
    for _ in range(EAGER_STEPS + 1 if trainer.captures else 1):
        loss = trainer.train_step()
    float(loss)  # waits for a GPU
    begun, done = time.perf_counter(), 0

    def is_enough() -> bool:
        return done > 0 and time.perf_counter() - started >= TIMED_SHARE * most

    while done < TIMED_STEPS and not any(group.agree(is_enough())):
        loss = trainer.train_step()
        done += 1
    float(loss)
    ended = time.perf_counter()
    trainer.evaluate(TIMED_BATCHES)
    trainer.release_graph()
    now = time.perf_counter()
    of_step, of_evaluation = (ended - begun) / done, (now - ended) * EVAL_BATCHES / TIMED_BATCHES
    left = most - (now - started)
    steps = max(1, int(left / of_step))
    for _ in range(3):  # how often it is evaluated depends on the number of steps
        interval = dataclasses.replace(config, steps=steps).eval_interval
        evaluations = -(-steps // interval)
        steps = max(1, int((left - evaluations * of_evaluation) / of_step))
    return dataclasses.replace(config, steps=group.tell(steps))


def _run(
    trainer: Trainer,
    run: Path,
    facts: dict[str, Any],
    observer: Observer,
    profile: int | None,
    *,
    resumed: bool = False,
) -> TrainReport:
    saved_step = trainer.step if resumed else None
    try:
        with explained_out_of_memory():
            return _Loop(trainer, run, facts, observer, saved_step, profile).run()
    finally:
        trainer.release_graph()


def _later(run: Path, step: int) -> list[Path]:
    saved = [*checkpoints(run), *best_checkpoints(run)]
    return [path for path in saved if step_of(path) > step]


def _note_aside(aside: Sequence[Path], observer: Observer) -> None:
    if aside:
        names = ", ".join(f"`{name}`" for name in aside)
        observer.noted(f"checkpoints of before the run went back are set aside: {names}")


class _Diverged(ArbError):
    """The state is of no use."""


class _Loop:
    """The steps of a run from where its trainer stands to the end, or to a signal.

    Args:
        trainer: of the run.
        run: its directory.
        facts: what `config.json` says.
        observer: is told of progress.
        saved_step: step of the checkpoint that the trainer stands at; None if there is none.
        profile: steps to trace; None traces none.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: Path,
        facts: dict[str, Any],
        observer: Observer,
        saved_step: int | None,
        profile: int | None,
    ) -> None:
        self.trainer, self.run_path, self.facts, self.observer = trainer, run, facts, observer
        self.config, self.group = trainer.config, trainer.group
        self.stopped_by: signals.Signals | None = None
        """The signal that ended the run; of several processes one of them has received it."""
        self._old = False
        self.saved_step = saved_step
        traced = profile if self.group.first else None
        self.trace = StepTrace(run, trainer, traced, observer.noted) if traced else None
        self.left_behind = _later(run, trainer.step)
        """Checkpoints of later steps, which the run, gone back, will come to again."""
        self.seconds_before = seconds_so_far(run) if saved_step is not None else 0.0
        self.peak_operations = peak_operations(trainer.device)
        self.losses: list[Tensor] = []
        self.started = self.last_record = self.last_save = time.perf_counter()
        self.paused = 0.0

    def run(self) -> TrainReport:
        """Train to the end, or to a signal; then save, evaluate and sample."""
        trainer, config = self.trainer, self.config
        self.observer.started(self.run_path, trainer, self.facts)
        val_loss, sample = None, ""
        with RememberedSignal() as signal, self._saved_after_an_error():
            if self.saved_step is None:
                self._save()
            self._keep_best()  # unless whoever saved it was ended before
            with self.trace or nullcontext():
                while trainer.step < config.steps and not self._is_stopped(signal):
                    self.losses.append(trainer.train_step())
                    self._count_traced()
                    if trainer.step < config.steps:
                        self._after_step(trainer.step)
            # the end is saved last: who dies before gets there again, with the same record
            if self._is_stopped(signal):
                self._save_if_new()
            else:
                val_loss = self._evaluate()
            if self.losses:
                self._record(val_loss)
            self._save_if_new()
            self._keep_best()
            if not self._is_stopped(signal):
                sample = self._sample() if self.group.first else ""
            self.group.agree(0)  # let all be done before one leaves
        saved = self.saved_step is not None and checkpoint_path(self.run_path, self.saved_step)
        report = TrainReport(
            run=str(self.run_path),
            checkpoint=str(saved) if saved else None,
            steps=trainer.step,
            val_loss=val_loss,
            bits_per_byte=None if val_loss is None else val_loss / math.log(2),
            entropy=self.facts["text"]["entropy"],
            seconds=time.perf_counter() - self.started,
            sample=sample,
            stopped_by=self.stopped_by.name if self.stopped_by else None,
        )
        self.observer.ended(report)
        return report

    def _is_stopped(self, signal: RememberedSignal) -> bool:
        """Tell whether any process has been asked to stop, and agree on who needs a checkpoint."""
        old = self.group.first and time.perf_counter() - self.last_save >= SAVE_SECONDS
        received, old = self.group.agree(signal.received or 0, old)
        self._old = bool(old)
        if received:
            self.stopped_by = signals.Signals(received)
        return bool(received)

    @contextmanager
    def _saved_after_an_error(self) -> Iterator[None]:
        """Save before an error ends the run, unless its state is what is wrong."""
        try:
            yield
        except _Diverged:
            raise
        except Exception:
            with suppress(Exception):  # the error that began it is what is told
                alone = self.group.size == 1  # others may be elsewhere, or gone
                new = self.saved_step != self.trainer.step
                if alone and self.trainer.between_steps and new:
                    self._save()
                    step = self.trainer.step
                    self.observer.noted(f"step {step} is saved: go on with `--resume`")
            raise

    def _after_step(self, step: int) -> None:
        """Do what is due after a step that is not the last."""
        old = time.perf_counter() - self.last_save >= SAVE_SECONDS
        if self.group.size > 1:
            old = self._old  # as all know it
        if old or step % self.config.save_every == 0:
            self._save()
        evaluating = step % self.config.eval_interval == 0
        every = self.config.sample_every
        sampling = every is not None and step % every == 0
        shown = sampling and self.group.first
        if evaluating or sampling or step % LOG_EVERY == 0:
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
        """Make a sample; a run does not end for want of the memory that it takes."""
        try:
            return self._sample()
        except ArbError as error:
            self.observer.noted(f"no sample of step {self.trainer.step}: {error}")
            return None

    def _sample(self) -> str:
        model, config = self.trainer.model, self.config
        sampling = Sampling(seed=config.seed)
        with self._not_timed():
            text = generate(model, PROMPT, SAMPLE_BYTES, sampling, backend=config.backend)
            return b"".join(text).decode(errors="replace")

    @contextmanager
    def _not_timed(self) -> Iterator[None]:
        if self.losses:
            float(self.losses[-1])  # let a GPU finish the steps that are timed
        started = time.perf_counter()
        yield
        self.paused += time.perf_counter() - started

    def _save(self) -> None:
        if self.trainer.updater is None:
            return
        with self._not_timed():
            self.trainer.check_agreement()
            digests = self.facts["text"]["digest"], self.facts.get("init_digest")
            checkpoint = self.trainer.checkpoint(*digests)
            aside = self._write(checkpoint) if self.group.first else []
            self.saved_step, self.last_save = checkpoint.step, time.perf_counter()
        self.left_behind = []
        _note_aside(aside, self.observer)

    def _write(self, checkpoint: Checkpoint) -> list[Path]:
        """Write a checkpoint; return what had to be set aside for it."""
        path = checkpoint_path(self.run_path, checkpoint.step)
        aside = [set_aside(path, leave=True)] if path in self.left_behind else []
        save_checkpoint(self.run_path, checkpoint, self.config.keep)
        return aside + [set_aside(later) for later in self.left_behind if later != path]

    def _save_if_new(self) -> None:
        if self.saved_step != self.trainer.step:
            self._save()

    def _keep_best(self) -> None:
        """Keep the checkpoint of this step, if no other has a lower held-out loss."""
        if not self.config.keep_best:
            return
        # the first process alone reads what it alone writes
        best = self.group.first and best_step(self.run_path) == self.trainer.step
        if any(self.group.agree(best)):
            self._save_if_new()
            if self.group.first:
                keep_best(checkpoint_path(self.run_path, self.trainer.step))

    def _evaluate(self) -> float:
        with self._not_timed():
            return self.trainer.evaluate()

    def _record(self, val_loss: float | None, sample: str | None = None) -> None:
        trainer, config = self.trainer, self.config
        loss = float(torch.stack(self.losses).mean())  # waits for the GPU
        now, steps = time.perf_counter(), len(self.losses)
        seconds = max(now - self.last_record - self.paused, 1e-9) / steps
        step_bytes = config.batch * config.accum * config.model.ctx
        mfu, flip_share, nonfinite = None, None, 0
        if self.peak_operations:
            needed = config.batch * config.accum * step_operations(config.model)
            mfu = needed / seconds / (self.peak_operations * self.group.size)
        if trainer.updater:
            flip_share = trainer.updater.take_flips() / steps / trainer.updater.num_weights
            nonfinite = trainer.updater.counters()["nonfinite_steps"]
        # of the process with the most
        state, peak = self.group.agree(trainer.state_bytes(), peak_bytes(trainer.device))
        record = Record(
            step=trainer.step,
            loss=loss,
            bits_per_byte=loss / math.log(2),
            val_loss=val_loss,
            lr=learning_rate(config, trainer.step - 1),
            bytes_seen=trainer.step * step_bytes,
            seconds=self.seconds_before + now - self.started,
            bytes_per_second=step_bytes / seconds,
            mfu=mfu,
            flip_share=flip_share,
            state_bytes=state,
            peak_bytes=peak,
            seconds_left=seconds * (config.steps - trainer.step),
            nonfinite_steps=nonfinite,
            parts={k: float(v) for k, v in trainer.loss_parts.items() if k != "text"},
            gauges=trainer.gauges(),
            sample=sample,
        )
        self.losses.clear()
        self.last_record, self.paused = now, 0.0
        if self.group.first:
            append_record(self.run_path, record)
        self.observer.recorded(record)
        if nonfinite >= MAX_NONFINITE_STEPS:
            raise _Diverged(
                f"{nonfinite} steps had gradients that are not finite; the last was before step"
                f" {trainer.step}",
                hint=f"the checkpoints in `{self.run_path}` are intact; try a smaller `--lr`",
            )
        if not math.isfinite(loss) and trainer.updater is None:
            raise _Diverged(f"the loss is {loss}", hint="try a smaller `--lr`")
