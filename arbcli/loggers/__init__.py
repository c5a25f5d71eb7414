"""Programs that draw the figures of a run, one file each: `arb train --log NAME`."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

from arbcli.errors import ArbError

if TYPE_CHECKING:
    from arbcli.loggers.base import Logger

LOGGERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""The package that each needs; its file here has the name of the logger, and a class `Logger`."""


def check_logger(name: str) -> None:
    """Refuse a logger that is unknown, or whose package is missing; imports none.

    Raises:
        ArbError: it is refused.
    """
    if name not in LOGGERS:
        known = ", ".join(f"`{logger}`" for logger in LOGGERS)
        raise ArbError(f"no logger is named `{name}`", hint=f"choose one of: {known}")
    package = LOGGERS[name]
    if importlib.util.find_spec(package) is None:
        raise ArbError(
            f"`--log {name}` needs the package {package}",
            hint=f"install it: `pip install {package}`",
        )


def find_logger(name: str, tell: Callable[[str], None]) -> "Logger":
    """Make the logger of this name; torch and its package are imported only now.

    Args:
        name: one of `LOGGERS`.
        tell: is told of a failure, which ends the logging and not the run.

    Raises:
        ArbError: it is unknown, or its package is missing or cannot be imported.
    """
    check_logger(name)
    try:
        return importlib.import_module(f"arbcli.loggers.{name}_log").Logger(tell)
    except ImportError as error:
        raise ArbError(
            f"`--log {name}` cannot be used: {error}",
            hint=f"install it again: `pip install --upgrade {LOGGERS[name]}`",
        ) from None
