"""The trits that a bound on flips holds back, against the definition of a rank."""

import pytest
import torch

from arbcli.families.votes.kernels.hold_flips import hold_flips
from arbcli.kernels.codec.packing import pack_trits
from arbcli.verify.kernels.codec.packing import unpack_trits_reference
from arbcli.verify.kernels.update.random_bits import random_bits_reference


def hold_flips_reference(
    packed: torch.Tensor,
    votes: torch.Tensor,
    grad: torch.Tensor,
    threshold: torch.Tensor,
    key: torch.Tensor,
    max_flips: int,
) -> torch.Tensor:
    """Compute `hold_flips`, a trit at a time."""
    rows, columns = votes.shape
    old = unpack_trits_reference(packed, columns).tolist()
    bits = (random_bits_reference(int(key), rows, columns) >> 16).tolist()
    total = (votes.to(torch.int64) - torch.sign(grad).to(torch.int64)).clamp(-127, 127).tolist()
    ranks = {}
    for n in range(rows):
        for k in range(columns):
            up, down = total[n][k] >= int(threshold), total[n][k] <= -int(threshold)
            if (up and old[n][k] < 1) or (down and old[n][k] > -1):
                ranks[n, k] = (abs(total[n][k]), bits[n][k])
    held = torch.zeros(rows, columns, dtype=torch.bool)
    if len(ranks) > max_flips:
        highest_held = sorted(ranks.values(), reverse=True)[max_flips]
        for place, rank in ranks.items():
            held[place] = rank <= highest_held
    return held


def scalar(value: int, device=None) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


def ballot(rows: int, columns: int, most_votes: int, device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * columns)
    trits = torch.randint(-1, 2, (rows, columns), generator=generator, dtype=torch.int8)
    span = (-most_votes, most_votes + 1)
    votes = torch.randint(*span, (rows, columns), generator=generator, dtype=torch.int8)
    grad = torch.randn(rows, columns, generator=generator)
    grad[:, ::7] = 0
    return pack_trits(trits).to(device), votes.to(device), grad.to(device)


@pytest.mark.parametrize(
    ("shape", "threshold", "most"),
    [
        ((1, 1), 1, 1), ((3, 33), 3, 3), ((5, 161), 127, 40), ((5, 161), 1, 10**6),
        ((1, 1311), 3, 40),
    ],
)  # fmt: skip
def test_held_trits_equal_the_reference(shape, threshold, most, device):
    inputs = ballot(*shape, 127 if threshold == 127 else 4, device)
    given = *inputs, scalar(threshold, device), scalar(-5, device), most
    held = hold_flips(*given)
    assert torch.equal(held.cpu(), hold_flips_reference(*(cpu(part) for part in given)))


def cpu(part):
    return part.cpu() if isinstance(part, torch.Tensor) else part
