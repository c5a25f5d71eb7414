"""The `arb` program: registers the commands and turns errors into exit codes."""

import os
import sys
import traceback
from typing import Annotated

import typer

from arbcli import __version__
from arbcli.commands._options import in_options
from arbcli.commands.audit_memory import audit_memory
from arbcli.commands.count_params import count_params
from arbcli.commands.evaluate import evaluate
from arbcli.commands.generate import generate
from arbcli.commands.probe_loss import probe_loss
from arbcli.commands.train import train
from arbcli.commands.verify_kernels import verify_kernels
from arbcli.environment import set_environment
from arbcli.errors import ArbError
from arbcli.output import fail

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would swallow `[default: ...]`
    epilog="Exit codes: 0 done, 1 a check failed, 2 could not run, 130 or 143 stopped by a signal"
    " with the state saved.",
)
for command in (
    train, generate, evaluate, audit_memory, verify_kernels, count_params, probe_loss
):  # fmt: skip
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"arb {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """Train language models whose whole persistent state is packed trits and int8."""


def main() -> None:
    """Run `arb`. Exit 0: done. 1: a check failed. 2: it could not run. 130, 143: a signal."""
    set_environment(sys.argv[1:])
    try:
        app()
    except ArbError as error:
        hint = error.hint and in_options(error.hint, error.fields)
        fail(in_options(str(error), error.fields), hint)
        sys.exit(2)
    except BrokenPipeError:  # whoever read stdout has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(2)
