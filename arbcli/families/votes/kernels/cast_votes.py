"""The `votes` rule: vote -sign(grad), move one notch where the votes reach a threshold, in place.

The rule of the original system that `arb` re-creates, so that `arb probe-loss` can show why it
fails. A trit whose votes reach +-threshold moves by one, and its votes are reset to 0, even at the
end of its range. A trit that is held back does not move and keeps its votes. Scales accumulate
votes by the sign of their slope and move by an octave; votes beyond the threshold are kept.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec import packing
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import HIGHEST_EXPONENT, LOWEST_EXPONENT
from arbcli.kernels.runtime.operation import Operation, tl, triton

SCALE_THRESHOLD = 4


def _cast_trit_votes_torch(
    packed: Tensor, votes: Tensor, grad: Tensor, ok: Tensor, threshold: Tensor,
    held: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if not ok:
        return torch.zeros((), dtype=torch.int64, device=packed.device)
    old = packing.unpack_trits_torch(packed, votes.shape[1])
    total = (votes.to(torch.int16) - torch.sign(grad).to(torch.int16)).clamp_(-127, 127)
    moved = total.abs() >= threshold
    if held is not None:
        moved &= ~held
    new = (old + torch.sign(total) * moved).clamp_(-1, 1).to(torch.int8)
    packed.copy_(packing.pack_trits_torch(new))
    votes.copy_(total.masked_fill_(moved, 0))
    return (new != old).sum()


@triton.jit
def _sign(x):
    return (x > 0).to(tl.int32) - (x < 0).to(tl.int32)


@triton.jit
def _cast_trit_votes_kernel(
    packed_ptr, votes_ptr, grad_ptr, ok_ptr, threshold_ptr, held_ptr, flips_ptr,
    N, K, row_bytes,
    stride_pn, stride_pb, stride_an, stride_ak, stride_gn, stride_gk, stride_hn, stride_hk,
    HOLDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if tl.load(ok_ptr) == 0:
        tl.store(flips_ptr + program, 0)
        return
    threshold = tl.load(threshold_ptr)
    # a program has BLOCK_N rows of BLOCK_B bytes, of five trits each
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_n = offs_n < N
    mask_byte = mask_n & (offs_b < row_bytes)[None, :]
    packed_ptrs = packed_ptr + offs_n * stride_pn + offs_b[None, :] * stride_pb
    byte = tl.load(packed_ptrs, mask=mask_byte, other=0)  # [BLOCK_N, BLOCK_B] uint8

    new_byte = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.int32)
    flips = tl.zeros((BLOCK_N, BLOCK_B), dtype=tl.int32)
    for digit in tl.static_range(5):
        k = packing.plane_offsets(offs_b, K, digit)[None, :]
        mask = mask_n & (k < K)
        votes_ptrs = votes_ptr + offs_n * stride_an + k * stride_ak
        # add the votes, saturating at int8
        total = tl.load(votes_ptrs, mask=mask, other=0).to(tl.int32)
        total -= _sign(tl.load(grad_ptr + offs_n * stride_gn + k * stride_gk, mask=mask, other=0))
        total = tl.minimum(tl.maximum(total, -127), 127)
        # move trits whose votes reach the threshold, and reset these votes
        moved = tl.abs(total) >= threshold
        if HOLDS:
            held_ptrs = held_ptr + offs_n * stride_hn + k * stride_hk
            moved &= tl.load(held_ptrs, mask=mask, other=0) == 0
        old = packing.digit_of(byte, digit)
        new = tl.where(moved & mask, old + _sign(total), old)
        new = tl.minimum(tl.maximum(new, -1), 1)
        tl.store(votes_ptrs, tl.where(moved, 0, total).to(tl.int8), mask=mask)
        new_byte += packing.place(new, digit)
        flips += (mask & (new != old)).to(tl.int32)

    tl.store(packed_ptrs, new_byte.to(tl.uint8), mask=mask_byte)
    tl.store(flips_ptr + program, tl.sum(flips))


def _cast_trit_votes_triton(
    packed: Tensor, votes: Tensor, grad: Tensor, ok: Tensor, threshold: Tensor,
    held: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (rows, in_features), num_bytes = votes.shape, packed.shape[1]
    grid = packing.byte_tiles(rows, num_bytes)
    flips = torch.empty(grid, dtype=torch.int32, device=packed.device)
    if flips.numel():
        holds = held is not None
        held = ok if held is None else held.view(torch.uint8)  # `ok` is not read
        _cast_trit_votes_kernel[grid](
            packed, votes, grad, ok, threshold, held, flips, rows, in_features, num_bytes,
            *packed.stride(), *votes.stride(), *grad.stride(), *(held.stride() or (0, 0)),
            HOLDS=holds, BLOCK_N=32, BLOCK_B=PLANE,
        )  # fmt: skip
    return flips.sum(dtype=torch.int64)


cast_trit_votes = Operation(
    "cast_trit_votes", _cast_trit_votes_triton, _cast_trit_votes_torch,
    "packed: uint8[N, row_bytes(K)]; votes: int8[N, K]; grad: float32|bfloat16|int8[N, K]; "
    "ok, threshold: int32[]; held: bool[N, K]?",
)  # fmt: skip
"""Add votes to every trit of a matrix, and move those whose votes reach a threshold, in place.

Args:
    packed: (N, row_bytes(K)) uint8.
    votes: (N, K) int8.
    grad: (N, K) float32, bfloat16 or int8, dL/dw or its sign; only its sign is read.
    ok: int32 scalar tensor; if 0, nothing changes.
    threshold: int32 scalar tensor, 1..127.
    held: (N, K) bool: trits that must not move; None holds none.

Returns:
    int64 scalar tensor, the number of trits that changed.
"""


def cast_scale_votes(exponent: Tensor, votes: Tensor, slope: Tensor, ok: Tensor) -> None:
    """Add votes to every scale of a matrix, and move those that reach 4 by an octave, in place.

    Args:
        exponent: (N, groups) int8.
        votes: (N, groups) int8, at most 3 in magnitude.
        slope: (N, groups) float32; only its sign is read.
        ok: int32 scalar tensor; if 0, nothing changes.
    """
    goes = (ok != 0).to(torch.int8)
    votes -= torch.sign(slope).to(torch.int8) * goes
    octaves = (votes >= SCALE_THRESHOLD).to(torch.int8) - (votes <= -SCALE_THRESHOLD).to(torch.int8)
    votes -= SCALE_THRESHOLD * octaves
    exponent.copy_((exponent + octaves).clamp_(LOWEST_EXPONENT, HIGHEST_EXPONENT))
