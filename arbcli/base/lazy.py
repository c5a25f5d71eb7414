"""Classes and functions that are named in words and imported on first use."""

from importlib import import_module
from typing import Any


def imported(name: str) -> Any:
    """Import an attribute of a module.

    Args:
        name: `module:attribute`, for example `arbcli.model.parts.mlp:MLP`.
    """
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
