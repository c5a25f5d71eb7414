"""Which entries a group of bytes attends to: those that an indexer scores highest.

    s[g, j] = sum over h of w[g, h] max(0, q[g, h] . k[j])

Group g sees the entries g - M to g - 1, and has the k of the largest s. Of equal ones the later
has it.
Source: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, eq. 1 and 2.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.backend import chunk_elements

ELEMENTS = 1 << 24
"""Of the scores that the torch backend computes at a time."""


def choose_entries_reference(
    q: Tensor, w: Tensor, k: Tensor, first: int, most: int, top_k: int
) -> Tensor:
    """Compute what `choose_entries` must return, a group and an entry at a time in float64."""
    q, w, k = (part.double() for part in (q, w, k))
    size = min(top_k, k.shape[1])
    chosen = torch.full((*q.shape[:2], size), -1, dtype=torch.int32, device=q.device)
    for b in range(len(q)):
        for n in range(q.shape[1]):
            seen = range(max(0, first + n - most), min(first + n, k.shape[1]))
            scores = [float((w[b, n] * (q[b, n] @ k[b, j]).clamp(min=0)).sum()) for j in seen]
            best = sorted(zip(scores, seen, strict=True), reverse=True)[:size]
            found = sorted(j for _, j in best)
            chosen[b, n, : len(found)] = torch.tensor(found, dtype=torch.int32)
    return chosen


def _choose_entries_torch(q, w, k, first, most, top_k):
    (batch, groups, heads, _), number = q.shape, k.shape[1]
    size = min(top_k, number)
    chosen = torch.full((batch, groups, size), -1, dtype=torch.int32, device=q.device)
    step = max(1, chunk_elements(ELEMENTS) // max(1, batch * heads * number))
    places = torch.arange(number, device=q.device)
    for start in range(0, groups if size else 0, step):
        some = slice(start, min(start + step, groups))
        dots = torch.einsum("bnhd,bjd->bnhj", q[:, some].float(), k.float())
        scores = (dots.relu() * w[:, some].float()[..., None]).sum(dim=2)
        complete = torch.arange(some.start, some.stop, device=q.device)[:, None] + first
        seen = (places < complete) & (places >= complete - most)
        # turned round, as the first of equal ones is the later one then
        scores = scores.masked_fill(~seen, -torch.inf).flip(-1)
        order = scores.sort(dim=-1, descending=True, stable=True)
        best = number - 1 - order.indices[..., :size]
        best = torch.where(order.values[..., :size] == -torch.inf, number, best).sort(-1).values
        chosen[:, some] = torch.where(best == number, -1, best).int()
    return chosen


def choose_entries(q: Tensor, w: Tensor, k: Tensor, first: int, most: int, top_k: int) -> Tensor:
    """Choose the entries of each group.

    Args:
        q: (B, N, h, d) float32 or bfloat16, of groups one behind the other.
        w: (B, N, h) like it.
        k: (B, E, d) like it.
        first: number of the first group, which is how many entries are complete.
        most: M.
        top_k: entries of a group.

    Returns:
        (B, N, min(top_k, E)) int32: their numbers, ascending, and -1 for those that there are not.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    fits = q.dim() == 4 and w.shape == q.shape[:3] and k.dim() == 3
    if not fits or k.shape[::2] != q.shape[::3] or not q.dtype == w.dtype == k.dtype:
        shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in (q, w, k))
        raise ValueError(f"queries, weights and keys do not fit each other: {shapes}")
    return _choose_entries_torch(q, w, k, first, most, top_k)
