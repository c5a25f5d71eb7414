"""Verification of `arbcli.families.votes.kernels.cast_votes`."""

import torch
from torch import Tensor

from arbcli.families.votes.kernels.cast_votes import cast_trit_votes
from arbcli.verify.kernels.codec.packing import pack_trits_reference, unpack_trits_reference
from arbcli.verify.verification import REFUSED, CaseGenerator, Verification, filled


def cast_trit_votes_reference(
    packed: Tensor, votes: Tensor, grad: Tensor, ok: Tensor, threshold: Tensor,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute what `cast_trit_votes` returns, and leaves in `packed` and `votes`."""
    if not ok:
        return torch.zeros((), dtype=torch.int64, device=packed.device), packed, votes
    old = unpack_trits_reference(packed, votes.shape[1]).to(torch.int64)
    total = (votes.to(torch.int64) - torch.sign(grad).to(torch.int64)).clamp(-127, 127)
    moved = total.abs() >= int(threshold)
    if held is not None:
        moved = moved & ~held
    new = torch.where(moved, old + torch.sign(total), old).clamp(-1, 1)
    total = torch.where(moved, 0, total)
    return (new != old).sum(), pack_trits_reference(new.to(torch.int8)), total.to(torch.int8)


def cast_scale_votes_reference(
    exponent: Tensor, votes: Tensor, slope: Tensor, ok: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the reference result of `cast_scale_votes` in `exponent` and `votes`."""
    if not ok:
        return exponent, votes
    total = votes.to(torch.int64) - torch.sign(slope).to(torch.int64)
    octaves = (total >= 4).to(torch.int64) - (total <= -4).to(torch.int64)
    new = (exponent.to(torch.int64) + octaves).clamp(-96, 31)
    return new.to(torch.int8), (total - 4 * octaves).to(torch.int8)


def _draw_trits(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    votes = rng.integers(-127, 127, n, k) if rng.chance(0.2) else rng.integers(-2, 2, n, k)
    grad = torch.relu(rng.reals(n, k)) - torch.relu(rng.reals(n, k))  # a quarter is 0
    scalars = rng.scalar(not rng.chance(0.1)), rng.scalar(rng.pick((1, 3, 7, 127)))
    held = rng.integers(0, 1, n, k).bool() if rng.chance(0.3) else None
    return rng.trits(n, k), votes, rng.view(grad), *scalars, held


cast_trit_votes_verification = Verification(
    cast_trit_votes, cast_trit_votes_reference,
    changed=REFUSED | {
        "signs": {"grad": lambda x: x.sign().to(torch.int8)},
        "saturated": {"votes": filled(127), "grad": filled(-1)},
        "saturated and kept": {"votes": filled(127), "grad": filled(-1), "threshold": filled(200)},
        "saturated below": {"votes": filled(-127), "grad": filled(1), "threshold": filled(200)},
    }, compared=("packed", "votes"),
    draw=_draw_trits, needs_rows=False,
    values={"ok": CaseGenerator.ok},
)  # fmt: skip
