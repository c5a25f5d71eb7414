"""`arb train`: train a model, or continue a run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbcli import run_files
from arbcli.commands._options import (
    OPTIONAL,
    Backend,
    Device,
    Json,
    Quiet,
    check_settings,
    check_texts,
    find_run,
    given_options,
    option_of,
    takes_settings,
    with_model_file,
)
from arbcli.commands._outputs import PICTURES, check_file, check_folder
from arbcli.commands._processes import start_processes, this_process
from arbcli.commands._run_display import RunDisplay
from arbcli.commands.check import show_check
from arbcli.config.file import read_settings, settings_text
from arbcli.config.initial import KEPT
from arbcli.config.settings import OPTIMISATION, OUTPUT, RUN
from arbcli.config.training import RUN_SETTINGS, train_config_dict, trains_ternary
from arbcli.environment import free_threads, is_for_cpu, may_have_gpu
from arbcli.errors import ArbError
from arbcli.loggers import LOGGERS, check_logger, find_logger
from arbcli.output import LiveLine, emit_json, note, write_bytes
from arbcli.rules import LR_OF_TUNING
from arbcli.signals import exit_code
from arbcli.sockets import pin_to_socket

if TYPE_CHECKING:
    from arbcli.infer.load import SavedModel


def _check_loggers(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        check_logger(name)
    return names


@takes_settings(*RUN_SETTINGS, "weights")
def train(
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Train as many steps as fit into this time, instead of --steps.",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|FILE",
            help="Start a new run from the weights of a saved model.",
            rich_help_panel=OPTIMISATION,
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Settings as TOML, or a run's config.json. Options override them.",
            rich_help_panel=RUN,
        ),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the settings as TOML, and do not train.",
            rich_help_panel=RUN,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory to create. [default: the next free one in runs/]",
            rich_help_panel=RUN,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH",
            help="Continue the last run, or the one that is named.",
            rich_help_panel=RUN,
        ),
    ] = None,
    no_save: Annotated[
        bool,
        typer.Option(
            "--no-save",
            help="Write nothing: no run, no checkpoint, no record.",
            rich_help_panel=RUN,
        ),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes to start here, one for each GPU. --accum must be a multiple."
            " [default: 1]",
            rich_help_panel=RUN,
        ),
    ] = None,
    device: Device = None,
    backend: Backend = None,
    pin: Annotated[
        bool,
        typer.Option(
            "--pin",
            help="Keep the threads on one CPU socket, where there are several.",
            rich_help_panel=RUN,
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot the losses: .png, .pdf or .svg.", rich_help_panel=OUTPUT),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LOGGER",
            help=f"Log metrics to {', '.join(LOGGERS)}. Repeat it for several.",
            callback=_check_loggers,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    profile: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="[N]",
            help=f"Trace N steps with torch's profiler. [default of N: {OPTIONAL['--profile']}]",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Start even if the predicted memory does not fit.",
            rich_help_panel=RUN,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="With --resume: only say what would be done, as arb check does.",
            rich_help_panel=RUN,
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Train a model on bytes, or continue a run: `arb train --ctx 64`."""
    given = given_options(**given)
    steps = given.get("steps")
    if no_save:
        kept = {name: given.get(name) for name in ("save_every", "keep", "keep_best")}
        kept |= {"out": out, "resume": resume, "dry_run": dry_run or None}
        _refuse_kept(given_options(**kept, plot=plot, log=log, profile=profile))
    if gpus is not None and not dry_run and not print_config:
        if resume is None and config_file is None:
            _check_shares(given.get("accum", 1), gpus, device)
        start_processes(gpus)
    if pin and not dry_run and not print_config:
        _pin(device)
    if print_config and (resume or init_from):
        raise ArbError("what is saved has its own settings", hint="read them with `arb inspect`")
    if resume is not None:
        others = {name: value for name, value in given.items() if name != "steps"}
        others |= given_options(minutes=minutes, init_from=init_from, config=config_file)
        _refuse_changes(others)
    else:
        given = _with_files(given, config_file, init_from)
        if minutes is not None and steps is not None:
            raise ArbError("`--minutes` and `--steps` both say how long", hint="give one of them")
    if dry_run:
        if resume is None:
            raise ArbError(
                "`--dry-run` tells what a resume would do", hint="give `--resume` with it"
            )
        raise typer.Exit(show_check(Path(resume), as_json=as_json, root=out, steps=steps))
    if resume is None:
        _check_new(given, init_from, out)
    else:
        latest = resume == "auto"
        run = run_files.latest_run(out or run_files.RUNS) if latest else find_run(Path(resume))
        run_files.directory_of(run)  # refuses another path before torch is imported
    machine = given_options(device=device, backend=backend)
    if print_config:
        _show_settings(given | machine, as_json=as_json)
        return
    if plot is not None:
        check_file(plot, "--plot", PICTURES)
    rank, processes, *_ = this_process()
    ternary = trains_ternary(given.get("preset", "tiny"), given.get("weights"))
    if processes > 1 and ternary and resume is None:
        given.setdefault("wire", "int12")
    alone = rank == 0  # in showing anything
    advises = minutes is None and resume is None
    with RunDisplay(
        quiet=quiet or not alone, as_json=as_json and alone, advises=advises
    ) as display:
        display.wait("loading")
        from arbcli.inspect import plots, room  # torch takes seconds, so not for `arb --help`
        from arbcli.train.configure import new_config
        from arbcli.train.run import Observers, resume_run, start_run

        if plot is not None:
            plots.require_matplotlib()
        loggers = [find_logger(name, display.noted) for name in dict.fromkeys(log or ())]
        # the display has all that an observer has; to inherit it would be to import torch
        observer = Observers([display, *loggers])  # type: ignore[list-item]
        if resume is None and ternary:
            _leave_busy_processors(device, display)
        if resume is not None:
            report = resume_run(
                run, observer, device=device, backend=backend, steps=steps, profile=profile
            )
        else:
            initial = None if init_from is None else _read_initial(init_from, given, display)
            hint = f"{room.HINT}, or `--force` to try it"
            report = start_run(
                new_config(**given | machine),
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


def _check_shares(accum: int, processes: int, device: str | None) -> None:
    if accum % processes and device is None and not may_have_gpu():
        raise ArbError(
            f"there is no GPU for `--gpus {processes}`",
            hint=f"leave it out, or add `--device cpu --accum {processes}` for the CPU",
        )
    if accum % processes:
        raise ArbError(
            f"`--accum` is {accum}, which {processes} processes cannot share evenly",
            hint=f"use a multiple of {processes}",
        )


def _pin(device: str | None) -> None:
    place = this_process()  # before torch counts the processors
    number, cpus = pin_to_socket(place.local_rank, on_cpu=device == "cpu")
    if place.rank == 0:
        note(f"threads stay on socket {number}, on {len(cpus)} processors")


def _leave_busy_processors(device: str | None, display: RunDisplay) -> None:
    """Have fewer threads compute on a CPU that other programs use, too, and say so."""
    import torch

    if not is_for_cpu(device):
        return
    usual = torch.get_num_threads()
    threads = free_threads(usual, os.cpu_count() or 1)
    if threads < usual:
        torch.set_num_threads(threads)
        display.noted(f"other programs are running: computing with {threads} of {usual} threads")


def _with_files(
    given: dict[str, Any], config_file: Path | None, init_from: Path | None
) -> dict[str, Any]:
    """Add the settings of the files that options name."""
    if init_from is None:
        given = with_model_file(given)
    if config_file is not None:
        given = read_settings(config_file) | given
    if init_from is not None:
        _refuse_shapes(given)
    return given


def _check_new(given: dict[str, Any], init_from: Path | None, out: Path | None) -> None:
    """Refuse a new run that cannot start, before torch is imported."""
    if init_from is None:
        check_settings(given)
    else:
        find_run(init_from, loads=True)
        check_texts(given)
    if out is not None:
        run_files.check_free(out)
        check_folder(out, "--out")


def _read_initial(path: Path, given: dict[str, Any], display: RunDisplay) -> "SavedModel":
    """Read a saved model to start from, and add its configuration and tokenizer to the settings."""
    from arbcli.infer.load import read_saved, saved_config
    from arbcli.infer.tokens import FILE, saved_tokenizer

    initial = read_saved(path, display.noted)
    given["preset"] = saved = saved_config(initial.checkpoint)
    if saved_tokenizer(*initial, saved):
        given.setdefault("tokenizer", str(initial.path.with_name(FILE)))
    if saved.digits != "trit" and (initial.path.parent / run_files.COMPANIONS).exists():
        given.setdefault("lr", LR_OF_TUNING)
    return initial


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
        options = ", ".join(dict.fromkeys(f"`{option_of(field)}`" for field in given))
        raise ArbError(
            f"a run goes on with its own settings, so {options} cannot be given to it",
            hint="leave them out, or start a new run without `--resume`",
        )


def _refuse_kept(given: dict[str, Any]) -> None:
    if given:
        options = ", ".join(dict.fromkeys(f"`{option_of(field)}`" for field in given))
        raise ArbError(
            f"`--no-save` leaves no run, so {options} cannot be given with it",
            hint="leave one or the other out",
        )


def _refuse_shapes(given: dict[str, Any]) -> None:
    kept = {name for name in given if name in (*KEPT, "preset", "model_file")}
    kept -= {"weights"} if given.get("weights") == "ternary" else set()
    if own := [f"`{option_of(name)}`" for name in given if name in kept]:
        raise ArbError(
            f"a saved model keeps its own settings, so {', '.join(own)} cannot be given to it",
            hint="leave them out, or start without `--init-from`",
        )
