"""Verification of `arbcli.families.ahead.kernels.accept_ahead`."""

import torch
from torch import Tensor

from arbcli.families.ahead.config import MAX_AHEAD
from arbcli.families.ahead.kernels.accept_ahead import accept_ahead_
from arbcli.verify.verification import Verification


def accept_ahead_reference(
    ids: Tensor,
    chosen: Tensor,
    rows: Tensor,
    last: Tensor,
    position: Tensor,
    positions: Tensor,
    accepted: Tensor,
) -> tuple[Tensor, ...]:
    """Compute the buffers of `accept_ahead_` with Python integers."""
    proposed, chosen_ids, count = ids.tolist(), chosen.tolist(), 1
    while count < len(chosen_ids) and proposed[count] == chosen_ids[count - 1]:
        count += 1
    ids = ids.clone()
    ids[0] = chosen_ids[count - 1]
    first = int(position)
    after = torch.tensor([first + count + k for k in range(len(chosen_ids))]).to(positions)
    kept = torch.tensor([first, count]).to(accepted)
    return ids, rows[count - 1].clone(), after[0], after, kept


accept_ahead_verification = Verification(
    accept_ahead_, accept_ahead_reference,
    compared=("ids", "last", "position", "positions", "accepted"),
    sizes={"M": f"min(m + 1, {MAX_AHEAD})", "D": "k + 1"},
    values={"ids": (0, 1), "chosen": (0, 1), "position": (0, 1000)},
)  # fmt: skip
