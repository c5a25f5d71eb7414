"""Verification of `arbcli.families.hnet.kernels.find_chunks`."""

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.find_chunks import (
    Chunks,
    find_chunks,
)
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Verification, filled


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


def draw_boundaries(rng: CaseGenerator, batch: int, length: int) -> Tensor:
    """Draw boundaries of low or high density."""
    share = rng.pick((0.05, 0.25, 0.9))
    values = torch.rand(batch, length, generator=rng.generator, device=rng.device)
    return rng.view(values < share)


find_chunks_verification = Verification(
    find_chunks, find_chunks_reference,
    shapes=((0, 1, 5),),
    changed={f"all {x}": {"boundaries": filled(x)} for x in (True, False)},
    sizes={"B": "m", "T": "k"},
    values={"boundaries": draw_boundaries, "capacity": (1, 7, "k", "2 * k")},
)  # fmt: skip
