"""Runs: start or resume training in a directory."""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arbcli.base.atomic_files import sweep, write_file, write_json
from arbcli.base.errors import ArbError
from arbcli.base.run_files import (
    COMPANIONS,
    CONFIG,
    TOKENIZER,
    check_free,
    checkpoint_path,
    checkpoints,
    directory_of,
)
from arbcli.config.training import (
    FADE_LEARNT_TO,
    TrainConfig,
    train_config_dict,
    train_config_from,
)
from arbcli.data.files import has_documents
from arbcli.data.text import Texts
from arbcli.generation.tokens import check_digest
from arbcli.kernels.runtime.device import (
    check_compute,
    cpu_threads,
    deterministic,
    emulates_nvfp4,
    explained_out_of_memory,
    resolve_backend,
    resolve_device,
)
from arbcli.model.checkpoint import (
    TOKENIZER_DIGEST,
    check_trainable,
    copy_aside,
    keep_best,
    latest_checkpoint,
    load_checkpoint,
    run_lock,
    set_aside,
)
from arbcli.training.directory import (
    THREADS_OF_A_CPU,
    accept_of,
    can_begin_again,
    check_same_text,
    field_digests,
    initial_again,
    make_directory,
    make_next_directory,
    open_run_texts,
    open_texts_again,
    read_facts,
    run_config,
    run_facts,
)
from arbcli.training.loop import Loop
from arbcli.training.observer import Observer
from arbcli.training.parallel.group import Group, joined, own_device
from arbcli.training.recent import FIELD
from arbcli.training.record import (
    METRICS,
    RunRecords,
    TrainReport,
    best_step,
    read_records,
    seconds_until,
    stays,
)
from arbcli.training.recorder import Resumed
from arbcli.training.saving import later_checkpoints, note_aside, sweep_run
from arbcli.training.schedule import is_evaluated, learning_rate
from arbcli.training.text_warnings import text_warnings
from arbcli.training.trainer import Trainer, check_shares, text_digest

if TYPE_CHECKING:
    from arbcli.generation.load import SavedModel


EMULATED = "NVFP4 products are emulated on this device: same results, at most the speed of bf16"
SHARED = (
    "save_every", "eval_every", "log_every", "keep_best", "reduce_dtype", "sample_every",
    "patience",
)  # fmt: skip
"""Settings that no weights depend on, and that all processes need to agree on."""


