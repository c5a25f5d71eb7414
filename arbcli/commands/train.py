"""`arb train`: train a model, or continue a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from arbcli import run_files
from arbcli.commands._options import (
    OPTIONAL,
    Accum,
    Backend,
    Batch,
    Compute,
    Data,
    Device,
    Field,
    Json,
    Recompute,
    Seed,
    Tokens,
    Val,
    check_settings,
    find_run,
    given_options,
    one_of,
    option_of,
    takes_model,
    with_model_file,
)
from arbcli.commands._outputs import PICTURES, check_file, check_folder
from arbcli.commands._processes import start_processes, this_process
from arbcli.commands._run_display import RunDisplay
from arbcli.commands.check import show_check
from arbcli.config.file import read_settings, settings_text
from arbcli.config.initial import KEPT
from arbcli.config.model import WEIGHTS
from arbcli.config.training import OPTIMIZERS, SCHEDULES, WIRES, train_config_dict
from arbcli.data import check_named
from arbcli.errors import ArbError
from arbcli.loggers import LOGGERS, check_logger, find_logger
from arbcli.output import LiveLine, emit_json, note, write_bytes
from arbcli.rules import LR_OF_TUNING
from arbcli.signals import exit_code
from arbcli.sockets import pin_to_socket


def _check_loggers(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        check_logger(name)
    return names


@takes_model(first="preset model_file ctx rule digits direction scale_type weights sub_norms")
def train(
    data: Data = None,
    val: Val = None,
    field: Field = None,
    tokenizer: Tokens = None,
    steps: Annotated[int | None, typer.Option(min=1, help="How many. [default: 400]")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Train as many steps as fit, not --steps.")
    ] = None,
    batch: Batch = None,
    accum: Accum = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [default: the rule's]")] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, help="Steps, at most half of them. [default: 100]"),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="How the rate falls behind the warm-up: cosine, linear, wsd (in the last fifth) or"
            " constant. [default: cosine]",
            metavar="SCHEDULE",
            callback=one_of("schedule", SCHEDULES),
        ),
    ] = None,
    final_lr: Annotated[
        float | None, typer.Option(min=0, help="Where it falls to. [default: lr / 20]")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="ternary, or a twin: float or ste. [default: ternary]",
            metavar="|".join(WEIGHTS),
            callback=one_of("weights", WEIGHTS),
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Of a twin: adamw or muon. [default: adamw]",
            metavar="|".join(OPTIMIZERS["float"]),
            callback=one_of("optimizer", OPTIMIZERS["float"]),
        ),
    ] = None,
    sub_norms: Annotated[
        bool | None, typer.Option(help="Norms before the output projections. [default: yes]")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", help="Settings as TOML, or a run's config.json; options go first."
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings as TOML, and do not train.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Directory to make. [default: the next free one in runs/]")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|PATH", help="Go on with the last run, or the one named."),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps; and at the start, and every 5 minutes. [default: 500]"),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Newest checkpoints to keep. [default: 2]")
    ] = None,
    keep_best: Annotated[
        bool | None,
        typer.Option("--keep-best", help="Keep that of the lowest held-out loss, too."),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(metavar="RUN|FILE", help="Begin a new run with the weights of a saved model."),
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(min=0, help="Steps; 0 never. [default: a quarter of them, 50 to 500]"),
    ] = None,
    log_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between records. [default: 10]"),
    ] = None,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Leave nothing behind: no run, checkpoint or record.")
    ] = False,
    wire: Annotated[
        str | None,
        typer.Option(
            help="How gradients travel between processes: int12, int8, int16. "
            "[default: int12 of several]",
            metavar="|".join(WIRES),
            callback=one_of("wire", WIRES),
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to start here, a GPU each; --accum is a multiple."),
    ] = None,
    sample_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between samples of text. [default: at the end]")
    ] = None,
    compute: Compute = None,
    recompute: Recompute = None,
    device: Device = None,
    backend: Backend = None,
    pin: Annotated[
        bool,
        typer.Option("--pin", help="Keep threads on one socket, where there are several."),
    ] = False,
    seed: Seed = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the losses: .png, .pdf or .svg.")] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LOGGER",
            help=f"Hand on figures to {', '.join(LOGGERS)}; may be given again.",
            callback=_check_loggers,
        ),
    ] = None,
    profile: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="[N]",
            help=f"Trace N steps with torch's profiler. [default of N: {OPTIONAL['--profile']}]",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start though memory is predicted not to be enough.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what --resume would do, as arb check.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: Json = False,
    **model: Any,
) -> None:
    """Train a model on bytes, or continue a run: `arb train --ctx 64`."""
    given = given_options(
        **model,
        data=data,
        val=val,
        field=field,
        tokenizer=tokenizer,
        steps=steps,
        batch=batch,
        accum=accum,
        lr=lr,
        warmup=warmup,
        schedule=schedule,
        final_lr=final_lr,
        weights=weights,
        optimizer=optimizer,
        sub_norms=sub_norms,
        save_every=save_every,
        eval_every=eval_every,
        log_every=log_every,
        sample_every=sample_every,
        keep=keep,
        keep_best=keep_best,
        compute=compute,
        recompute=recompute,
        wire=wire,
        seed=seed,
    )
    if no_save:
        kept = {"out": out, "resume": resume, "save_every": save_every, "keep": keep}
        kept |= {"keep_best": keep_best, "dry_run": dry_run or None}
        _refuse_kept(given_options(**kept, plot=plot, log=log, profile=profile))
    if gpus is not None and not dry_run and not print_config:
        if resume is None and config_file is None and (accum or 1) % gpus:
            raise ArbError(
                f"`--accum` is {accum or 1}, which {gpus} processes cannot share evenly",
                hint=f"use a multiple of {gpus}",
            )
        start_processes(gpus)
    if pin and not dry_run and not print_config:
        place = this_process()  # before torch counts the processors
        number, cpus = pin_to_socket(place.local_rank, on_cpu=device == "cpu")
        if place.rank == 0:
            note(f"threads stay on socket {number}, on {len(cpus)} processors")
    if print_config and (resume or init_from):
        raise ArbError("what is saved has its own settings", hint="read them with `arb inspect`")
    if resume is None and init_from is None:
        given = with_model_file(given)
    if config_file is not None and resume is None:
        given = read_settings(config_file) | given
    if resume is not None:
        others = {name: value for name, value in given.items() if name != "steps"}
        others |= given_options(minutes=minutes, init_from=init_from, config=config_file)
        _refuse_changes(others)
    elif minutes is not None and steps is not None:
        raise ArbError("`--minutes` and `--steps` both say how long", hint="give one of them")
    elif init_from is not None:
        _refuse_shapes(given)
    if dry_run:
        if resume is None:
            raise ArbError(
                "`--dry-run` tells what a resume would do", hint="give `--resume` with it"
            )
        raise typer.Exit(show_check(Path(resume), as_json=as_json, root=out, steps=steps))
    if resume is not None:
        found = (
            run_files.latest_run(out or run_files.RUNS)
            if resume == "auto"
            else find_run(Path(resume))
        )
    elif init_from is not None:
        find_run(init_from, loads=True)
        check_named([*(data or ()), *(val or ())])
    else:
        check_settings(given)
    if resume is None and out is not None:
        run_files.check_free(out)
        if not out.is_file():
            check_folder(out, "--out")
    machine = given_options(device=device, backend=backend)
    if print_config:
        _show_settings(given | machine, as_json=as_json)
        return
    if plot is not None:
        check_file(plot, "--plot", PICTURES)
    rank, processes, *_ = this_process()
    if processes > 1 and weights in (None, "ternary") and resume is None:
        given.setdefault("wire", "int12")
    alone = rank == 0  # in showing anything
    advises = minutes is None and resume is None
    with RunDisplay(
        quiet=quiet or not alone, as_json=as_json and alone, advises=advises
    ) as display:
        display.wait("loading")
        from arbcli.infer.load import read_saved, saved_config
        from arbcli.infer.tokens import FILE, saved_tokenizer
        from arbcli.inspect import plots, room  # torch takes seconds, so not for `arb --help`
        from arbcli.train.configure import new_config
        from arbcli.train.run import Observers, resume_run, start_run

        if plot is not None:
            plots.require_matplotlib()
        loggers = [find_logger(name, display.noted) for name in dict.fromkeys(log or ())]
        # the display has all that an observer has; to inherit it would be to import torch
        observer = Observers([display, *loggers])  # type: ignore[list-item]
        if resume is not None:
            report = resume_run(
                found, observer, device=device, backend=backend, steps=steps, profile=profile
            )
        else:
            initial = None
            if init_from is not None:
                initial = read_saved(init_from, display.noted)
                given["preset"] = saved = saved_config(initial.checkpoint)
                if saved.digits != "trit" and (initial.path.parent / run_files.COMPANIONS).exists():
                    given.setdefault("lr", LR_OF_TUNING)
                if saved_tokenizer(*initial, saved):
                    given.setdefault("tokenizer", str(initial.path.with_name(FILE)))
            config = new_config(**given | machine)
            hint = f"{room.HINT}, or `--force` to try it"
            report = start_run(
                config,
                out,
                observer,
                minutes=minutes,
                initial=initial,
                profile=profile,
                check=lambda config: None if force else room.check_memory(config, hint),
                save=not no_save,
            )
    if plot is not None and alone and report.run is not None:
        plots.plot_training(Path(report.run), plot)
    if alone:
        display.finished(report)
    # the first process speaks for all: the others are ended as soon as one fails
    if report.stopped_by is not None and alone:
        raise typer.Exit(exit_code(report.stopped_by))


def _show_settings(given: dict[str, Any], *, as_json: bool) -> None:
    """Print the settings of the run that there would be."""
    with LiveLine() as line:
        line.show_wait("loading")
        from arbcli.train.configure import new_config  # torch takes seconds to import

        config = new_config(**given)
    if as_json:
        emit_json(train_config_dict(config))
    else:
        write_bytes(settings_text(config).encode())


def _refuse_changes(given: dict[str, Any]) -> None:
    if given:
        options = ", ".join(f"`{option_of(field)}`" for field in given)
        raise ArbError(
            f"a run goes on with its own settings, so {options} cannot be given to it",
            hint="leave them out, or start a new run without `--resume`",
        )


def _refuse_kept(given: dict[str, Any]) -> None:
    if given:
        options = ", ".join(f"`{option_of(field)}`" for field in given)
        raise ArbError(
            f"`--no-save` leaves no run behind, so {options} cannot be given with it",
            hint="leave one or the other out",
        )


def _refuse_shapes(given: dict[str, Any]) -> None:
    if own := [f"`{option_of(name)}`" for name in given if name in (*KEPT, "preset", "model_file")]:
        raise ArbError(
            f"a saved model keeps its own settings, so {', '.join(own)} cannot be given to it",
            hint="leave them out, or start without `--init-from`",
        )
