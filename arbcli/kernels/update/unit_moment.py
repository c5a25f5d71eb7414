"""Normalise a moment to norm 1, the input of Newton-Schulz iterations: y = m / sqrt(sum of m**2).

The sum is known, as `blend_moment` adds it up. Its root is rounded to the type of y, and so is y;
each operation is one of correctly rounded float32, and all backends agree to the last bit.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.runtime.backend import backend_of, count_tiles, tile_of_program
from arbcli.kernels.runtime.merged import merge_launches
from arbcli.kernels.runtime.operation import Operation, tl, triton


def _unit_moment_torch(moment: Tensor, squares: Tensor, out: Tensor) -> None:
    root = squares.to(torch.float32).double().sqrt()  # that of float32 may be off by a bit
    norm = root.to(torch.float32).to(out.dtype).masked_fill(squares == 0, torch.inf)
    torch.div(moment.to(out.dtype), norm, out=out)


@triton.jit
def _unit_moment_kernel(
    moment_ptr, squares_ptr, out_ptr,
    N, K, stride_mn, stride_mk, stride_on, stride_ok,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n, k, mask = tile_of_program(N, K, BLOCK_N, BLOCK_K)
    moment = tl.load(moment_ptr + n * stride_mn + k * stride_mk, mask=mask, other=0)
    squares = tl.load(squares_ptr)
    norm = tl.sqrt_rn(squares.to(tl.float32)).to(out_ptr.dtype.element_ty).to(tl.float32)
    norm = tl.where(squares == 0, float("inf"), norm)
    y = tl.div_rn(moment.to(tl.float32), norm + tl.zeros_like(moment))
    out_ptrs = out_ptr + n * stride_on + k * stride_ok
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


def _unit_moment_triton(moment: Tensor, squares: Tensor, out: Tensor) -> None:
    rows, columns = moment.shape
    if moment.numel():
        block_n, block_k = 4, 512
        _unit_moment_kernel[(count_tiles(rows, columns, block_n, block_k),)](
            moment, squares, out, rows, columns, *moment.stride(), *out.stride(),
            BLOCK_N=block_n, BLOCK_K=block_k,
        )  # fmt: skip


unit_moment = Operation(
    "unit_moment", _unit_moment_triton, _unit_moment_torch,
    "moment: int8[N, K]; squares: int64[]; out: real[N, K]",
)  # fmt: skip
"""Divide a moment by its norm.

Args:
    moment: (N, K) int8, any strides.
    squares: int64 scalar tensor, the sum of the moment squared; 0 gives zeros.
    out: (N, K) float32 or bfloat16, any strides; modified in place.
"""


def unit_moments(moments: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Divide several moments, by one launch; each is given as to `unit_moment`."""
    runs = [partial(unit_moment, *inputs) for inputs in moments]
    first, *_ = runs[0].args
    if backend_of(first) == "triton":
        merge_launches(runs, first.device)
    else:
        for run in runs:
            run()
