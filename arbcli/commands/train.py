"""`arb train`: train a model, or continue a run."""

import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbcli.base import run_files
from arbcli.base.environment import free_threads, may_have_gpu, set_spins, uses_cpu
from arbcli.base.errors import ArbError, shell_word
from arbcli.base.output import LiveLine, emit_json, note, write_bytes
from arbcli.base.signals import STOPPED_UNSAVED, exit_code
from arbcli.base.sockets import pin_to_socket
from arbcli.commands import _options as opt
from arbcli.commands._help import combining
from arbcli.commands._outputs import PICTURES, check_file, check_folder
from arbcli.commands._processes import start_processes, this_process
from arbcli.commands._run_display import RunDisplay
from arbcli.commands.check import print_check
from arbcli.config.file import read_settings, settings_text
from arbcli.config.initial import is_kept
from arbcli.config.settings import OPTIMISATION, OUTPUT, RUN
from arbcli.config.training import (
    CHANGEABLE,
    RUN_SETTINGS,
    TrainConfig,
    train_config_dict,
    trains_ternary,
)
from arbcli.loggers import LOGGERS, check_logger, create_logger
from arbcli.model.rules import LR_OF_FADING_TUNING, LR_OF_TUNING
from arbcli.training.observer import Observers

if TYPE_CHECKING:
    from arbcli.data.text import Texts
    from arbcli.generation.load import SavedModel

MACHINE = "device", "backend", "compute"
"""Settings whose defaults depend on the machine."""


