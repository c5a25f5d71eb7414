"""Gather positions of each sequence: y[b, r] = x[b, index[b, r]], or zeros where the index is -1.

The forward pass gathers the first positions of chunks, each at most once. So the backward pass is a
gather too: every position gets the gradient of the chunk that starts there.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT64, Array
from arbcli.kernels.runtime.operation import Operation


def _gather_chunks_torch(x: Tensor, index: Tensor) -> Tensor:
    if not x.shape[1]:
        return x.new_zeros(*index.shape, x.shape[2])
    rows = torch.arange(len(x), device=x.device)[:, None]
    return torch.where((index >= 0)[..., None], x[rows, index.clamp(min=0)], 0)


@triton.jit
def _gather_chunks_kernel(
    x_ptr, index_ptr, y_ptr,
    R, D, stride_xb, stride_xs, stride_xd, stride_ib, stride_ir,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    r = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)[None, :]
    place = tl.load(index_ptr + b * stride_ib + r * stride_ir, mask=r < R, other=-1)
    inside = (place >= 0) & (d < D)
    x_ptrs = x_ptr + b * stride_xb + place * stride_xs + d * stride_xd
    x = tl.load(x_ptrs, mask=inside, other=0)
    tl.store(y_ptr + (b * R + r) * D + d, x, mask=(r < R) & (d < D))


def _gather_chunks_triton(x: Tensor, index: Tensor) -> Tensor:
    (batch, rows), width = index.shape, x.shape[2]
    y = torch.empty(batch, rows, width, dtype=x.dtype, device=x.device)
    if y.numel():
        block_r, block_d = 4, 256
        grid = triton.cdiv(rows, block_r), triton.cdiv(width, block_d), batch
        _gather_chunks_kernel[grid](
            x, index, y, rows, width, *x.stride(), *index.stride(), BLOCK_R=block_r, BLOCK_D=block_d
        )
    return y


gather_chunks = Operation(
    "gather_chunks", _gather_chunks_triton, _gather_chunks_torch,
    {"x": Array("B, S, D"), "index": Array("B, R", INT64)},
)  # fmt: skip
"""Copy rows of each sequence.

Args:
    x: (B, S, D) float32 or bfloat16, any strides.
    index: (B, R) int64 below S; a negative index gives zeros.

Returns:
    (B, R, D) like x.
"""
