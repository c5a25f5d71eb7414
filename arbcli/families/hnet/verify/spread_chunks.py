"""Verification of `arbcli.families.hnet.kernels.spread_chunks`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.find_chunks import find_chunks
from arbcli.families.hnet.kernels.spread_chunks import (
    spread_chunks,
    spread_chunks_backward,
)
from arbcli.families.hnet.verify.find_chunks import draw_boundaries, find_chunks_reference
from arbcli.kernels.runtime.arguments import normals
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Gate, Verification, cases_of


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


def _draw(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Draw (label, x, s, owner, first)."""
    generator = torch.Generator().manual_seed(0)
    normal = normals(generator, device)
    for batch, length, chunks, width, share in (
        (1, 1, 1, 1, 0.5), (2, 33, 9, 7, 0.2), (3, 21, 30, 33, 0.5), (2, 40, 3, 159, 0.9),
        (1, 5, 2, 261, 0.5),
    ):  # fmt: skip
        marks = torch.rand(batch, length, generator=generator) < share
        partition = find_chunks_reference(marks.to(device), chunks)
        label = f"{batch}x{length} in {chunks} of {width}"
        sizes = normal(batch, length, width), normal(batch, chunks, width)
        yield label, *sizes, partition.owner, partition.first
    x, s = normal(10, 9, 6).permute(2, 1, 0)[::2], normal(10, 4, 3).permute(2, 1, 0)
    partition = find_chunks_reference((torch.rand(3, 9, generator=generator) < 0.4).to(device), 4)
    owner, first = (part.T.contiguous().T for part in (partition.owner, partition.first))
    yield "3x9 in 4 of 10 strided", x, s, owner, first
    partition = find_chunks_reference(torch.ones(2, 0, dtype=torch.bool, device=device), 3)
    yield "2x0 in 3 of 5 empty", normal(2, 0, 5), normal(2, 3, 5), partition.owner, partition.first
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        partition = find_chunks_reference(
            (torch.rand(3, 700, generator=generator) < 0.3).to(device), 200
        )
        x = normal(3, 700, 776).bfloat16()
        yield "3x700 in 200 of 776 bf16", x, normal(3, 200, 776), partition.owner, partition.first


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums over a chunk or a row; in bf16 no worse than one rounding",
)  # fmt: skip


def _draw_backward(rng: CaseGenerator, _group_size: int, m: int, _n: int, k: int) -> tuple:
    sequences, chunks = rng.pick((1, 3)), rng.pick((1, 7, m))
    partition = find_chunks.torch(draw_boundaries(rng, sequences, m), chunks)
    s = rng.reals(sequences, chunks, k, dtype=torch.float32)
    return rng.reals(sequences, m, k), s, rng.view(partition.owner), rng.view(partition.first)


_TIMED: dict[str, Any] = {
    "B": 32, "T": 4096, "C": 1024, "D": 512,
    "owner": lambda rng, *shape: (torch.arange(4096, device=rng.device) // 4).repeat(32, 1),
    "first": lambda rng, *shape: torch.arange(0, 4096, 4, device=rng.device).repeat(32, 1),
}  # fmt: skip
spread_chunks_verification = Verification(
    spread_chunks, spread_chunks_reference, cases_of(_draw, lambda *inputs: inputs[:3]), _GATE,
    sizes={"B": (1, 3), "T": "m", "C": (1, 7, "m")},
    timed=[Timed("32x4096 in 1024 of 512 bf16", spread_chunks.torch, **_TIMED)],
    values={"owner": (0, "C - 1")},
)  # fmt: skip
spread_chunks_backward_verification = Verification(
    spread_chunks_backward, spread_chunks_backward_reference,
    cases_of(_draw, lambda *inputs: inputs), _GATE, draw=_draw_backward, needs_rows=True,
    timed=[Timed("32x4096 in 1024 of 512 bf16", spread_chunks_backward.torch, **_TIMED)],
    values={"owner": (0, "C - 1")},
)  # fmt: skip