def _check_loggers(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        check_logger(name)
    return names


EXCLUDED = {
    "--no-save": (
        "--save-every", "--keep", "--keep-best", "--out", "--resume", "--plot", "--log",
        "--profile",
    ),
    "--resume": ("--print-config", "--show-windows"),
    "--print-config": ("--init-from",),
    "--minutes": ("--steps",),
}  # fmt: skip
"""Options that cannot be combined with another one."""


_MINUTES = typer.Option(
    min=0.01,
    help="Training time instead of --steps; their number follows from timing a few.",
    rich_help_panel=OPTIMISATION,
)
_INIT_FROM = typer.Option(
    metavar="RUN|FILE",
    help="Start a new run from the weights of a saved model. Without --batch and --accum, a"
    " step that fits into memory is chosen.",
    rich_help_panel=OPTIMISATION,
)
_CONFIG_FILE = typer.Option(
    "--config", help="Settings as TOML, or a run's config.json. Options override them."
)
_OUT = typer.Option(
    help="Directory to create. With --resume auto: the folder of the runs. [default: the"
    " next free one in runs/]"
)
_RESUME = typer.Option(metavar="auto|PATH", help="Continue the last run, or the given one.")
_GPUS = typer.Option(
    min=1,
    help="Number of processes to start, one for each GPU. --accum must be a multiple of it."
    " [default: 1]",
)
_PIN = typer.Option("--pin", help="Pin the threads to one CPU socket, if there are several.")
_PLOT = typer.Option(help="Plot the losses: .png, .pdf or .svg.", rich_help_panel=OUTPUT)
_LOG = typer.Option(
    metavar="LOGGER",
    help=f"Log metrics to {', '.join(LOGGERS)}. Repeat it for several.",
    callback=_check_loggers,
    rich_help_panel=OUTPUT,
)
_PROFILE = typer.Option(
    min=1,
    metavar="[N]",
    help=f"Trace N steps with torch's profiler. [default of N: {opt.OPTIONAL['--profile']}]",
    rich_help_panel=OUTPUT,
)
_FORCE = typer.Option("--force", help="Start even if the predicted memory does not fit.")
_DRY_RUN = typer.Option(
    "--dry-run", help="With --resume: only print what it would do, as arb check does."
)
_SHOW_WINDOWS = typer.Option(
    "--show-windows",
    metavar="N",
    min=1,
    help="Print the first N windows of a new run, with learned text in [[ ]], and exit.",
)


@combining(EXCLUDED, {"--dry-run": "--resume"})
@opt.takes_settings(
    *RUN_SETTINGS, "weights", rare=("pin", "profile", "force", "dry_run", "backend"), heading=RUN
)
def train(
    minutes: Annotated[float | None, _MINUTES] = None,
    init_from: Annotated[Path | None, _INIT_FROM] = None,
    config_file: Annotated[Path | None, _CONFIG_FILE] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the settings as TOML instead of training.")
    ] = False,
    out: Annotated[Path | None, _OUT] = None,
    resume: Annotated[str | None, _RESUME] = None,
    no_save: Annotated[
        bool,
        typer.Option("--no-save", help="Write no files: no run directory, checkpoints or records."),
    ] = False,
    gpus: Annotated[int | None, _GPUS] = None,
    device: opt.Device = None,
    backend: opt.Backend = None,
    pin: Annotated[bool, _PIN] = False,
    plot: Annotated[Path | None, _PLOT] = None,
    log: Annotated[list[str] | None, _LOG] = None,
    profile: Annotated[int | None, _PROFILE] = None,
    force: Annotated[bool, _FORCE] = False,
    dry_run: Annotated[bool, _DRY_RUN] = False,
    show_windows: Annotated[int | None, _SHOW_WINDOWS] = None,
    quiet: opt.Quiet = False,
    as_json: opt.Json = False,
    **settings: Any,
) -> None:
    """Train a model on bytes, or continue a run: `arb train --ctx 64`."""
    settings = opt.given_options(**settings)
    trains = not (dry_run or print_config or show_windows)
    if gpus is not None and trains:
        if resume is None and config_file is None:
            chosen = gpus if _chooses_step(settings, init_from) else 1
            _check_shares(settings.get("accum", chosen), gpus, device)
        start_processes(gpus)
    if pin and trains:
        _pin(device)
    if resume is None:
        settings = _new_settings(settings, config_file, init_from, out)
    else:
        fixed = {name: value for name, value in settings.items() if name not in CHANGEABLE}
        fixed |= opt.given_options(minutes=minutes, init_from=init_from, config=config_file)
        _refuse_changes(fixed)
        if out is not None and resume != "auto":
            raise ArbError(
                "`--out` names the folder of the runs for `--resume auto`, and a run was named",
                "leave `--out` out: a run is continued where it is",
            )
        if dry_run:
            settings |= {"processes": gpus or 1, "machine": (device, backend)}
            raise typer.Exit(print_check(Path(resume), settings, as_json=as_json, root=out))
        latest = resume == "auto"
        run = run_files.latest_run(out or run_files.RUNS) if latest else opt.find_run(Path(resume))
        run_files.require_run(run)  # refuses an invalid path before torch is imported
    machine = opt.given_options(device=device, backend=backend)
    if print_config:
        _show_settings(settings | machine, as_json=as_json)
        return
    if show_windows is not None:
        _show_windows(settings | machine, init_from, show_windows, gpus or 1, as_json=as_json)
        return
    if plot is not None:
        check_file(plot, "--plot", PICTURES)
    rank, processes, *_ = this_process()
    source = init_from if resume is None else run
    ternary = trains_ternary(settings.get("preset", "tiny"), settings.get("weights"))
    ternary = ternary and not (source and run_files.is_baseline(source))
    if ternary:
        set_spins(yields=True)
    is_first = rank == 0  # only this process prints
    advises = minutes is None and resume is None
    with RunDisplay(quiet=quiet, as_json=as_json, advises=advises, is_first=is_first) as display:
        display.wait("loading")
        from arbcli.inspect import plots, room  # imports torch: not needed for `arb --help`
        from arbcli.training.configure import new_config
        from arbcli.training.resume import resume_run
        from arbcli.training.run import start_run

        if plot is not None:
            plots.require_matplotlib()
        loggers = [create_logger(name, display.noted) for name in dict.fromkeys(log or ())]
        observer = Observers([display, *loggers])
        remedy = room.HINT if resume is None else "use `--recompute` or a larger machine"
        hint = f"{remedy}, or `--force` to try it"
        check = partial(room.check_memory, hint=hint) if not force else lambda _: None
        if resume is None and ternary:
            _reduce_threads(device, display)
        if resume is not None:
            report = resume_run(run, observer, **machine, profile=profile, check=check, **settings)
        else:
            initial = None if init_from is None else _read_initial(init_from, settings, display)
            chooses = _chooses_step(settings, init_from)
            sums = settings.get("reduce_dtype") != "none"
            fades = settings.get("digits") == "fade"
            sets_steps = minutes is None and "steps" not in settings and not fades
            choose = partial(_choose_step, display, sums=sums, sets_steps=sets_steps)
            choices = {"choose": choose} if chooses else {}
            report = start_run(
                new_config(**settings | machine, processes=processes),
                out,
                observer,
                minutes=minutes,
                initial=initial,
                profile=profile,
                check=check,
                **choices,
                save=not no_save,
            )
    if not is_first:  # only the first process may fail, as the launcher then ends all others
        return
    display.finished(report)
    if report.stopped_by and report.checkpoint:
        options: list[tuple[str, object]] = [("gpus", gpus), ("plot", plot)]
        options += [("log", name) for name in log or ()]
        if resume is not None:  # a new run records device and backend
            options += machine.items()
        words = " --pin" * pin
        words += "".join(f" --{name} {shell_word(value)}" for name, value in options if value)
        where = "" if gpus or processes == 1 else f" in {processes} processes"
        note(f"continue{where} with: arb train --resume {shell_word(report.run)}{words}")
    if plot is not None and report.run is not None and report.steps:
        plots.plot_training(Path(report.run), plot)
    if report.stopped_by:
        raise typer.Exit(exit_code(report.stopped_by) if report.checkpoint else STOPPED_UNSAVED)


