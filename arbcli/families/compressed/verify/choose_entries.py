"""Verification of `arbcli.families.compressed.kernels.choose_entries`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.families.compressed.kernels.choose_entries import (
    choose_entries,
)
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.timed import Timed
from arbcli.verify.verification import Case, Verification


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


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (1, 1, 1, 4, 1, 1, 9, 1), (2, 9, 3, 5, 11, 3, 4, 3), (1, 70, 2, 16, 71, 1, 99, 5),
        (1, 5, 4, 32, 130, 126, 99, 64), (1, 4, 1, 4, 3, 0, 9, 7), (1, 3, 2, 4, 0, 0, 9, 2),
    ]  # fmt: skip
    dtypes = [torch.float32]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        shapes += [(2, 300, 4, 32, 300, 1, 4096, 64), (1, 100, 4, 32, 4096, 3997, 4096, 128)]
        dtypes += [torch.bfloat16]
    for batch, groups, heads, width, entries, first, max_entries, top_k in shapes:
        parts = random_index(generator, batch, groups, heads, width, entries)
        for dtype in dtypes:
            label = f"{batch}x{groups} from {first} of {heads}x{width}, {top_k} of {entries}"
            label += " bf16" if dtype == torch.bfloat16 else ""
            q, w, k = (part.to(device, dtype) for part in parts)
            yield Case(label, (q, w, k, first, max_entries, top_k))
            eight = (q.to(E4M3), w, k.to(E4M3), first, max_entries, top_k)
            yield Case(f"{label}, e4m3", eight)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    entries, groups = rng.pick((0, 1, 7, 150)), 1 + min(m, rng.pick((1, 70)))
    shape = (rng.pick((1, 2)), groups, rng.pick((1, 3)), 1 + min(k, 40), entries)
    about = rng.seeded()
    parts = random_index(about, *shape)
    first = rng.pick((0, 1, max(0, entries - groups)))
    views = (rng.view(part.to(rng.device, rng.dtype)) for part in parts)
    return *views, first, rng.pick((3, 10**4)), rng.pick((1, 5, 100))


choose_entries_verification = Verification(
    choose_entries, choose_entries_reference, _cases, draw=_draw, needs_rows=True,
    timed=[
        Timed(f"1x4096 of 4x32, 128 of 4096 {name}", choose_entries.torch, B=1, N=4096, H=4, D=32,
              E=4096, q=dtype, k=dtype, w=torch.bfloat16, first=1, max_entries=4096, top_k=128)
        for name, dtype in (("bf16", torch.bfloat16), ("e4m3", E4M3))
    ],
    not_verified=("scores that differ by a rounding alone: which of them is chosen",),
    long=("1x70*",),
)  # fmt: skip
