"""Scatter-add of vectors to the entries that groups selected, in a fixed order.

    y[j] = sum over g, i of x[g, i] where chosen[g, i] = j

A first kernel maps every entry to its index in every group's selection. So a program sums over an
entry's groups in their order, and the sum is bitwise deterministic, unlike atomic additions.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.operation import Operation, tl, triton


def _sum_choices_torch(x: Tensor, chosen: Tensor, entries: int) -> Tensor:
    batch, width = len(x), x.shape[3]
    y = torch.zeros(batch, entries + 1, width, device=x.device)  # the last row collects index -1
    rows = torch.where(chosen >= 0, chosen, entries).long()
    rows = rows + torch.arange(batch, device=x.device)[:, None, None] * (entries + 1)
    y.view(-1, width).index_add_(0, rows.flatten(), x.reshape(-1, width).float())
    return y[:, :entries].contiguous()


@triton.jit
def _place_choices_kernel(chosen_ptr, places_ptr, NUMBER, SIZE, ENTRIES, BLOCK: tl.constexpr):
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    for start in range(0, SIZE, BLOCK):
        i = start + tl.arange(0, BLOCK)
        j = tl.load(chosen_ptr + (b * NUMBER + g) * SIZE + i, mask=i < SIZE, other=-1)
        at = (b * ENTRIES + j) * NUMBER + g
        tl.store(places_ptr + at, i.to(tl.int16), mask=j >= 0)


@triton.jit
def _sum_choices_kernel(
    x_ptr, places_ptr, found_ptr, y_ptr, NUMBER, SIZE, ENTRIES, WIDTH,
    BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    j, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = (b * ENTRIES + j) * NUMBER
    count = tl.full((), 0, tl.int32)
    for start in range(0, NUMBER, BLOCK_G):  # list the groups that selected the entry
        g = start + tl.arange(0, BLOCK_G)
        i = tl.load(places_ptr + row + g, mask=g < NUMBER, other=-1).to(tl.int32)
        chose = (i >= 0).to(tl.int32)
        place = count + tl.cumsum(chose) - 1
        tl.store(found_ptr + row + place, g * SIZE + i, mask=i >= 0)
        count += tl.sum(chose)
    tl.debug_barrier()  # other threads read the list
    x_ptr += b * NUMBER * SIZE * WIDTH
    for first in range(0, WIDTH, BLOCK_W):
        offs = first + tl.arange(0, BLOCK_W)[None, :]
        total = tl.zeros((BLOCK_R, BLOCK_W), dtype=tl.float32)
        for start in range(0, count, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            at = tl.load(found_ptr + row + r, mask=r < count, other=0).to(tl.int64) * WIDTH
            mask = (r < count)[:, None] & (offs < WIDTH)
            total += tl.load(x_ptr + at[:, None] + offs, mask=mask, other=0).to(tl.float32)
        y = tl.sum(total, axis=0)[None, :]
        tl.store(y_ptr + (b * ENTRIES + j) * WIDTH + offs, y, mask=offs < WIDTH)


def _sum_choices_triton(x: Tensor, chosen: Tensor, entries: int) -> Tensor:
    batch, number, size, width = x.shape
    y = torch.empty(batch, entries, width, dtype=torch.float32, device=x.device)
    if not y.numel():
        return y
    like: TensorOptions = {"dtype": torch.int16, "device": x.device}
    places = torch.full((batch, entries, number), -1, **like)
    if chosen.numel():
        block = triton.next_power_of_2(min(size, 1024))
        _place_choices_kernel[(number, batch)](chosen, places, number, size, entries, BLOCK=block)
    slots = torch.empty(places.shape, dtype=torch.int32, device=x.device)
    _sum_choices_kernel[(entries, batch)](
        x, places, slots, y, number, size, entries, width,
        BLOCK_G=min(1024, triton.next_power_of_2(number)), BLOCK_R=32,
        BLOCK_W=min(128, triton.next_power_of_2(width)),
    )  # fmt: skip
    return y


sum_choices = Operation(
    "sum_choices", _sum_choices_triton, _sum_choices_torch,
    "x: real[B, N, K, D] dense; chosen: int32[B, N, K] dense; entries",
    where=(f"K < {2**15}",),
)  # fmt: skip
"""Sum the vectors of each entry.

Args:
    x: (B, N, k, D) float32 or bfloat16, contiguous; k is below 2**15.
    chosen: (B, N, k) int32, contiguous: indices of entries, distinct within a group; vectors
        with index -1 are ignored.
    entries: E, the number of entries.

Returns:
    (B, E, D) float32.
"""
