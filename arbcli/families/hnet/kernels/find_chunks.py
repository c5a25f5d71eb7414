"""Assign positions to the chunks that boundaries define, in a fixed number of slots.

    owner[t] = min(b[0] + ... + b[t], C) - 1,   b[0] taken to be 1

A boundary b[t] starts the next chunk. The last of C slots takes all further chunks, so shapes do
not depend on the text and the host never waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import BOOL, Array, Number, TensorOptions
from arbcli.kernels.runtime.operation import Operation


class Chunks(NamedTuple):
    """The chunks of B sequences of T positions, in C slots each."""

    first: Tensor
    """(B, C) int64: first position of each chunk; -1 in unused slots, which are the last ones."""
    owner: Tensor
    """(B, T) int64: slot of each position's chunk."""
    slot: Tensor
    """(B, T) int64: slot of the chunk that starts at a position; -1 if none does."""
    overflow: Tensor
    """(B,) int64: number of boundaries without a chunk, because all slots were used."""


def _find_chunks_torch(boundaries: Tensor, capacity: int) -> Chunks:
    batch, length = boundaries.shape
    begins = functional.pad(boundaries[:, 1:], (1, 0), value=True) if length else boundaries
    counts = begins.long().cumsum(1)
    fits = begins & (counts <= capacity)
    slot = torch.where(fits, counts - 1, -1)
    # positions without a boundary write to an extra slot, which is cut off
    first = counts.new_full((batch, capacity + 1), -1)
    places = torch.arange(length, device=counts.device).expand(batch, length)
    first.scatter_(1, torch.where(fits, slot, capacity), torch.where(fits, places, -1))
    owner = counts.clamp(max=capacity) - 1
    return Chunks(first[:, :capacity].contiguous(), owner, slot, (begins & ~fits).sum(1))


@triton.jit
def _find_chunks_kernel(
    boundaries_ptr, first_ptr, owner_ptr, slot_ptr, overflow_ptr,
    T, C, stride_bb, stride_bt,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    count = 0
    for start in range(0, T, BLOCK):
        t = start + offs
        inside = t < T
        marks_ptr = boundaries_ptr + row * stride_bb + t.to(tl.int64) * stride_bt
        begins = ((tl.load(marks_ptr, mask=inside, other=0) != 0) | (t == 0)) & inside
        number = count + tl.cumsum(begins.to(tl.int32), axis=0)
        fits = begins & (number <= C)
        tl.store(first_ptr + row * C + number - 1, t.to(tl.int64), mask=fits)
        slot = tl.where(fits, number - 1, -1)
        tl.store(slot_ptr + row * T + t, slot.to(tl.int64), mask=inside)
        owner = tl.minimum(number, C) - 1
        tl.store(owner_ptr + row * T + t, owner.to(tl.int64), mask=inside)
        count += tl.sum(begins.to(tl.int32), axis=0)
    tl.store(overflow_ptr + row, tl.maximum(count - C, 0).to(tl.int64))
    for start in range(0, C, BLOCK):
        c = start + offs
        tl.store(first_ptr + row * C + c, tl.full((BLOCK,), -1, tl.int64), (c >= count) & (c < C))


def _find_chunks_triton(boundaries: Tensor, capacity: int) -> Chunks:
    (batch, length) = boundaries.shape
    like: TensorOptions = {"dtype": torch.int64, "device": boundaries.device}
    first, owner = torch.empty(batch, capacity, **like), torch.empty(batch, length, **like)
    chunks = Chunks(first, owner, torch.empty_like(owner), torch.empty(batch, **like))
    if batch:
        _find_chunks_kernel[(batch,)](
            boundaries.view(torch.uint8), *chunks, length, capacity, *boundaries.stride(), BLOCK=256
        )
    return chunks


find_chunks = Operation(
    "find_chunks", _find_chunks_triton, _find_chunks_torch,
    {
        "boundaries": Array("B, T", BOOL),
        "capacity": Number(),
    },
    where=("capacity > 0",),
)  # fmt: skip
"""Assign the positions of sequences to chunks.

Args:
    boundaries: (B, T) bool, any strides: whether a chunk starts. One always starts at 0.
    capacity: C, the number of slots per sequence; at least 1.
"""
