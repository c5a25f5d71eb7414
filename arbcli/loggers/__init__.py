"""Loggers for experiment trackers, one file each: `arb train --log NAME`."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from arbcli.base.errors import ArbError, library_errors, quoted

if TYPE_CHECKING:
    from arbcli.loggers.base import Logger

LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
"""Packages by name of the logger; the module `NAME_log` of this package has its class `Logger`."""


def check_logger(name: str) -> None:
    """Check that a logger exists and its package is installed, without importing it.

    Raises:
        ArbError: the logger is unknown, or its package is missing.
    """
    if name not in LOGGERS:
        raise ArbError(f"no logger is named `{name}`", f"choose one of: {quoted(LOGGERS)}")
    package = LOGGERS[name]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # without origin: a folder of that name, as wandb's
        raise ArbError(
            f"`--log {name}` needs the package {package}", f"install it: `pip install {package}`"
        )


def create_logger(name: str, notify: Callable[[str], None]) -> "Logger":
    """Create a logger; torch and the logger's package are imported here.

    Args:
        name: one of `LOGGERS`.
        notify: called with a message if logging fails, which does not end the run.

    Raises:
        ArbError: the logger is unknown, or its package is missing or cannot be imported.
    """
    check_logger(name)
    hint = f"install it again: `pip install --upgrade {LOGGERS[name]}`"
    with library_errors(f"`--log {name}` cannot be used", hint, also=(OSError,)):
        return importlib.import_module(f"arbcli.loggers.{name}_log").Logger(notify)
