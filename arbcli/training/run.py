"""Runs: start training in a directory."""

import dataclasses
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arbcli.base.atomic_files import sweep, write_bytes, write_json
from arbcli.base.lazy import imported
from arbcli.base.run_files import COMPANIONS, CONFIG, TOKENIZER, check_free
from arbcli.config.training import FADE_LEARNT_TO, TrainConfig
from arbcli.data.files import has_documents
from arbcli.data.text import Texts
from arbcli.generation.tokens import check_digest
from arbcli.kernels.runtime.device import deterministic, emulates_nvfp4, explained_out_of_memory
from arbcli.model.checkpoint import TOKENIZER_DIGEST, check_trainable, run_lock
from arbcli.training.directory import (
    field_digests,
    make_directory,
    make_next_directory,
    open_run_texts,
    run_facts,
)
from arbcli.training.loop import Loop
from arbcli.training.observer import Observer
from arbcli.training.parallel.group import Group, joined, own_device
from arbcli.training.record import TrainReport
from arbcli.training.recorder import Resumed
from arbcli.training.text_warnings import text_warnings
from arbcli.training.trainer import Trainer, check_shares, text_digest

if TYPE_CHECKING:
    from arbcli.generation.load import SavedModel


EMULATED = "NVFP4 products are emulated on this device: same results, at most the speed of bf16"
SHARED_SETTINGS = (
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
    choose: Callable[[TrainConfig, Texts, int], dict[str, Any]] = lambda *_: {},
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
        choose: called in the first process with the configuration, the texts and the number of
            processes; returns settings to replace in all of them.
        save: whether to write files; otherwise records only go to the observer.

    Raises:
        ArbError: a failure that the user can fix; earlier checkpoints stay intact.
        ValueError: `save` is False, and `run` or `profile` is given.
    """
    if not save and (run is not None or profile is not None):
        raise ValueError("a run that is not saved has no directory and no trace")
    if minutes is not None:
        from arbcli.training.minutes import check_minutes, steps_that_fit

        check_minutes(minutes)
    if initial is not None:
        from arbcli.config.initial import check_initial
        from arbcli.generation.load import saved_config
        from arbcli.interop.huggingface.companions import copy_companions

        check_trainable(initial.checkpoint)
        initial_config = saved_config(initial.checkpoint)
        check_initial(config.model, initial_config)
        if (initial_config.digits, config.model.digits, config.fade_from) == ("all", "fade", None):
            # the digits are already trained
            end = FADE_LEARNT_TO if config.fade_to is None else config.fade_to
            config = dataclasses.replace(config, fade_from=0.0, fade_to=end)
    if run is not None:
        check_free(run)
    config = dataclasses.replace(config, device=str(own_device(torch.device(config.device))))
    with joined(torch.device(config.device), "train") as group:
        observer = observer if group.first else Observer()
        texts = open_run_texts(config)
        chosen_settings = group.call_in_first(lambda: choose(config, texts, group.size))
        config = dataclasses.replace(config, **chosen_settings)
        check_shares(config, group.size)
        if initial is not None and texts.tokenizer:
            tokenizer_digest = initial.checkpoint.data.get(TOKENIZER_DIGEST)
            check_digest(texts.tokenizer, tokenizer_digest, Path(str(config.tokenizer)))
        initial_digest = initial and initial.checkpoint.digest
        teacher = None
        if config.teacher is not None:
            teacher = imported("arbcli.training.teacher:read_teacher")(config, observer.noted)
            # the checkpoint's own path, as its run may write later ones
            config = dataclasses.replace(config, teacher=os.path.abspath(teacher.path))
        digests = {"teacher": teacher and teacher.checkpoint.digest, "init_from": initial_digest}
        compare_settings(config, texts, group, minutes=minutes, save=save, **digests)
        check(config)
        for warning in text_warnings(texts):
            observer.noted(warning)
        note_emulation(config, observer)
        make = partial(make_next_directory, config) if run is None else partial(make_directory, run)
        run = group.call_in_first(make if save else lambda: None)
        with locked(run, group), deterministic():
            if group.first and save:
                check_free(run)  # the lock keeps other processes from starting a run here
                sweep(run)
            if minutes is not None:
                started = time.perf_counter()
                trial = build_trainer(config, texts, group, teacher)
                config = dataclasses.replace(config, steps=steps_that_fit(minutes, trial, started))
                del trial  # it may be large
            facts = run_facts(run, config, texts)
            trainer = build_trainer(config, texts, group, teacher)
            if teacher is not None:
                facts["teacher_digest"] = trainer.teacher_digest
                del teacher  # it may be large
            if initial is not None:
                trainer.initialise_from(initial.checkpoint)
                facts["init_from"] = os.path.abspath(initial.path)
                facts["init_digest"] = initial.checkpoint.digest
                if group.first and save:
                    copy_companions(initial.path.parent / COMPANIONS, run / COMPANIONS)
                del initial  # it may be large
            if group.first and save:
                if texts.tokenizer:
                    write_bytes(run / TOKENIZER, texts.tokenizer.content)
                    keep = imported("arbcli.data.special_tokens:keep_special_tokens")
                    keep(str(config.tokenizer), run)
                if has_documents(config.field):
                    from arbcli.data.chat_template import keep_template

                    keep_template(str(config.tokenizer), run)
                write_json(run / CONFIG, facts)
            return run_loop(trainer, run, facts, observer, profile)


def note_emulation(config: TrainConfig, observer: Observer) -> None:
    """Note that the number format of a run is emulated on its device, if it is."""
    if config.compute == "nvfp4" and emulates_nvfp4(torch.device(config.device)):
        observer.noted(EMULATED)


def compare_settings(config: TrainConfig, texts: Texts, group: Group, **others: Any) -> None:
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
    uses_gpu = device.type == "cuda"
    return field_digests(config) | {
        "text": text_digest(texts),
        "template": texts.train.template_digest,
        "tokenizer": texts.tokenizer and texts.tokenizer.digest,
        "device": torch.cuda.get_device_name(device) if uses_gpu else "cpu",
        "backend": config.backend,
        "threads": None if uses_gpu else torch.get_num_threads(),
        **{name: getattr(config, name) for name in SHARED_SETTINGS},
    }


def locked(run: Path | None, group: Group) -> AbstractContextManager:
    """Lock the directory of a run, if any, in the first process."""
    return run_lock(run) if group.first and run is not None else nullcontext()


def build_trainer(
    config: TrainConfig, texts: Texts, group: Group, teacher: "SavedModel | None"
) -> Trainer:
    """Build the trainer of a run.

    Raises:
        ArbError: GPU memory is exhausted.
    """
    with explained_out_of_memory():
        return Trainer(
            config, texts, capture=True, group=group, teacher=teacher and teacher.checkpoint
        )


def run_loop(
    trainer: Trainer,
    run: Path | None,
    facts: dict[str, Any],
    observer: Observer,
    profile: int | None,
    resumed: Resumed | None = None,
) -> TrainReport:
    """Run the training loop: see `Loop`.

    Raises:
        ArbError: GPU memory is exhausted, or as `Loop.run`.
    """
    try:
        with explained_out_of_memory():
            return Loop(trainer, run, facts, observer, profile, resumed).run()
    finally:
        trainer.release_graph()
