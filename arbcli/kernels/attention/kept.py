"""Keys and values of the last positions, before they are stored in a ring."""

from typing import NamedTuple

from torch import Tensor


class Kept(NamedTuple):
    """Rings of one attention layer, and the new vectors that may be stored in them."""

    keys: Tensor
    """(heads, W, d)."""
    values: Tensor
    new: Tensor
    """(2, M, heads, d)."""
