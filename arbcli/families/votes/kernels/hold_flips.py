"""Bound on flips: only the trits with the most votes may flip in a step.

A trit would flip if its votes, this gradient's counted, reach the threshold and it is not at that
end of its range. These are ranked by |votes|, and equal ones by 16 random bits; the first
`max_flips` flip. Trits of the same rank as the first that is held are held too, so never more than
`max_flips` flip.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.packing import unpack_trits_torch
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.update.random_bits import random_bits


def hold_flips(
    packed: Tensor, votes: Tensor, grad: Tensor, threshold: Tensor, key: Tensor, max_flips: int
) -> Tensor:
    """Compute the mask of trits that a bound on flips holds back.

    Args:
        packed: (N, row_bytes(K)) uint8.
        votes: (N, K) int8, before this gradient.
        grad: (N, K) float32, bfloat16 or int8, dL/dw or its sign; only its sign is read.
        threshold: int32 scalar tensor, 1..127.
        key: int32 scalar tensor, from `stream_keys`.
        max_flips: maximum number of trits that may flip, 1 or more.

    Returns:
        (N, K) bool.
    """
    integer: TensorOptions = {"dtype": torch.int32, "device": votes.device}
    columns = torch.arange(votes.shape[1], **integer)
    rank = torch.empty(votes.shape, **integer)
    for rows in row_chunks(votes, 1 << 18):
        old = unpack_trits_torch(packed[rows], votes.shape[1])
        total = (votes[rows].to(torch.int16) - torch.sign(grad[rows]).to(torch.int16)).clamp_(
            -127, 127
        )
        flips = (total.abs() >= threshold) & (old * torch.sign(total) < 1)
        index = torch.arange(rows.start, rows.stop, **integer)
        bits = (random_bits(key, index, columns) >> 16) & 0xFFFF
        rank[rows] = torch.where(flips, (total.abs().to(torch.int32) << 16) + bits, -1)
    if max_flips >= rank.numel():
        return torch.zeros_like(rank, dtype=torch.bool)
    highest_held = rank.flatten().topk(max_flips + 1).values[-1]
    return (rank >= 0) & (rank <= highest_held)
