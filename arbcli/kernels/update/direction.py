"""A step's direction in fixed point: u = round(values * row_gain * column_gain), units of 2**-16.

The values are a gradient or its transformation, and the gains scale them to unit root-mean-square
over the matrix: two float32 products in this order, saturation, and one rounding to the nearest
integer, ties to even. Without gains u is the sign of each value. Each of these is one IEEE
operation, so u is the same integer on every backend. Kernels that compute it are launched with
`enable_fp_fusion=False`, as a fused multiply-add would round once instead of twice.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import tiles_of_a_program

UNIT = 1 << 16
"""Fixed-point one: directions, slopes and steps have 16 fractional bits."""
FEW_REGISTERS, MAX_REGISTERS = 128, 255
"""Registers of a thread at most, in kernels that step small and large matrices."""


def registers_of(matrix: Tensor) -> int:
    """Return the maximum registers of a thread: few for small matrices, for more programs."""
    return tiles_of_a_program(matrix, FEW_REGISTERS, MAX_REGISTERS)


def fixed_point_torch(
    values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None, rows: slice, limit: int
) -> Tensor:
    """Compute u for some rows, (R, K) int32, from factors as of `FactoredUpdate`."""
    if row_gain is None:
        return torch.sign(values[rows]).to(torch.int32).mul_(UNIT)
    u = values[rows].to(torch.float32, copy=True).mul_(row_gain[rows, None])
    if column_gain is not None:
        u *= column_gain
    return u.clamp_(-limit, limit).round_().to(torch.int32)


def native_arguments(
    values: Tensor, row_gain: Tensor | None, column_gain: Tensor | None
) -> tuple[Tensor | int | None, ...]:
    """List the arguments of native loops for the factors of a direction: see `FactoredUpdate`."""
    values = native.as_rows(values)
    sizes = values.dtype == torch.bfloat16, 0 if row_gain is None else row_gain.stride(0)
    return values, row_gain, column_gain, values.stride(0), *sizes, values.shape[1]


@triton.jit
def round_to_int(x):
    """Round float32 of magnitude up to 2**22 to int32, ties to even, inside a kernel.

    Adding 1.5 * 2**23 leaves the integer in the low bits of the sum.
    """
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def load_gain(gain_ptr, offset, mask, HAS: tl.constexpr):
    """Load gains of rows or columns inside a kernel; 1 without gains."""
    if HAS:
        return tl.load(gain_ptr + offset, mask=mask, other=0)
    else:
        return 1.0


@triton.jit
def fixed_point(values, row_gain, column_gain, LIMIT: tl.constexpr, HAS_ROWS: tl.constexpr):
    """Compute u as int32 inside a kernel; the gains broadcast to `values`."""
    if HAS_ROWS:
        u = values.to(tl.float32) * row_gain * column_gain
        return round_to_int(tl.minimum(tl.maximum(u, -LIMIT), LIMIT))
    return tl.where(values > 0, 65536, tl.where(values < 0, -65536, 0))


GAINS_BELONG = "column_gain is None or row_gain is not None"
