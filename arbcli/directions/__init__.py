"""Directions: from the gradient of a matrix to a step of unit root-mean-square. One file each.

To add a direction, write its file and add its name here. A name is known without importing torch.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arbcli.directions.base import Direction

DIRECTIONS = ("orthogonal", "factored", "sign")
"""Names of directions, each that of its file here, which defines `DIRECTION`."""


@cache
def find_direction(name: str) -> "Direction":
    """Load the direction of a name in `DIRECTIONS`."""
    return import_module(f"arbcli.directions.{name}").DIRECTION
