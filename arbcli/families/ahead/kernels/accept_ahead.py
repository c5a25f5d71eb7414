"""Acceptance step of speculative decoding: keep the proposals that equal the chosen bytes.

A check reads the last byte of a text and M - 1 proposals, and returns the logits of M next bytes.
`choose_byte` samples each with the random numbers of its own position. The first sample is always
accepted, and each following one if all samples before it equal their proposals. So the accepted
bytes are those of decoding one byte at a time.
"""

import torch
from torch import Tensor

from arbcli.families.ahead.config import MAX_AHEAD
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last


def _accept_ahead_torch(
    ids: Tensor, chosen: Tensor, rows: Tensor, last: Tensor, position: Tensor, positions: Tensor,
    accepted: Tensor,
) -> None:  # fmt: skip
    equal = (ids[1:] == chosen[:-1]).long().cumprod(0)
    count = 1 + equal.sum()[None]
    accepted.copy_(torch.cat([position[None], count.to(torch.int32)]))
    ids[:1].copy_(chosen.gather(0, count - 1))
    last.copy_(rows.index_select(0, count - 1)[0])
    position += count[0].to(torch.int32)
    positions.copy_(position + torch.arange(len(positions), device=positions.device))


@triton.jit
def _accept_ahead_kernel(
    ids_ptr, chosen_ptr, rows_ptr, last_ptr, position_ptr, positions_ptr, accepted_ptr, M, D,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_last(OVERLAP)
    row = tl.arange(0, 8)
    chosen = tl.load(chosen_ptr + row, mask=row < M, other=0)
    proposed = tl.load(ids_ptr + row + 1, mask=row < M - 1, other=-1)
    count = tl.min(tl.where(chosen == proposed, 8, row + 1), axis=0)
    byte = tl.sum(tl.where(row == count - 1, chosen, 0), axis=0)
    first = tl.load(position_ptr)
    tl.debug_barrier()  # all threads have read the buffers that are written now
    tl.store(ids_ptr, byte)
    tl.store(position_ptr, first + count)
    tl.store(positions_ptr + row, first + count + row, mask=row < M)
    tl.store(accepted_ptr, first)
    tl.store(accepted_ptr + 1, count)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(rows_ptr + ((count - 1) * D + d), mask=d < D, other=0)
        tl.store(last_ptr + d, x, mask=d < D)


def _accept_ahead_triton(
    ids: Tensor, chosen: Tensor, rows: Tensor, last: Tensor, position: Tensor, positions: Tensor,
    accepted: Tensor,
) -> None:  # fmt: skip
    _accept_ahead_kernel[(1,)](
        ids, chosen, rows, last, position, positions, accepted, len(chosen), rows.shape[1],
        BLOCK=1024, num_warps=4, **overlap_options(rows),
    )  # fmt: skip


accept_ahead_ = Operation(
    "accept_ahead", _accept_ahead_triton, _accept_ahead_torch,
    "ids, chosen: int64[M] dense; rows: real[M, D] dense; last: real[D] dense; position: int32[]; "
    "positions: int32[M] dense; accepted: int32[2] dense",
    where=(f"1 <= M <= {MAX_AHEAD}",),
)  # fmt: skip
"""Accept the bytes that equal their proposals, and the first one that differs, in place.

Args:
    ids: (M,) int64: the last byte and the proposals; element 0 is set to the last accepted byte.
    chosen: (M,) int64: the sampled byte after each of `ids`.
    rows: (M, D), any dtype: hidden state of each of `ids`.
    last: (D,): set to the row from which the last accepted byte was sampled.
    position: int32 scalar: position of `ids[0]`; advanced by the number of accepted bytes.
    positions: (M,) int32: set to the positions from the new one on.
    accepted: (2,) int32: set to the old `position` and to the number of accepted bytes, which
        is also the number of `ids` that stay in the text.

All are contiguous. They are read and written on the device.
"""
