"""Verification of `arbcli.families.compressed.kernels.sum_choices`."""

import torch
from torch import Tensor

from arbcli.families.compressed.kernels.sum_choices import sum_choices
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def sum_choices_reference(x: Tensor, chosen: Tensor, entries: int) -> Tensor:
    """Compute `sum_choices` in float64, one selection at a time."""
    y = torch.zeros(len(x), entries, x.shape[3], dtype=torch.float64, device=x.device)
    for b, groups in enumerate(chosen.tolist()):
        for g, places in enumerate(groups):
            for i, j in enumerate(places):
                if j >= 0:
                    y[b, j] += x[b, g, i].double()
    return y


def random_choices(
    generator: torch.Generator, batch: int, number: int, size: int, entries: int
) -> Tensor:
    """Draw ascending indices of distinct entries, with a padding of -1."""
    scores = torch.rand(batch, number, entries, generator=generator)
    indices = scores.argsort(dim=-1)[..., :size].sort(dim=-1).values.int()
    kept = torch.randint(0, size + 1, (batch, number, 1), generator=generator)
    return torch.where(torch.arange(size) < kept, indices, -1).int()


def _choices(rng: CaseGenerator, *sizes: int) -> Tensor:
    return random_choices(rng.seeded(), *sizes).to(rng.device)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    entries, number = rng.pick((1, 8, 90)), 1 + min(m, 60)
    size, batch = 1 + rng.integer(entries), rng.pick((1, 2))
    chosen = _choices(rng, batch, number, size, entries)
    return rng.reals(batch, number, size, 1 + min(k, 200)).contiguous(), chosen, entries


sum_choices_verification = Verification(
    sum_choices, sum_choices_reference,
    gate=Gate(relative=1e-5, reason="float32 sums over groups"), draw=_draw, needs_rows=True,
)  # fmt: skip
