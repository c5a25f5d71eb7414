"""Verification of `arbcli.families.votes.kernels.cast_votes`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.votes.kernels.cast_votes import (
    cast_scale_votes,
    cast_trit_votes,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.packing import (
    pack_trits_reference,
    random_trits,
    unpack_trits_reference,
)
from arbcli.verify.timed import MATRIX_SIZES, Timed
from arbcli.verify.verification import Case, Verification


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


def _scalar(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


def _trit_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    usual = _scalar(1, device), _scalar(3, device)
    for rows, columns in ((1, 1), (3, 33), (33, 165), (2, 1311)):
        packed = pack_trits_reference(random_trits(rows, columns, generator)).to(device)
        votes = torch.randint(-2, 3, (rows, columns), generator=generator, dtype=torch.int8)
        grad = torch.randn(rows, columns, generator=generator)
        grad[:, ::7] = 0
        inputs = (packed, votes.to(device), grad.to(device))
        yield Case(f"{rows}x{columns}", (*inputs, *usual))
    yield Case("2x1311 refused", (*inputs, _scalar(0, device), usual[1]))
    yield Case("2x1311 at 2 votes", (*inputs, usual[0], _scalar(2, device)))
    signs = torch.sign(inputs[2]).to(torch.int8)
    yield Case("2x1311 signs", (*inputs[:2], signs, *usual))
    held = torch.rand(inputs[1].shape, generator=generator).to(device) < 0.5
    yield Case("2x1311 held", (*inputs, *usual, held))
    saturated = torch.full_like(inputs[1], 127)
    yield Case("2x1311 saturated", (packed, saturated, -inputs[2].abs(), *usual))
    kept = (usual[0], _scalar(200, device))  # both branches occur
    yield Case("2x1311 saturated and kept", (packed, saturated, -inputs[2].abs(), *kept))
    yield Case("2x1311 saturated below and kept", (packed, -saturated, inputs[2].abs(), *kept))
    packed = pack_trits_reference(random_trits(6, 165, generator)).to(device)
    votes = torch.randint(-2, 3, (6, 330), generator=generator, dtype=torch.int8).to(device)
    grad = torch.randn(165, 3, generator=generator).to(device)
    held = torch.rand(165, 6, generator=generator).to(device) < 0.5
    strided = (packed[::2], votes[::2, ::2], grad.T, *usual, held.T[::2])
    yield Case("3x165 strided", strided)


def _scale_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (3, 33), (33, 41)):
        exponent = torch.randint(-96, 32, shape, generator=generator, dtype=torch.int8).to(device)
        votes = torch.randint(-3, 4, shape, generator=generator, dtype=torch.int8).to(device)
        slope = torch.randn(shape, generator=generator).to(device)
        slope[:, ::5] = 0
        yield Case(f"{shape[0]}x{shape[1]}", (exponent, votes, slope, _scalar(1, device)))
    for end in (-96, 31):
        ends = torch.full_like(exponent, end)
        yield Case(f"33x41 E = {end}", (ends, votes, slope, _scalar(1, device)))
    yield Case("33x41 refused", (exponent, votes, slope, _scalar(0, device)))
    strided = (exponent[::3, ::2], votes[::3, ::2], slope[1::3, ::2], _scalar(1, device))
    yield Case("11x21 strided", strided)


def _draw_trits(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    votes = rng.integers(-127, 127, n, k) if rng.chance(0.2) else rng.integers(-2, 2, n, k)
    grad = torch.relu(rng.reals(n, k)) - torch.relu(rng.reals(n, k))  # a quarter is 0
    scalars = rng.scalar(not rng.chance(0.1)), rng.scalar(rng.pick((1, 3, 7, 127)))
    held = rng.integers(0, 1, n, k).bool() if rng.chance(0.3) else None
    return rng.trits(n, k), votes, rng.view(grad), *scalars, held


cast_trit_votes_verification = Verification(
    cast_trit_votes, cast_trit_votes_reference, _trit_cases, compared=("packed", "votes"),
    draw=_draw_trits, needs_rows=False,
    timed=[Timed("11264x2048 bf16", **MATRIX_SIZES, packed=(0, 242), votes=(-2, 2),
                 grad=torch.bfloat16, threshold=3)],
    values={"ok": CaseGenerator.ok},
    long=("2x1311",),
)  # fmt: skip
cast_scale_votes_verification = Verification(
    cast_scale_votes, cast_scale_votes_reference, _scale_cases, compared=("exponent", "votes"),
    sizes={"G": "k"}, timed=[Timed("11264x64", N=11264, G=64)],
    values={"exponent": (-96, 31), "votes": (-3, 3), "ok": CaseGenerator.ok},
)  # fmt: skip
