"""Verification of `arbcli.families.hnet.kernels.spread_chunks`."""

import torch
from torch import Tensor

from arbcli.families.hnet.chunking import find_chunks
from arbcli.families.hnet.kernels.spread_chunks import (
    spread_chunks,
    spread_chunks_backward,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Gate, Verification


def spread_chunks_reference(x: Tensor, s: Tensor, owner: Tensor) -> Tensor:
    """Compute the reference result of `spread_chunks`, in float64."""
    return x.double() + torch.stack([s[b].double()[owner[b]] for b in range(len(owner))])


def spread_chunks_backward_reference(
    grad_y: Tensor, s: Tensor, owner: Tensor, first: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the reference result of `spread_chunks_backward`, a sequence at a time in float64."""
    grad_y, grad_s = grad_y.double(), torch.zeros_like(s, dtype=torch.float64)
    for b in range(len(owner)):
        grad_s[b].index_add_(0, owner[b], grad_y[b])
    grad_factor = grad_y * spread_chunks_reference(torch.zeros_like(grad_y), s, owner)
    return grad_s, grad_factor.sum(dim=2)


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over a chunk or a row; in bf16 no worse than one rounding",
)  # fmt: skip


def _draw_backward(rng: CaseGenerator, _group_size: int, m: int, _n: int, k: int) -> tuple:
    sequences, chunks = rng.pick((1, 3)), rng.pick((1, 7, m))
    marks = torch.rand(sequences, m, generator=rng.generator, device=rng.device)
    partition = find_chunks(marks < rng.pick((0.05, 0.25, 0.9)), chunks)
    s = rng.reals(sequences, chunks, k, dtype=torch.float32)
    return rng.reals(sequences, m, k), s, rng.view(partition.owner), rng.view(partition.first)


spread_chunks_verification = Verification(
    spread_chunks, spread_chunks_reference, gate=_GATE, shapes=((0, 1, 5),),
    sizes={"B": (1, 3), "T": "m", "C": (1, 7, "m")},
    values={"owner": (0, "C - 1")},
)  # fmt: skip
spread_chunks_backward_verification = Verification(
    spread_chunks_backward, spread_chunks_backward_reference,
    gate=_GATE, shapes=((0, 1, 5),), draw=_draw_backward, needs_rows=True,
    values={"owner": (0, "C - 1")},
)  # fmt: skip
