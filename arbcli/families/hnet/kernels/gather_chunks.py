"""Gather positions of each sequence: y[b, r] = x[b, index[b, r]], or zeros where the index is -1.

The forward pass gathers the first positions of chunks, each at most once. So the backward pass is a
gather too: every position gets the gradient of the chunk that starts there.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT64, Array
from arbcli.kernels.runtime.inputs import normals
from arbcli.kernels.runtime.operation import EXACT, Case, Operation
from arbcli.kernels.timed import Timed


def gather_chunks_reference(x: Tensor, index: Tensor) -> Tensor:
    """Compute `gather_chunks`, one row at a time."""
    y = torch.zeros(*index.shape, x.shape[2], dtype=x.dtype, device=x.device)
    for b, places in enumerate(index.tolist()):
        for r, place in enumerate(places):
            if place >= 0:
                y[b, r] = x[b, place]
    return y


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


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    draw = normals(generator, device)

    def places(batch: int, rows: int, length: int) -> Tensor:
        return torch.randint(-1, length, (batch, rows), generator=generator).to(device)

    for batch, length, rows, width in ((1, 1, 1, 1), (2, 33, 9, 159), (3, 7, 31, 300)):
        inputs = draw(batch, length, width), places(batch, rows, length)
        yield Case(f"{batch}x{rows} of {length}x{width}", inputs)
    x, index = draw(70, 6, 5).permute(2, 1, 0)[::2, ::2], places(9, 6, 3).T[::2, ::2]
    yield Case("3x5 of 3x70 strided", (x, index))
    yield Case("2x5 of 4x9 nowhere", (draw(2, 4, 9), places(2, 5, 1).clamp(max=-1)))
    yield Case("2x0 of 4x9 empty", (draw(2, 4, 9), places(2, 0, 1)))
    yield Case("2x3 of 0x9 empty", (draw(2, 0, 9), places(2, 3, 1).clamp(max=-1)))
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        yield Case("4x300 of 700x776 bf16", (draw(4, 700, 776).bfloat16(), places(4, 300, 700)))


gather_chunks = Operation(
    "gather_chunks", _gather_chunks_triton, _gather_chunks_torch, gather_chunks_reference, _cases,
    EXACT,
    {"x": Array("B, S, D"), "index": Array("B, R", INT64, values=(-1, "S - 1"))},
    sizes={"B": (1, 3), "S": "m", "R": (1, 9, "m")},
    timed=[
        Timed("32x1024 of 4096x512 bf16", _gather_chunks_torch, B=32, S=4096, D=512, R=1024,
              index=lambda dice, *shape: torch.arange(0, 4096, 4).to(dice.device).repeat(32, 1))
    ],
)  # fmt: skip
"""Copy rows of each sequence.

Args:
    x: (B, S, D) float32 or bfloat16, any strides.
    index: (B, R) int64 below S; a negative index gives zeros.

Returns:
    (B, R, D) like x.
"""
