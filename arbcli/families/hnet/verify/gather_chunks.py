"""Verification of `arbcli.families.hnet.kernels.gather_chunks`."""

import torch
from torch import Tensor

from arbcli.families.hnet.kernels.gather_chunks import (
    gather_chunks,
)
from arbcli.verify.verification import Verification, filled


def gather_chunks_reference(x: Tensor, index: Tensor) -> Tensor:
    """Compute `gather_chunks`, one row at a time."""
    y = torch.zeros(*index.shape, x.shape[2], dtype=x.dtype, device=x.device)
    for b, places in enumerate(index.tolist()):
        for r, place in enumerate(places):
            if place >= 0:
                y[b, r] = x[b, place]
    return y


gather_chunks_verification = Verification(
    gather_chunks, gather_chunks_reference,
    shapes=((0, 1, 9),), changed={"nowhere": {"index": filled(-1)}},
    sizes={"B": (1, 3), "S": "m", "R": (1, 9, "m")},
    values={"index": (-1, "S - 1")},
)  # fmt: skip
