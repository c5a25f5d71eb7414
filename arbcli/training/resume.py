"""Resume a run from a checkpoint."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arbcli.base.atomic_files import refuse_link, write_json
from arbcli.base.errors import ArbError, quoted, shell_word
from arbcli.base.lazy import imported
from arbcli.base.run_files import CONFIG, checkpoint_path, checkpoints, require_run
from arbcli.config.initial import first_difference
from arbcli.config.presets import config_from_dict
from arbcli.config.training import (
    CHANGEABLE,
    TrainConfig,
    train_config_dict,
    train_config_from,
)
from arbcli.kernels.runtime import device as devices
from arbcli.model.checkpoint import (
    Accept,
    Checkpoint,
    copy_aside,
    keep_best,
    latest_checkpoint,
    load_checkpoint,
    set_aside,
)
from arbcli.training import directory
from arbcli.training.observer import Observer
from arbcli.training.parallel.group import Group, joined, own_device
from arbcli.training.recent import FIELD, check_recent
from arbcli.training.record import (
    METRICS,
    RunRecords,
    TrainReport,
    best_step,
    held_out_losses,
    is_kept,
    read_records,
)
from arbcli.training.recorder import Resumed
from arbcli.training.run import (
    build_trainer,
    compare_settings,
    locked,
    note_emulation,
    run_loop,
)
from arbcli.training.saving import later_checkpoints, note_aside, sweep_run
from arbcli.training.schedule import Patience, fade_share, fade_stage, is_evaluated, learning_rate
from arbcli.training.trainer import check_shares, text_digest

if TYPE_CHECKING:
    from arbcli.generation.load import SavedModel

DATA_KEYS = {"seed": "seed", "text": "digest", "tokenizer": "tokenizer", "reduce_dtype": "wire",
        "weight_average": "average"}  # fmt: skip
"""Facts about the run in each checkpoint, by their keys in its `data`."""
MAX_LISTED = 3
"""Maximum number of fields that an error lists."""
MAX_THREADS_PER_CPU = 4
"""Maximum threads per processor with which a run is resumed; more would be too slow."""


def resume_run(
    path: Path,
    observer: Observer,
    *,
    device: str | None = None,
    backend: str | None = None,
    steps: int | None = None,
    profile: int | None = None,
    check: Callable[[TrainConfig], None] = lambda _: None,
    **changes: Any,
) -> TrainReport:
    """Resume a run from its newest intact checkpoint, or from a given checkpoint.

    Args:
        path: a run directory, or a checkpoint in one.
        observer: callbacks.
        device: device to compute on; None is the run's. Results are only bitwise reproducible on
            the same kind of machine.
        backend: kernel backend; None is the run's.
        steps: new total number of steps, which also changes the schedule.
        profile: number of steps to trace with torch's profiler: see `start_run`.
        check: may raise to refuse the run, before any of its checkpoints is read.
        changes: new values of other settings in `CHANGEABLE`, on which no weight depends; they are
            written to `config.json`.

    Raises:
        ArbError: there is no usable checkpoint, the text has changed, a setting cannot change, or a
            new value is invalid.
    """
    if fixed := sorted(changes.keys() - {*CHANGEABLE}):
        raise ArbError(
            f"`{fixed[0]}` of a run cannot change",
            f"start a new run from its weights with `init_from`, or change: {quoted(CHANGEABLE)}",
        )
    run = require_run(path)
    facts = directory.read_facts(run)
    config = dataclasses.replace(directory.run_config(run, facts), **changes)
    config = on_machine(config, device, backend)
    torch_device = torch.device(config.device)
    with joined(torch_device, "train --resume") as group:
        observer = observer if group.first else Observer()
        check_shares(config, group.size)
        note_emulation(config, observer)
        threads = _threads(facts, torch_device, observer)
        check(config)  # before a checkpoint takes memory
        with locked(run, group), devices.deterministic(), devices.cpu_threads(threads):
            group.compare({"steps": steps or config.steps}, "setting")
            accept = checkpoint_check(run, facts, config)
            checkpoint = None
            if path != run:
                checkpoint = load_checkpoint(path, accept)
            elif checkpoints(run) or not can_restart(run):
                checkpoint = latest_checkpoint(run, observer.noted, accept)
            else:
                observer.noted("the run has no checkpoint yet: starting again from step 0")
            group.compare({"checkpoint": checkpoint and checkpoint.digest}, "file")
            facts["config"] |= changes
            start_step = 0 if checkpoint is None else checkpoint.step
            if start_step >= config.steps and steps in (None, config.steps):
                report = _finished_report(run, facts, config, observer, group)
                if report is not None:
                    return report
            new_run = (
                f"start a new run from its weights: `--init-from {shell_word(run)} --data TEXT`"
            )
            texts = directory.reopen_texts(facts, config, new_run)
            compare_settings(config, texts, group, steps=steps or config.steps)
            directory.check_same_text(run, facts, text_digest(texts), new_run)
            teacher = None
            if config.teacher is not None:
                teacher = imported("arbcli.training.teacher:reload_teacher")(facts, config)
            has_recent = bool(checkpoint and checkpoint.data.get(FIELD))
            if group.first:
                refuse_link(run / METRICS)  # before anything is trained or written
            records_before = read_records(run) if group.first else []
            kept_records = [r for r in records_before if is_kept(r, start_step, config, has_recent)]
            if steps not in (None, config.steps):
                check_patience(run, config, group.broadcast_object(held_out_losses(kept_records)))
                config, facts = _extend(run, facts, config, start_step, steps, observer, group)
            if group.first:  # first, as the disk may be full
                sweep_run(run, config, start_step, kept_records)
            _record_changes(run, facts, group)
            trainer = build_trainer(config, texts, group, teacher)
            del teacher  # it may be large
            if checkpoint is None:
                if initial := reload_initial(facts):
                    trainer.initialise_from(initial.checkpoint)
                    del initial  # it may be large
                return run_loop(trainer, run, facts, observer, profile)
            trainer.restore(checkpoint)
            saved = checkpoint.data.get(FIELD) or {}
            del checkpoint  # it may be large
            earlier = (record for record in records_before if record["step"] <= start_step)
            seconds = max((record.get("seconds") or 0.0 for record in earlier), default=0.0)
            records = RunRecords(
                run if group.first else None,
                lambda record: is_kept(record, start_step, config, has_recent),
                branches=bool(later_checkpoints(run, start_step)),
            )
            resumed = Resumed(saved, seconds, records)
            return run_loop(trainer, run, facts, observer, profile, resumed)


def on_machine(config: TrainConfig, device: str | None, backend: str | None) -> TrainConfig:
    """Set the device and backend of a resume: see `resume_run`.

    Raises:
        ArbError: this machine lacks them.
    """
    torch_device = own_device(devices.resolve_device(device or config.device))
    backend = devices.resolve_backend(backend or (None if device else config.backend), torch_device)
    devices.check_compute(config.compute, torch_device)
    return dataclasses.replace(config, device=str(torch_device), backend=backend)


def _threads(facts: dict[str, Any], device: torch.device, observer: Observer) -> int:
    """Return the number of threads to compute with: on a CPU, that of the run, if possible."""
    current = torch.get_num_threads()
    threads = facts.get("threads", current) if device.type == "cpu" else current
    if threads > MAX_THREADS_PER_CPU * (os.cpu_count() or 1):
        observer.noted(
            f"the run began with {threads:,} threads, too many for this machine: computing with"
            f" {current}, with different rounding"
        )
        return current
    if threads != current:
        observer.noted(f"threads: {threads} as before, as {current} would round differently")
    return threads


def _finished_report(
    run: Path, facts: dict[str, Any], config: TrainConfig, observer: Observer, group: Group
) -> TrainReport | None:
    """Return the report of a finished run; None if its last record is incomplete."""
    records = read_records(run) if group.first else []
    last = [(record.get("val_loss"),) for record in records if record["step"] == config.steps]
    last_loss = group.broadcast_object(last[-1] if last else None)
    if last_loss is None or (last_loss[0] is None and is_evaluated(config, config.steps)):
        return None
    (val_loss,) = last_loss
    _record_changes(run, facts, group)
    saved = checkpoint_path(run, config.steps, config.model.weights)
    if group.first:  # the run may have been killed before it did so
        if config.keeps_best and best_step(records) == config.steps:
            keep_best(saved)
        sweep_run(run, config, config.steps, records)
    held_out = "" if val_loss is None else f", held-out loss {val_loss:.4f} nats a byte"
    observer.noted(
        f"the run is finished: all {config.steps:,} steps are done{held_out};"
        f" `--resume {shell_word(run)} --steps N` continues it to step N"
    )
    return TrainReport(
        run=str(run),
        checkpoint=str(saved),
        steps=config.steps,
        val_loss=val_loss,
        bits_per_byte=None if val_loss is None else val_loss / math.log(2),
        entropy=facts["text"]["entropy"],
    )


def check_steps(run: Path, start_step: int, steps: int) -> None:
    """Check that a new total number of steps exceeds the steps that are done.

    Raises:
        ArbError: it does not.
    """
    if steps <= start_step:
        raise ArbError(
            f"the run has done {start_step:,} steps",
            f"use a larger `--steps`, or only `--resume {shell_word(run)}`",
        )


def check_patience(run: Path, config: TrainConfig, losses: Iterable[tuple[int, float]]) -> None:
    """Check that a run has not ended by `--patience`, so that more steps would be taken.

    Raises:
        ArbError: it has.
    """
    if Patience(config.patience, losses).is_exhausted:
        raise ArbError(
            f"the run has ended, as its held-out loss has not fallen in {config.patience}"
            " evaluations (`--patience`)",
            "name an earlier checkpoint to go back to, or start a new run from the weights:"
            f" `--init-from {shell_word(run)}`",
        )


def _extend(
    run: Path,
    facts: dict[str, Any],
    config: TrainConfig,
    start_step: int,
    steps: int,
    observer: Observer,
    group: Group,
) -> tuple[TrainConfig, dict[str, Any]]:
    """Change the total number of steps, with a note about the learning rate."""
    check_steps(run, start_step, steps)
    extended = dataclasses.replace(config, steps=steps)
    rates = [learning_rate(plan, min(start_step, plan.steps)) for plan in (config, extended)]
    faded = ""
    if config.model.digits == "fade":
        shares = [fade_share(start_step, plan.steps, plan.fades) for plan in (extended, config)]
        faded = "; weights are annealed by {:.0%} there, not {:.0%}".format(*shares)
    observer.noted(
        f"{steps:,} steps instead of {config.steps:,}: the `{config.schedule}` schedule changes at"
        f" step {start_step:,}, where the learning rate is {rates[1]:.4g} instead of {rates[0]:.4g}"
        f"{faded}"
    )
    # a later resume must not load a checkpoint of the old schedule, whose records go with it
    if group.first and (later := later_checkpoints(run, start_step)):
        aside = [copy_aside(run / METRICS)] if (run / METRICS).exists() else []
        note_aside([*aside, *map(set_aside, later)], observer)
    changes = [*facts.get("extended", []), {"at": start_step, "from": config.steps, "to": steps}]
    recorded = train_config_dict(dataclasses.replace(train_config_from(facts), steps=steps))
    facts |= {"config": recorded, "digests": directory.field_digests(extended), "extended": changes}
    return extended, facts


def _record_changes(run: Path, facts: dict[str, Any], group: Group) -> None:
    """Write `config.json` if settings were changed."""
    if group.first and directory.read_facts(run) != facts:
        write_json(run / CONFIG, facts)


def check_same_run(
    run: Path, facts: dict[str, Any], config: TrainConfig, checkpoint: Checkpoint
) -> None:
    """Check that a checkpoint was written with the settings of its run.

    `config.json` is compared with its digests from the start of the run, and the checkpoint with
    `config.json`. A checkpoint from before the number of steps was changed has the earlier number.

    Raises:
        ArbError: settings differ.
    """
    hint = "restore the files of the run, or start a new run with `--out`"
    recorded = facts.get("digests", {})  # missing in runs of earlier versions
    present = directory.field_digests(config, facts["config"].get("model"))
    if changed := [n for n in present if recorded.get(n, present[n]) != present[n]]:
        raise ArbError(f"`{run / CONFIG}` was changed since the run began: {quoted(changed)}", hint)
    saved_settings = _all_fields(checkpoint.config)
    saved_settings |= {name: checkpoint.data.get(key) for name, key in DATA_KEYS.items()}
    expected = json.loads(json.dumps(asdict(config.model)))
    expected |= {
        "seed": config.seed,
        "text": facts["text"]["digest"],
        "tokenizer": facts["text"].get("tokenizer"),
        "reduce_dtype": config.reduce_dtype,
        "weight_average": config.weight_average or None,
    }
    settings = checkpoint.data.get("settings", {})  # missing in those of earlier versions
    if not isinstance(settings, dict):
        settings = {"settings": settings}
    digests = {"init_from": facts.get("init_digest"), "teacher": facts.get("teacher_digest")}
    known = config.decisive() | digests
    saved_settings |= settings
    expected |= {name: known[name] for name in settings if name in known}
    if saved_settings.get("steps") in _earlier_steps(facts, checkpoint.step):
        expected["steps"] = saved_settings["steps"]
    if config.model.digits == "fade":
        steps = expected.get("steps", config.steps)
        expected["digits"] = fade_stage(checkpoint.step, steps, config.fades)
    differences = [
        first_difference(saved_settings.get(name, "missing"), expected.get(name, "missing"), name)
        for name in sorted(saved_settings.keys() | expected.keys())
    ]
    differing = [
        f"its `{name}` is {saved!s:.60}, not {needed!s:.60}"
        for name, saved, needed in filter(None, differences)
    ]
    if differing:
        more = f", and {len(differing) - MAX_LISTED} more" if len(differing) > MAX_LISTED else ""
        raise ArbError(
            f"the checkpoint of step {checkpoint.step} does not belong to `{run / CONFIG}`:"
            f" {', '.join(differing[:MAX_LISTED])}{more}",
            hint,
        )


def checkpoint_check(run: Path, facts: dict[str, Any], config: TrainConfig) -> Accept:
    """Return a check that a run can resume from a checkpoint.

    Args:
        run: directory of the run.
        facts: contents of `config.json`.
        config: the configuration in `facts`.
    """
    from arbcli.generation.load import check_saved  # new runs do not need it

    def accept(checkpoint: Checkpoint) -> None:
        check_same_run(run, facts, config, checkpoint)
        check_recent(checkpoint)
        check_saved(checkpoint)

    return accept


def can_restart(run: Path) -> bool:
    """Return whether a run has no state yet, so that it can restart from step 0.

    The first checkpoint is saved before the first record.
    """
    return not read_records(run)


def reload_initial(facts: dict[str, Any]) -> "SavedModel | None":
    """Read the weights from which a run begins again; None if it draws them.

    Raises:
        ArbError: they are missing or have changed.
    """
    if "init_from" not in facts:
        return None
    from arbcli.generation.load import read_saved

    saved = read_saved(Path(facts["init_from"]), lambda _: None)
    if saved.checkpoint.digest != facts.get("init_digest"):
        raise ArbError(
            f"`{saved.path}` does not have the weights that the run began with",
            "restore it, or start a new run with another `--out`",
        )
    return saved


def _earlier_steps(facts: dict[str, Any], step: int) -> list[int]:
    """Return earlier total numbers of steps, which were changed at `step` or later."""
    totals = []
    for change in facts.get("extended", []):
        with suppress(TypeError, KeyError):  # the file may have been edited
            if step <= change["at"]:
                totals.append(change["from"])
    return totals


def _all_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a saved configuration to the fields of this version, if possible."""
    try:
        return json.loads(json.dumps(asdict(config_from_dict(config))))
    except (TypeError, ArbError):
        return config
