"""Verification of `arbcli.families.ahead.kernels.accept_ahead`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.ahead.kernels.accept_ahead import (
    MOST_AHEAD,
    accept_ahead_,
)
from arbcli.verify.verification import Case, Verification


def accept_ahead_reference(
    ids: Tensor,
    chosen: Tensor,
    rows: Tensor,
    last: Tensor,
    position: Tensor,
    places: Tensor,
    accepted: Tensor,
) -> tuple[Tensor, ...]:
    """Compute the buffers of `accept_ahead_` with Python integers."""
    proposed, chosen_ids, count = ids.tolist(), chosen.tolist(), 1
    while count < len(chosen_ids) and proposed[count] == chosen_ids[count - 1]:
        count += 1
    ids = ids.clone()
    ids[0] = chosen_ids[count - 1]
    first = int(position)
    after = torch.tensor([first + count + k for k in range(len(chosen_ids))]).to(places)
    kept = torch.tensor([first, count]).to(accepted)
    return ids, rows[count - 1].clone(), after[0], after, kept


def _acceptances(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for size, wrong, width in (
        (2, 1, 5),
        (2, 9, 5),
        (5, 3, 64),
        (8, 9, 1100),
        (8, 1, 1),
        (1, 9, 3),
    ):
        chosen = torch.randint(256, (size,), generator=generator)
        ids = torch.cat([torch.tensor([7]), chosen[:-1]])
        if wrong < size:
            ids[wrong] = (ids[wrong] + 1) % 256
        inputs = (
            ids, chosen, torch.randn(size, width, generator=generator), torch.zeros(width),
            torch.tensor(40, dtype=torch.int32), torch.zeros(size, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
        )  # fmt: skip
        label = f"{size} rows of {width}, {wrong if wrong < size else 'none'} is another"
        yield Case(label, tuple(part.to(device) for part in inputs))


accept_ahead_verification = Verification(
    accept_ahead_, accept_ahead_reference, _acceptances,
    compared=("ids", "last", "position", "places", "accepted"),
    sizes={"M": f"min(m + 1, {MOST_AHEAD})", "D": "k + 1"},
    values={"ids": (0, 1), "chosen": (0, 1), "position": (0, 1000)},
)  # fmt: skip
