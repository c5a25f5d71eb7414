"""Verification of `arbcli.families.graph.kernels.nearest_codes`."""

import torch
from torch import Tensor

from arbcli.families.graph.kernels.nearest_codes import nearest_codes
from arbcli.verify.verification import CaseGenerator, Verification


def nearest_codes_reference(q: Tensor, codes: Tensor) -> Tensor:
    """Compute the reference result of `nearest_codes`, one vector at a time."""
    table, nearest = codes.to(torch.int64), []
    for row in q.to(torch.int64):
        distances = ((table - row) ** 2).sum(dim=1).tolist()
        nearest.append(distances.index(min(distances)))
    return torch.tensor(nearest, dtype=torch.int64, device=q.device)


def _draw(rng: CaseGenerator, _group_size: int, m: int, n: int, k: int) -> tuple:
    width, limit = 1 + min(k, 300), rng.pick((2, 127))
    q, codes = (
        rng.integers(-limit, limit, rows, width).contiguous() for rows in (m, 1 + min(n, 2000))
    )
    return q, codes


nearest_codes_verification = Verification(
    nearest_codes, nearest_codes_reference,
    shapes=((0, 3, 5), (130, 300, 3)),
    changed={
        "again": {
            "q": lambda x: x[:, :3].repeat(150, 1), "codes": lambda x: x[:, :3].repeat(20, 1)
        },
        "largest numbers": {
            "q": lambda x: x.new_full((2, 2048), -128),
            "codes": lambda x: x.new_full((3, 2048), 127),
        },
    },
    draw=_draw, needs_rows=True,
)  # fmt: skip
