"""Verification of `arbcli.families.compressed.kernels.choose_entries`."""

import torch
from torch import Tensor

from arbcli.families.compressed.kernels.choose_entries import choose_entries
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.verify.verification import CaseGenerator, Verification


def choose_entries_reference(
    q: Tensor, w: Tensor, k: Tensor, first: int, max_entries: int, top_k: int
) -> Tensor:
    """Compute `choose_entries` in float64, one group at a time."""
    q, w, k = (part.double() for part in (q, w, k))
    size = min(top_k, k.shape[1])
    chosen = torch.full((*q.shape[:2], size), -1, dtype=torch.int32, device=q.device)
    for b in range(len(q)):
        for n in range(q.shape[1]):
            seen = range(max(0, first + n - max_entries), min(first + n, k.shape[1]))
            dots = k[b, seen.start : seen.stop] @ q[b, n].T  # (entries, h)
            scores = (dots.clamp(min=0) * w[b, n]).sum(dim=1).tolist()
            best = sorted(zip(scores, seen, strict=True), reverse=True)[:size]
            indices = sorted(j for _, j in best)
            chosen[b, n, : len(indices)] = torch.tensor(indices, dtype=torch.int32)
    return chosen


def random_index(
    generator: torch.Generator, batch: int, groups: int, heads: int, width: int, entries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw queries, weights and keys of small integers: sums are exact and ties are frequent."""

    def draw(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    queries = draw(batch, groups, heads, width)
    return queries, draw(batch, groups, heads), draw(batch, entries, width)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, size: int) -> tuple:
    entries, groups = rng.pick((0, 1, 7, 150)), 1 + min(m, rng.pick((1, 70)))
    shape = (rng.pick((1, 2)), groups, rng.pick((1, 3)), 1 + min(size, 40), entries)
    parts = random_index(rng.seeded(), *shape)
    first = rng.pick((0, 1, max(0, entries - groups)))
    q, w, k = (rng.view(part.to(rng.device, rng.dtype)) for part in parts)
    if rng.chance(0.4):
        q, k = q.to(E4M3), k.to(E4M3)
    return q, w, k, first, rng.pick((3, 10**4)), rng.pick((1, 5, 100))


choose_entries_verification = Verification(
    choose_entries, choose_entries_reference, draw=_draw, needs_rows=True,
    not_verified=("scores that differ by a rounding alone: which of them is chosen",),
)  # fmt: skip