def _check_shares(accum: int, processes: int, device: str | None) -> None:
    if accum % processes and device is None and not may_have_gpu():
        raise ArbError(
            f"there is no GPU for `--gpus {processes}`",
            f"leave it out, or add `--device cpu --accum {processes}` for the CPU",
        )
    if accum % processes:
        raise ArbError(
            f"`--accum` is {accum}, which {processes} processes cannot share evenly",
            f"use a multiple of {processes}",
        )


def _pin(device: str | None) -> None:
    process = this_process()  # before torch counts the processors
    number, cpus = pin_to_socket(process.local_rank, uses_cpu=device == "cpu")
    if process.rank == 0:
        note(f"threads stay on socket {number}, on {len(cpus)} processors")


def _reduce_threads(device: str | None, display: RunDisplay) -> None:
    """Compute with fewer threads while other programs use the CPU, and print a note."""
    import torch

    if not uses_cpu(device):
        return
    default = torch.get_num_threads()
    threads = free_threads(default, os.cpu_count() or 1)
    if threads < default:
        torch.set_num_threads(threads)
        display.noted(f"other programs are running: computing with {threads} of {default} threads")


def _new_settings(
    settings: dict[str, Any], config_file: Path | None, init_from: Path | None, out: Path | None
) -> dict[str, Any]:
    """Add the settings of `--model` and `--config`, and check them before torch is imported."""
    if init_from is None:
        settings = opt.expand_model_file(settings)
    if config_file is not None:
        settings = read_settings(config_file) | settings
    if init_from is None:
        opt.check_settings(settings)
    else:
        _refuse_model_settings(settings)
        opt.find_run(init_from, loads=True)
        opt.check_texts(settings)
    if out is not None:
        run_files.check_free(out)
        check_folder(out, "--out")
    return settings


def _read_initial(path: Path, settings: dict[str, Any], display: RunDisplay) -> "SavedModel":
    """Read the initial model, and add its configuration and tokenizer to the settings."""
    from arbcli.generation.load import read_saved, saved_config
    from arbcli.generation.tokens import saved_tokenizer

    initial = read_saved(path, display.noted)
    saved = saved_config(initial.checkpoint)
    if settings.setdefault("preset", saved) != saved:
        raise ArbError(
            f"the file of `--config` has another model than `{initial.path}`",
            "leave the table `model` out of it, or start without `--init-from`",
        )
    if saved_tokenizer(*initial, saved):
        settings.setdefault("tokenizer", str(initial.path.with_name(run_files.TOKENIZER)))
    imported = (initial.path.parent / run_files.COMPANIONS).exists()
    if imported:
        from arbcli.inspect.recipe import tuning_context

        settings.setdefault("ctx", tuning_context(saved))
    if saved.digits != "trit" and imported:
        fades = settings.get("digits") == "fade"
        settings.setdefault("lr", LR_OF_FADING_TUNING if fades else LR_OF_TUNING)
        if fades and initial.checkpoint.step == 0:
            settings.setdefault("direction", "orthogonal")
    return initial


