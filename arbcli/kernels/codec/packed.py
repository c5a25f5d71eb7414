"""Packed matrix, the weight format of kernels: five trits per byte, and two digits per scale.

The scale of a group is 2**(v / 128), v = 128 E + F, built from the two digits E and F. E is the
exponent field of a float, F one of 128 mantissas, all at least 0.005 of a bf16 step away from a
rounding boundary: rounded to bf16, no implementation of exp2 can land on another one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import compiled_check, declared

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

    def stack(self, other: "Packed") -> "Packed":
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
        """Kernel arguments trit_unit and low_unit: the values of T and A in units of the scale."""
        return self.radix / self.unit, self.low / self.unit

    @property
    def all_constants(self) -> dict[str, Any]:
        """`constants`, and INT8, whether products read the remainder, and NIBBLE."""
        return self.constants | {"INT8": self.remainder is not None, "NIBBLE": self.nibble}

    @property
    def _fraction_or_any(self) -> Tensor:
        return self.exponent if self.fraction is None else self.fraction


_check_parts = compiled_check(
    "packed matrix",
    declared(
        "trits: uint8[N, row_bytes(in_features)]; exponent: int8[N, -(-in_features // "
        "group_size)]; fraction: int8[N, -(-in_features // group_size)]?; in_features; group_size; "
        "remainder: int8[N, in_features]?; radix; low; nibble"
    ),
)


def unit_of(radix: int) -> int:
    """Compute the unit of z from P, the radix: the next power of two."""
    return 1 << (radix - 1).bit_length()


def num_groups(in_features: int, group_size: int) -> int:
    """Count the groups of a row of `in_features` weights; the last one may be short."""
    return -(-in_features // group_size)


_FRACTIONS = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.int8)
ROOTS = torch.exp2(_FRACTIONS / OCTAVE).bfloat16().float().view(torch.int32)
"""2**(F / 128) rounded to bf16, as the bits of a float32; F is counted as an unsigned byte."""


def scales_torch(exponent: Tensor, fraction: Tensor | None) -> Tensor:
    """Build (N, groups) float32 scales, each exactly representable in bf16, from E and F."""
    if fraction is None:
        bits = (exponent.to(torch.int32) + 127) << 23
    else:
        index = fraction.view(torch.uint8).to(torch.int32).flatten()
        roots = ROOTS.to(fraction.device).index_select(0, index)
        bits = torch.add(roots.view(fraction.shape), exponent, alpha=1 << 23)
    return bits.view(torch.float32)


@triton.jit
def scale_of(exponent, fraction):
    """Build float32 scales 2**E * bf16(2**(F / 128)) from int8 digits inside a kernel."""
    power = ((fraction.to(tl.int32) << 16) + 0x3F800000).to(tl.float32, bitcast=True)  # 1 + F / 128
    rounded = (tl.exp2(power).to(tl.int32, bitcast=True) + 0x8000) & -0x10000  # to bf16
    return (rounded + ((exponent.to(tl.int32) - 1) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(
    exponent_ptr, fraction_ptr, offs_n, offs_g, mask,
    stride_en, stride_eg, stride_fn, stride_fg,
    HAS_FRACTION: tl.constexpr,
):  # fmt: skip
    """Load the digits of scales and build the scales; `offs_n` and `offs_g` broadcast."""
    offset = offs_n * stride_en + offs_g * stride_eg
    exponent = tl.load(exponent_ptr + offset, mask=mask, other=0)
    if HAS_FRACTION:
        offset = offs_n * stride_fn + offs_g * stride_fg
        fraction = tl.load(fraction_ptr + offset, mask=mask, other=0)
    else:
        fraction = tl.zeros_like(exponent)
    return scale_of(exponent, fraction)
