"""The `arb` program: registers the commands and turns errors into exit codes."""

import errno
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

from arbcli.base.environment import keep_compiled_modules, set_environment, set_spins
from arbcli.base.errors import ArbError
from arbcli.base.output import OutputError, note_text, open_closed_streams
from arbcli.base.signals import STOPPED_UNSAVED, Interrupted, RaisedSignal
from arbcli.commands._help import Command, summary
from arbcli.commands._options import fill_options, rename_options, repeat_options, replace_fields
from arbcli.commands._processes import check_shared
from arbcli.commands.audit_memory import audit_memory
from arbcli.commands.check import check
from arbcli.commands.compare import compare
from arbcli.commands.count_params import count_params
from arbcli.commands.evaluate import evaluate
from arbcli.commands.export import export
from arbcli.commands.generate import generate
from arbcli.commands.import_model import import_model
from arbcli.commands.inspect import inspect
from arbcli.commands.probe_loss import probe_loss
from arbcli.commands.serve import serve
from arbcli.commands.train import train
from arbcli.commands.verify_kernels import verify_kernels
from arbcli.training.parallel.launch import fail_lost, fail_once
from arbcli.training.parallel.process import LostProcess
from arbcli.version import __version__

UsageError: Any
(UsageError,) = typer.BadParameter.__bases__  # typer itself does not export it

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every command too
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would swallow `[default: ...]`
    epilog="Exit codes: 0 done, 1 a check failed, 2 could not run, 129, 130 or 143 stopped by a"
    " signal with the state saved, 3 stopped by a signal with nothing saved.",
)
for command in (
    train, generate, serve, evaluate, import_model, export, check, inspect, compare, audit_memory,
    verify_kernels, count_params, probe_loss,
):  # fmt: skip
    name = "import" if command is import_model else None  # `import` is a keyword of Python
    app.command(name, cls=Command, short_help=summary(command))(command)


OTHER_NAMES = {
    "--learning-rate": "--lr", "--learning_rate": "--lr", "--batch-size": "--batch",
    "--context": "--ctx", "--context-length": "--ctx", "--seq-len": "--ctx",
    "--block-size": "--ctx", "--max-steps": "--steps", "--iters": "--steps",
    "--gradient-accumulation-steps": "--accum", "--grad-accum": "--accum", "--dataset": "--data",
    "--output-dir": "--out", "--max-tokens": "--length", "--max-new-tokens": "--length",
    "--num-tokens": "--length", "--n-predict": "--length", "--temp": "--temperature",
    "--hidden-size": "--dim", "--n-embd": "--dim", "--dtype": "--compute",
}  # fmt: skip
"""Options by the names that they have in other programs."""


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"arb {__version__}")
        raise typer.Exit


_VERSION = typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit.")


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, _VERSION] = False,
) -> None:
    """Train language models whose whole persistent state is packed trits and int8."""
    if context.invoked_subcommand:
        check_shared(context.invoked_subcommand)
        if context.invoked_subcommand != "train":
            set_spins()


def main() -> None:
    """Run `arb` and exit with one of the codes that `arb --help` lists."""
    open_closed_streams()
    warnings.formatwarning = _one_line_warning
    keep_compiled_modules()
    set_environment(spins=False)
    try:
        with RaisedSignal():
            args = fill_options(repeat_options(rename_options(sys.argv[1:])))
            sys.exit(app(args, standalone_mode=False) or 0)
    except UsageError as error:
        if not sys.argv[1:]:
            error.show()  # the complete help page
        else:
            fail_once(error.format_message(), _usage_hint(error))
        sys.exit(2)
    except Interrupted as stopped:
        since = " since the start or the last save" if sys.argv[1:2] == ["train"] else ""
        fail_once(f"stopped by {stopped.name}, with nothing saved{since}")
        sys.exit(STOPPED_UNSAVED)
    except OutputError as error:
        if not error.reader_gone:
            fail_once(str(error), error.hint)
        sys.exit(2)
    except ArbError as error:
        hint = error.hint and replace_fields(error.hint, error.fields)
        print_error = fail_lost if isinstance(error, LostProcess) else fail_once
        print_error(replace_fields(str(error), error.fields), hint)
        sys.exit(2)
    except Exception as error:
        path = getattr(error, "filename", None)
        if isinstance(error, OSError) and (path is not None or error.errno == errno.ENOSPC):
            name = "stdout" if path is None else f"`{path}`"  # of a help page
            fail_once(f"cannot use {name}: {error.strerror}", "check the path and permissions")
        else:
            note_text(traceback.format_exc())
        sys.exit(2)


def _one_line_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    """Format a warning without the place in the code, which says nothing to a user."""
    return f"warning: {' '.join(str(message).split())}\n"


def _usage_hint(error: Any) -> str:
    """Return the hint for a mistake in arguments."""
    command = error.ctx.command_path if error.ctx else "arb"
    option = OTHER_NAMES.get(getattr(error, "option_name", ""))
    if option and any(option in param.opts for param in error.ctx.command.params):
        return f"use `{option}`"
    if command.endswith("train") and "unexpected extra argument" in error.format_message():
        return "name texts with `--data`, as in `arb train --data book.txt`"
    return f"`{command} --help` lists what there is"