def _chooses_step(settings: dict[str, Any], init_from: Path | None) -> bool:
    """Return whether the number of windows per step is chosen automatically."""
    return init_from is not None and not {"batch", "accum"} & settings.keys()


def _choose_step(
    display: RunDisplay,
    config: TrainConfig,
    texts: "Texts",
    processes: int = 1,
    *,
    sums: bool = True,
    sets_steps: bool = False,
) -> dict[str, Any]:
    """Choose the number of windows per step, print a note, and return the settings.

    See `arbcli.inspect.recipe.choose_step`. With `sets_steps`, a short text is read for at most
    `EPOCHS` passes. For a float baseline, whose memory is not predicted, nothing is chosen.

    Raises:
        ArbError: no window fits into the memory.
    """
    if config.model.weights != "ternary":
        return {}
    import torch

    from arbcli.inspect.recipe import EPOCHS, choose_step, usable_bytes

    budget = usable_bytes(torch.device(config.device), processes)
    size = texts.train.pass_symbols
    recipe = choose_step(
        config, budget, text_tokens=size, processes=processes, sums=sums, progress=display.wait
    )
    if recipe is None:
        raise ArbError(
            f"no window of {config.model.ctx:,} tokens fits into {budget / 2**30:.2f} GiB",
            "use a smaller `--ctx`, `arb import --rule nibble`, or `--batch 1` to try it",
        )
    settings = {name: getattr(recipe, name) for name in ("batch", "accum", "recompute")}
    settings["reduce_dtype"], options = recipe.reduce_dtype, recipe.options
    step_tokens = recipe.ctx * recipe.batch * recipe.accum
    if sets_steps and EPOCHS * size < config.steps * step_tokens:
        settings["steps"] = max(1, round(EPOCHS * size / step_tokens))
        options += f" --steps {settings['steps']}"
    display.noted(f"chosen: {options} ({recipe.summary})")
    return settings


def _show_settings(settings: dict[str, Any], *, as_json: bool) -> None:
    """Print the settings of a run, without those whose defaults depend on the machine."""
    with LiveLine("loading"):
        from arbcli.training.configure import new_config  # torch takes seconds to import

        config = new_config(**settings)
    omitted = [name for name in MACHINE if name not in settings]
    if as_json:
        values = train_config_dict(config)
        emit_json({name: value for name, value in values.items() if name not in omitted})
    else:
        write_bytes(settings_text(config, omitted).encode())


def _show_windows(
    settings: dict[str, Any], init_from: Path | None, number: int, processes: int, *, as_json: bool
) -> None:
    """Print the first windows of a run, with the text that contributes to the loss marked."""
    with RunDisplay(quiet=False, as_json=False) as display:
        display.wait("loading")
        from arbcli.training.configure import new_config  # torch takes seconds to import
        from arbcli.training.directory import open_run_texts
        from arbcli.training.windows import first_windows

        if init_from is not None:
            _read_initial(init_from, settings, display)
        config = new_config(**settings)
        texts = open_run_texts(config)
        if _chooses_step(settings, init_from):
            config = replace(config, **_choose_step(display, config, texts, processes))
        windows = list(first_windows(config, texts, number))
    for index, window in enumerate(windows, 1):
        if as_json:
            emit_json({"window": index, "learnt": window.learnt, **asdict(window)})
            continue
        documents = (
            "".join(f"[[{run.text}]]" if run.learnt else run.text for run in runs)
            for runs in window.documents
        )
        heading = f"window {index}: {window.learnt:,} of {config.model.ctx:,} positions are learned"
        write_bytes("\n".join([heading, *documents, ""]).encode())


def _refuse_changes(settings: dict[str, Any]) -> None:
    if settings:
        raise ArbError(
            f"{opt.quoted_options(settings)} cannot be changed when resuming",
            f"leave {'it' if len(settings) == 1 else 'them'} out, or start a new run without"
            " `--resume`",
        )


def _refuse_model_settings(settings: dict[str, Any]) -> None:
    refused = [name for name in settings if name in ("model_file", "fields") or is_kept(name)]
    if isinstance(settings.get("preset"), str):  # in a run's `config.json` it is a complete model
        refused.append("preset")
    if settings.get("weights") == "ternary":
        refused.remove("weights")
    opt.refuse_kept(refused, "start without `--init-from`")
