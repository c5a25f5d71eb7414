"""Verification of `arbcli.families.hnet.kernels.find_chunks`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.find_chunks import (
    Chunks,
    find_chunks,
)
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


def find_chunks_reference(boundaries: Tensor, capacity: int) -> Chunks:
    """Compute `find_chunks`, one position at a time."""
    batch, length = boundaries.shape
    like: TensorOptions = {"dtype": torch.int64, "device": boundaries.device}
    first = torch.full((batch, capacity), -1, **like)
    owner, slot = torch.zeros(batch, length, **like), torch.full((batch, length), -1, **like)
    overflow = torch.zeros(batch, **like)
    for row, marks in enumerate(boundaries.tolist()):
        count = 0
        for t, mark in enumerate(marks):
            if (mark or t == 0) and count < capacity:
                first[row, count], slot[row, t] = t, count
                count += 1
            elif mark:
                overflow[row] += 1
            owner[row, t] = count - 1
    return Chunks(first, owner, slot, overflow)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def draw(batch: int, length: int, share: float) -> Tensor:
        return (torch.rand(batch, length, generator=generator) < share).to(device)

    for batch, length, capacity, share in (
        (1, 1, 1, 0.5), (2, 33, 9, 0.25), (3, 159, 31, 0.3), (1, 1311, 400, 0.25),
    ):  # fmt: skip
        yield Case(f"{batch}x{length} in {capacity}", (draw(batch, length, share), capacity))
    yield Case("2x40 in 40 all begin", (draw(2, 40, 2.0), 40))
    yield Case("2x40 in 7 none begins", (draw(2, 40, -1.0), 7))
    yield Case("2x300 in 3 far too many", (draw(2, 300, 0.9), 3))
    yield Case("5x31 in 300 more slots than positions", (draw(5, 31, 0.5), 300))
    yield Case("7x20 in 6 strided", (draw(40, 14, 0.4).T[::2, ::2], 6))
    yield Case("0x5 in 2 empty", (draw(0, 5, 0.5), 2))
    yield Case("2x0 in 2 empty", (draw(2, 0, 0.5), 2))


def draw_boundaries(rng: CaseGenerator, batch: int, length: int) -> Tensor:
    """Draw boundaries of low or high density."""
    share = rng.pick((0.05, 0.25, 0.9))
    values = torch.rand(batch, length, generator=rng.generator, device=rng.device)
    return rng.view(values < share)


find_chunks_verification = Verification(
    find_chunks, find_chunks_reference, _cases, sizes={"B": "m", "T": "k"},
    timed=[Timed("32x4096 in 1536", find_chunks.torch, B=32, T=4096, capacity=1536)],
    values={"boundaries": draw_boundaries, "capacity": (1, 7, "k", "2 * k")},
)  # fmt: skip
