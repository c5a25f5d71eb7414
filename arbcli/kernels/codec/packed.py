"""Packed matrix, the weight format of kernels: five trits per byte, and two digits per scale."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import INT8, UINT8, Array, Number, compiled_check

OCTAVE = 128
"""Steps of v = 128 E + F per doubling of the scale."""
LOWEST_EXPONENT, HIGHEST_EXPONENT = -96, 31
"""Range of E, at which v saturates."""


class Packed(NamedTuple):
    """A matrix of N rows by K weights, with one scale for every G consecutive weights of a row."""

    trits: Tensor
    """(N, row_bytes(K)) uint8, in 0..242."""
    exponent: Tensor
    """(N, ceil(K / G)) int8, E in -96..31."""
    fraction: Tensor | None
    """(N, ceil(K / G)) int8, F in 0..127; None stands for zeros."""
    in_features: int
    """K, the number of weights per row."""
    group_size: int
    """G, the number of weights per scale."""
    remainder: Tensor | None = None
    """(N, K) int8, A: the remainder of int8 weights z = T * P + A; None if weights are trits."""
    radix: int = 1
    """Value of a trit, in units of 1 / `unit`: P, unless weights are annealed."""
    low: int = 1
    """Value of one unit of the remainder, in units of 1 / `unit`."""
    nibble: bool = False
    """Whether the remainder is stored in the low four bits of each byte."""

    @property
    def out_features(self) -> int:
        """N, the number of rows."""
        return self.trits.shape[0]

    @property
    def num_groups(self) -> int:
        """Number of scales per row."""
        return num_groups(self.in_features, self.group_size)

    def above(self, other: "Packed") -> "Packed":
        """Concatenate this matrix and another one of the same format along rows."""

        def both(mine: Tensor | None, others: Tensor | None) -> Tensor | None:
            return None if mine is None or others is None else torch.cat((mine, others))

        return self._replace(
            trits=torch.cat((self.trits, other.trits)),
            exponent=torch.cat((self.exponent, other.exponent)),
            fraction=both(self.fraction, other.fraction),
            remainder=both(self.remainder, other.remainder),
        )

    def check(self) -> None:
        """Check that shapes and dtypes of the tensors match.

        Raises:
            ValueError: a dtype or a shape does not fit.
        """
        _check_parts(*self)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Packed":
        """Apply a function, such as a selection of rows, to each of the tensors."""
        return self._replace(
            trits=function(self.trits),
            exponent=function(self.exponent),
            fraction=None if self.fraction is None else function(self.fraction),
            remainder=None if self.remainder is None else function(self.remainder),
        )

    def rows(self, index: slice | Tensor) -> "Packed":
        """Select rows: a view for a slice, a copy for (R,) int64 row indices."""
        return self.map(lambda part: part[index])

    def to(self, device: torch.device) -> "Packed":
        """Move the tensors to a device."""
        return self.map(lambda part: part.to(device))

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Kernel arguments packed_ptr, exponent_ptr and fraction_ptr; None is never read."""
        return self.trits, self.exponent, self._fraction_or_any

    @property
    def strides(self) -> tuple[int, ...]:
        """Kernel arguments stride_pn, stride_pb, stride_en, stride_eg, stride_fn, stride_fg."""
        return (*self.trits.stride(), *self.exponent.stride(), *self._fraction_or_any.stride())

    @property
    def constants(self) -> dict[str, Any]:
        """Constants that a kernel is compiled for."""
        return {"GROUP": self.group_size, "HAS_FRACTION": self.fraction is not None}

    @property
    def unit(self) -> int:
        """U, the divisor of z of int8 weights."""
        return unit_of(self.radix)

    @property
    def all_pointers(self) -> tuple[Tensor, ...]:
        """`pointers`, and remainder_ptr of kernels that read int8 weights."""
        return (*self.pointers, self.trits if self.remainder is None else self.remainder)

    @property
    def all_strides(self) -> tuple[int, ...]:
        """`strides`, and stride_an, stride_ak of kernels that read int8 weights."""
        return (*self.strides, *((0, 0) if self.remainder is None else self.remainder.stride()))

    @property
    def worths(self) -> tuple[float, float]:
        """Kernel arguments of_trit and of_low: the values of T and A in units of the scale."""
        return self.radix / self.unit, self.low / self.unit

    @property
    def all_constants(self) -> dict[str, Any]:
        """`constants`, and INT8, whether products read the remainder, and NIBBLE."""
        return self.constants | {"INT8": self.remainder is not None, "NIBBLE": self.nibble}

    @property
    def _fraction_or_any(self) -> Tensor:
        return self.exponent if self.fraction is None else self.fraction


_DIGITS = Array("N, -(-in_features // group_size)", INT8)
_check_parts = compiled_check(
    "packed matrix",
    {
        "trits": Array("N, row_bytes(in_features)", UINT8), "exponent": _DIGITS,
        "fraction": replace(_DIGITS, optional=True), "in_features": Number(),
        "group_size": Number(), "remainder": Array("N, in_features", INT8, optional=True),
        "radix": Number(), "low": Number(), "nibble": Number(),
    },
)  # fmt: skip


def unit_of(radix: int) -> int:
    """Compute the unit of z from P, the radix: the next power of two."""
    return 1 << (radix - 1).bit_length()


def num_groups(in_features: int, group_size: int) -> int:
    """Count the groups of a row of `in_features` weights; the last one may be short."""
    return -(-in_features // group_size)
