"""Verification of `arbcli.families.graph.kernels.nearest_codes`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.graph.kernels.nearest_codes import (
    nearest_codes,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


def nearest_codes_reference(q: Tensor, codes: Tensor) -> Tensor:
    """Compute the reference result of `nearest_codes`, one vector at a time."""
    table, nearest = codes.to(torch.int64), []
    for row in q.to(torch.int64):
        apart = ((table - row) ** 2).sum(dim=1).tolist()
        nearest.append(apart.index(min(apart)))
    return torch.tensor(nearest, dtype=torch.int64, device=q.device)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (1, 1, 1),
        (3, 7, 33),
        (70, 150, 65),
        (17, 300, 8),
        (0, 3, 5),
        (5, 40, 1031),
        (1300, 300, 3),
    ]
    if device.type == "cuda":
        shapes += [(500, 5000, 1024), (129, 70001, 64)]
    for rows, number, width in shapes:
        q, codes = (
            torch.randint(-127, 128, (n, width), generator=generator, dtype=torch.int8)
            for n in (rows, number)
        )
        half = number // 2
        codes[number - half :] = codes[:half].clone()  # each nearest code occurs twice
        yield Case(f"{rows} of {number}x{width}", (q.to(device), codes.to(device)))
    few = torch.randint(-1, 2, (40, 3), generator=generator, dtype=torch.int8).to(device)
    yield Case("many at one distance", (few, few.flip(0).contiguous()))
    largest = torch.tensor([[-128], [127]], dtype=torch.int8).expand(2, 2048).contiguous()
    yield Case("largest numbers", (largest.to(device), largest.flip(0).contiguous().to(device)))


def _draw(rng: CaseGenerator, _group_size: int, m: int, n: int, k: int) -> tuple:
    width, limit = 1 + min(k, 300), rng.pick((2, 127))
    q, codes = (
        rng.integers(-limit, limit, rows, width).contiguous() for rows in (m, 1 + min(n, 2000))
    )
    return q, codes


nearest_codes_verification = Verification(
    nearest_codes, nearest_codes_reference, _cases, draw=_draw, needs_rows=True,
    timed=[
        Timed(f"{rows} of {number}x{width}", M=rows, V=number, D=width)
        for rows, number, width in ((4096, 131072, 1024), (4096, 5_000_000, 64))
    ],
)  # fmt: skip