def start_run(
    config: TrainConfig,
    run: Path | None,
    observer: Observer,
    *,
    minutes: float | None = None,
    initial: "SavedModel | None" = None,
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
    if minutes is not None:
        from arbcli.training.minutes import check_minutes, steps_in

        check_minutes(minutes)
    if initial is not None:
        from arbcli.config.initial import check_initial
        from arbcli.generation.load import saved_config
        from arbcli.interop.huggingface.companions import copy_companions

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
            trained_with = initial.checkpoint.data.get(TOKENIZER_DIGEST)
            check_digest(texts.tokenizer, trained_with, Path(str(config.tokenizer)))
        initial_digest = initial and initial.checkpoint.digest
        teacher = _read_teacher(config, observer.noted)
        if teacher is not None:  # the checkpoint's own path, as its run may write later ones
            config = dataclasses.replace(config, teacher=os.path.abspath(teacher.path))
        digests = {"teacher": teacher and teacher.checkpoint.digest, "init_from": initial_digest}
        _compare_settings(config, texts, group, minutes=minutes, save=save, **digests)
        check(config)
        for warning in text_warnings(texts):
            observer.noted(warning)
        _note_emulation(config, observer)
        if group.first and save:
            run = make_next_directory(config) if run is None else make_directory(run)
        run = group.broadcast_object(run)
        with _locked(run, group), deterministic():
            if group.first and save:
                check_free(run)  # the lock keeps other processes from starting a run here
                sweep(run)
            if minutes is not None:
                started = time.perf_counter()
                timed = _build(config, texts, group, teacher)
                config = dataclasses.replace(config, steps=steps_in(minutes, timed, started))
                del timed  # it may be large
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
                    write_file(run / TOKENIZER, lambda file: file.write(texts.tokenizer.content))
                if has_documents(config.field):
                    from arbcli.data.chat_template import keep_template

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
    _note_emulation(config, observer)
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
            if path == run and not checkpoints(run) and can_begin_again(run):
                observer.noted("the run has no checkpoint yet: starting again from step 0")
            else:
                latest = path == run
                checkpoint = (
                    latest_checkpoint(run, observer.noted, accept)
                    if latest
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
            teacher = _read_teacher(config, facts=facts)
            if steps not in (None, config.steps):
                config, facts = _extended(run, facts, config, done, steps, observer, group)
            trainer = _build(config, texts, group, teacher)
            del teacher  # it may be large
            if checkpoint is None:
                if initial := initial_again(facts):
                    trainer.take_weights(initial.checkpoint)
                    del initial  # it may be large
                return _run(trainer, run, facts, observer, profile)
            trainer.restore(checkpoint)
            saved, seconds = checkpoint.data.get(FIELD) or {}, 0.0
            del checkpoint  # it may be large
            records = RunRecords(None)
            if group.first:
                seconds = seconds_until(run, done)
                records = RunRecords(
                    run,
                    lambda record: stays(record, done, config, bool(saved)),
                    branches=bool(later_checkpoints(run, done)),
                )
                sweep_run(run, config, done, records.read())
            resumed = Resumed(saved, seconds, records)
            return _run(trainer, run, facts, observer, profile, resumed)


def _finished_report(
    run: Path, facts: dict[str, Any], config: TrainConfig, observer: Observer, group: Group
) -> TrainReport | None:
    """Return the report of a finished run; None if its last record is incomplete."""
    last_loss = None
    if group.first:
        last = [record for record in read_records(run) if record["step"] == config.steps]
        last_loss = (last[-1].get("val_loss"),) if last else None
    last_loss = group.broadcast_object(last_loss)
    if last_loss is None or (last_loss[0] is None and is_evaluated(config, config.steps)):
        return None
    (val_loss,) = last_loss
    saved = checkpoint_path(run, config.steps)
    if group.first:  # the run may have been killed before it did so
        records = read_records(run)
        if config.keeps_best and best_step(records) == config.steps:
            keep_best(saved)
        sweep_run(run, config, config.steps, records)
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
    )


def _note_emulation(config: TrainConfig, observer: Observer) -> None:
    if config.compute == "nvfp4" and emulates_nvfp4(torch.device(config.device)):
        observer.noted(EMULATED)


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
        "template": texts.train.template_digest,
        "tokenizer": texts.tokenizer and texts.tokenizer.digest,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "backend": config.backend,
        "threads": None if on_gpu else torch.get_num_threads(),
        **{name: getattr(config, name) for name in SHARED},
    }


def _locked(run: Path | None, group: Group) -> AbstractContextManager:
    """Lock the directory of a run, if any, in the first process."""
    return run_lock(run) if group.first and run is not None else nullcontext()


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
    rates = [
        learning_rate(run_config, min(done, run_config.steps)) for run_config in (config, longer)
    ]
    observer.noted(
        f"{steps:,} steps instead of {config.steps:,}: the `{config.schedule}` schedule changes at"
        f" step {done:,}, where the learning rate is {rates[1]:.4g} instead of {rates[0]:.4g}"
    )
    # a later resume must not load a checkpoint of the old schedule, whose records go with it
    if group.first and (later := later_checkpoints(run, done)):
        aside = [copy_aside(run / METRICS)] if (run / METRICS).exists() else []
        note_aside([*aside, *map(set_aside, later)], observer)
    changes = [*facts.get("extended", []), {"at": done, "from": config.steps, "to": steps}]
    recorded = train_config_dict(dataclasses.replace(train_config_from(facts), steps=steps))
    facts |= {"config": recorded, "digests": field_digests(longer), "extended": changes}
    if group.first:
        write_json(run / CONFIG, facts)
    return longer, facts


def _read_teacher(
    config: TrainConfig,
    note: Callable[[str], None] = lambda _: None,
    facts: dict[str, Any] | None = None,
) -> "SavedModel | None":
    """Read the teacher of a run, or of a resumed one with `facts`; None if it has none."""
    if config.teacher is None:
        return None
    from arbcli.training.teacher import read_teacher, teacher_again

    return read_teacher(config, note) if facts is None else teacher_again(facts, config)


def _build(
    config: TrainConfig, texts: Texts, group: Group, teacher: "SavedModel | None"
) -> Trainer:
    with explained_out_of_memory():
        return Trainer(
            config, texts, capture=True, group=group, teacher=teacher and teacher.checkpoint
        )


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
            return Loop(trainer, run, facts, observer, profile, resumed).run()
    finally:
        trainer.release_graph()
