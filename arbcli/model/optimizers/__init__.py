"""Directions, which convert gradients of matrices to steps of unit root-mean-square; one file each.

To add a direction, write its file and add its name here. Names are available without torch.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arbcli.model.optimizers.base import Direction

DIRECTIONS = ("orthogonal", "factored", "sign")
"""Names of directions; the module of the same name here defines `DIRECTION`."""


@cache
def find_direction(name: str) -> "Direction":
    """Load a direction by its name in `DIRECTIONS`."""
    return import_module(f"arbcli.model.optimizers.{name}").DIRECTION
