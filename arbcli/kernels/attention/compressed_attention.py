"""Attention to entries of several bytes, to the last bytes as they are, and to a sink.

A byte at position t sees the W last bytes, itself one of them, and entries of m bytes each. With
g = (t + 1) // m entries complete, it sees all of them, the last M if there are more, or those of
them that were chosen: all bytes with the same g are a group and have one choice. One vector is key
and value. With n(x) = x / sqrt(mean(x**2) + eps), R_t the turn by the angles of position t, and a
head h that belongs to the head of keys h // (H / G):

    q[t] = R_t n(x[t]),  s[i] = q[t] . c[i] / sqrt(d)             for each vector c[i] that is seen
    p[i] = exp(s[i]) / (exp(sink[h]) + sum over i of exp(s[i]))
    y[t] = R_-t (sum over i of p[i] c[i])

Vectors are normalised and turned by their positions, R_i, so what y has of one is turned by R_i-t:
by how far it is away. No score exceeds sqrt(d), and no maximum has to be subtracted.

The share of an entry in a group is the sum of its p over the group's bytes and over heads, which is
what an indexer learns from. With D[t] = y[t] . dy[t] and do = R_t dy[t], the gradients are

    ds[i] = p[i] (do . c[i] - D),  dc[i] = sum over t, h of p[i] do + ds[i] q / sqrt(d)
    dq = sum over i of ds[i] c[i] / sqrt(d),  dsink = -sum over t of exp(sink) / total D

Sources: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, for choosing; the sink is that of OpenAI, gpt-oss.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.runtime.backend import chunk_elements


class Sight(NamedTuple):
    """What a byte sees."""

    window: int
    """W, last bytes, itself one of them."""
    ratio: int
    """m, bytes of an entry."""
    most: int
    """M, entries that are complete; those before the last so many are not seen."""
    start: int = 0
    """Position of the first query."""

    def group(self, index: int) -> int:
        """Count the entries that are complete for a query, by its index among the queries."""
        return (self.start + index + 1) // self.ratio

    def groups(self, length: int) -> range:
        """List the groups of so many queries."""
        return range(self.group(0), self.group(length - 1) + 1)


def compressed_attention_reference(
    x: Tensor,
    recent: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    sight: Sight,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute what `compressed_attention` must return, a byte and a head at a time in float64."""
    x, recent, entries, sink = (part.double() for part in (x, recent, entries, sink))
    (batch, length, heads, width), lead = x.shape, recent.shape[1] - x.shape[1]
    of_group = heads // recent.shape[2]
    rows, logs = [], []
    shares = None
    if chosen is not None:
        shares = torch.zeros(chosen.shape, dtype=torch.float64, device=x.device)
    for b in range(batch):
        for t in range(length):
            complete = (sight.start + t + 1) // sight.ratio
            if chosen is None:
                seen = list(range(max(0, complete - sight.most), complete))
            else:
                group = complete - (sight.start + 1) // sight.ratio
                seen = [j for j in chosen[b, group].tolist() if j >= 0]
            last = lead + t + 1
            angle = torch.complex(cos[t].double(), sin[t].double())
            for h in range(heads):
                q = x[b, t, h] / (x[b, t, h].square().mean() + eps).sqrt()
                q = torch.complex(*q.chunk(2)) * angle
                q = torch.cat((q.real, q.imag))
                keys = entries[b, seen, h // of_group]
                keys = torch.cat(
                    (keys, recent[b, max(0, last - sight.window) : last, h // of_group])
                )
                weights = (keys @ q / width**0.5).exp()
                total = weights.sum() + sink[h].exp()
                y = torch.complex(*(weights / total @ keys).chunk(2)) * angle.conj()
                rows.append(torch.cat((y.real, y.imag)))
                logs.append(total.log())
                if shares is not None:
                    shares[b, group, : len(seen)] += (weights[: len(seen)] / total).detach()
    shape = batch, length, heads
    return torch.stack(rows).view(*shape, width), torch.stack(logs).view(shape), shares


def compressed_attention_backward_reference(
    grad_y: Tensor,
    _y: Tensor,
    _logs: Tensor,
    x: Tensor,
    recent: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sink: Tensor,
    *rest,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `compressed_attention_backward` must return, by autograd of the reference."""
    leaves = [part.double().requires_grad_() for part in (x, recent, entries, sink)]
    with torch.enable_grad():
        y, *_ = compressed_attention_reference(*leaves[:3], chosen, leaves[3], *rest)
    found = torch.autograd.grad(y, leaves, grad_y.double(), allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    )


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (B, T, H, d) float32 by (T, d / 2) angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class _Part(NamedTuple):
    """Whole groups of queries, which the torch backend attends with at a time."""

    groups: slice
    """Among the groups of all queries."""
    queries: slice
    """Among the queries."""
    keys: slice
    """Rows of the last bytes that they see."""
    skipped: int
    """Places of the first group that no query is at."""


def _parts(length: int, lead: int, sight: Sight, number: int) -> Iterator[_Part]:
    """Cut so many queries into parts of so many groups."""
    groups = sight.groups(length)
    for first in range(groups.start, groups.stop, number):
        last = min(first + number, groups.stop)
        begin = first * sight.ratio - 1 - sight.start
        queries = slice(max(0, begin), min(length, last * sight.ratio - 1 - sight.start))
        keys = slice(max(0, queries.start + lead - sight.window + 1), queries.stop + lead)
        of_groups = slice(first - groups.start, last - groups.start)
        yield _Part(of_groups, queries, keys, max(0, -begin))


def _attend(
    x: Tensor,
    recent: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    sight: Sight,
    eps: float,
    part: _Part,
    lead: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend with the queries of a part; they, their keys and choices alone are given."""
    batch, length, heads, width = x.shape
    device, of_head = x.device, heads // recent.shape[2]
    q = functional.rms_norm(x.float(), (width,), eps=eps)
    q = _turn(q, cos, sin).to(x.dtype).float() * width**-0.5
    q = q.unflatten(2, (-1, of_head))  # (B, T, G, H / G, d)
    place = torch.arange(part.queries.start, part.queries.stop, device=device)
    at = torch.arange(part.keys.start, part.keys.stop, device=device) - lead
    near = (at <= place[:, None]) & (at > place[:, None] - sight.window)  # (T, S)
    recent, entries = recent.float(), entries.float()
    scores = [torch.einsum("btghd,bsgd->btghs", q, recent)]
    masks = [near[None, :, None, None]]
    complete = (sight.start + place + 1) // sight.ratio
    if chosen is None:
        number = torch.arange(entries.shape[1], device=device)
        seen = (number < complete[:, None]) & (number >= complete[:, None] - sight.most)
        scores.append(torch.einsum("btghd,bjgd->btghj", q, entries))
        masks.append(seen[None, :, None, None])
    else:
        mine = chosen[:, complete - complete[0]].long()  # (B, T, k)
        rows = torch.arange(batch, device=device)[:, None, None]
        entries = entries[rows, mine.clamp(min=0)]  # (B, T, k, G, d)
        scores.append(torch.einsum("btghd,btkgd->btghk", q, entries))
        masks.append((mine >= 0)[:, :, None, None])
    weights = [s.masked_fill(~m, -torch.inf).exp() for s, m in zip(scores, masks, strict=True)]
    sums = sum(weight.sum(dim=-1) for weight in weights)
    total = sums + sink.float().exp().view(-1, of_head)
    of_recent, of_entries = (weight / total[..., None] for weight in weights)
    y = torch.einsum("btghs,bsgd->btghd", of_recent, recent)
    if chosen is None:
        y = y + torch.einsum("btghj,bjgd->btghd", of_entries, entries)
        shares = None
    else:
        y = y + torch.einsum("btghk,btkgd->btghd", of_entries, entries)
        after = (part.groups.stop - part.groups.start) * sight.ratio - part.skipped - length
        shares = of_entries.sum(dim=(2, 3))  # (B, T, k)
        shares = functional.pad(shares, (0, 0, part.skipped, after))
        shares = shares.unflatten(1, (-1, sight.ratio)).sum(dim=2)
    y = _turn(y.flatten(2, 3), cos, -sin).to(x.dtype)
    return y, total.log().flatten(2), shares


ELEMENTS = 1 << 22
"""Of the largest tensor of a part."""


def _number(x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sight: Sight) -> int:
    """Choose how many groups the torch backend takes at a time."""
    batch, _, heads, _ = x.shape
    if chosen is None:
        of_query = batch * heads * (entries.shape[1] + sight.window)
    else:
        of_query = batch * max(
            chosen.shape[2] * recent.shape[2] * recent.shape[3], heads * sight.window
        )
    return max(1, chunk_elements(ELEMENTS) // max(1, of_query * sight.ratio))


def _compressed_attention_torch(x, recent, entries, chosen, sink, cos, sin, sight, eps):
    (batch, length, heads, _), lead = x.shape, recent.shape[1] - x.shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    logs = torch.empty(batch, length, heads, dtype=torch.float32, device=x.device)
    shares = None if chosen is None else torch.empty(chosen.shape, device=x.device)
    for part in _parts(length, lead, sight, _number(x, recent, entries, chosen, sight)):
        own = None if chosen is None else chosen[:, part.groups]
        found = _attend(
            x[:, part.queries], recent[:, part.keys], entries, own, sink,
            cos[part.queries], sin[part.queries], sight, eps, part, lead,
        )  # fmt: skip
        y[:, part.queries], logs[:, part.queries] = found[:2]
        if shares is not None:
            shares[:, part.groups] = found[2]
    return y, logs, shares


def _compressed_attention_backward_torch(
    grad_y, y, logs, x, recent, entries, chosen, sink, cos, sin, sight, eps
):
    length, lead = x.shape[1], recent.shape[1] - x.shape[1]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = [torch.zeros(t.shape, device=x.device) for t in (recent, entries, sink)]
    for part in _parts(length, lead, sight, _number(x, recent, entries, chosen, sight)):
        own = None if chosen is None else chosen[:, part.groups]
        given = x[:, part.queries], recent[:, part.keys], entries, sink
        leaves = [t.detach().float().requires_grad_() for t in given]
        with torch.enable_grad():
            y, *_ = _attend(
                *leaves[:3], own, leaves[3], cos[part.queries], sin[part.queries],
                sight, eps, part, lead,
            )  # fmt: skip
        grads = torch.autograd.grad(y, leaves, grad_y[:, part.queries].float())
        grad_x[:, part.queries] = grads[0].to(x.dtype)
        sums[0][:, part.keys] += grads[1]
        sums[1] += grads[2]
        sums[2] += grads[3]
    return grad_x, *sums


def compressed_attention(
    x: Tensor,
    recent: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    sight: Sight,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend with queries at positions one behind the other, that of the first in `sight.start`.

    Args:
        x: (B, T, H, d) float32 or bfloat16, d even: queries as they were projected.
        recent: (B, S, G, d) like it, G a divisor of H: last bytes, normalised and turned. The last
            one is that of the last query; S is T and as many before it as there are or are seen.
        entries: (B, E, G, d) like it: entry j is that of positions j m to j m + m - 1, normalised
            and turned; there are all that a query sees.
        chosen: (B, N, k) int32, k at most E: numbers of entries for each group of
            `sight.groups(T)`, those that are none, -1, behind the others. None is all that are
            complete.
        sink: (H,) float32.
        cos: (T, d / 2) float32, of the positions of the queries.
        sin: like `cos`.
        sight: what a byte sees.
        eps: added to the mean square of a query.

    Returns:
        y, (B, T, H, d) in the dtype of x; the logarithms of the totals, (B, T, H) float32; and
        shares of the chosen entries, (B, N, k) float32, or None where nothing was chosen.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    _check(x, recent, entries, chosen, sink, cos, sin, sight)
    return _compressed_attention_torch(x, recent, entries, chosen, sink, cos, sin, sight, eps)


def compressed_attention_backward(
    grad_y: Tensor,
    y: Tensor,
    logs: Tensor,
    x: Tensor,
    recent: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    sight: Sight,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Propagate a gradient back through `compressed_attention`, whose other arguments they are.

    Args:
        grad_y: (B, T, H, d) in the dtype of x.
        y: what it returned.
        logs: what it returned.
        x: what it was given.
        recent: likewise.
        entries: likewise.
        chosen: likewise.
        sink: likewise.
        cos: likewise.
        sin: likewise.
        sight: likewise.
        eps: likewise.

    Returns:
        Gradients of x in its dtype, and of recent, entries and sink, float32.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    _check(x, recent, entries, chosen, sink, cos, sin, sight)
    for part in (grad_y, y):
        if part.shape != x.shape or part.dtype != x.dtype:
            got = f"{part.dtype} {tuple(part.shape)}"
            raise ValueError(f"{got} does not fit {x.dtype} {tuple(x.shape)}")
    if logs.dtype != torch.float32 or logs.shape != x.shape[:3]:
        raise ValueError(f"totals {logs.dtype} {tuple(logs.shape)} do not fit {tuple(x.shape)}")
    rest = (x, recent, entries, chosen, sink, cos, sin, sight, eps)
    return _compressed_attention_backward_torch(grad_y, y, logs, *rest)


def _check(x, recent, entries, chosen, sink, cos, sin, sight):
    got = f"{x.dtype} of shape {tuple(x.shape)}"
    if x.dtype not in (torch.float32, torch.bfloat16) or x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"need float32 or bfloat16 queries of an even width, got {got}")
    batch, length, heads, width = x.shape
    for vectors in (recent, entries):
        fits = vectors.dim() == 4 and (len(vectors), vectors.shape[3]) == (batch, width)
        if vectors.dtype != x.dtype or not fits or heads % vectors.shape[2]:
            found = f"{vectors.dtype} {tuple(vectors.shape)}"
            raise ValueError(f"vectors {found} do not fit queries {got}")
    if recent.shape[1] < length or entries.shape[2] != recent.shape[2] or not length:
        raise ValueError(f"{recent.shape[1]} bytes do not fit {length} queries")
    groups = sight.groups(length)
    if entries.shape[1] < groups[-1]:
        raise ValueError(f"need {groups[-1]} entries, got {entries.shape[1]}")
    if chosen is not None:
        fits = chosen.dim() == 3 and chosen.shape[:2] == (batch, len(groups))
        if chosen.dtype != torch.int32 or not fits or chosen.shape[2] > entries.shape[1]:
            found = f"{chosen.dtype} {tuple(chosen.shape)}"
            raise ValueError(f"need int32 choices of {batch} x {len(groups)} groups, got {found}")
    if sink.dtype != torch.float32 or sink.shape != (heads,):
        raise ValueError(f"need float32 sinks of {heads} heads, got {tuple(sink.shape)}")
    for table in (cos, sin):
        if table.dtype != torch.float32 or table.shape != (length, width // 2):
            raise ValueError(f"table {table.dtype} {tuple(table.shape)} does not fit {got}")
