"""Compressed attention: to pooled entries of several bytes, to the last bytes, and to a sink.

A byte at position t sees the last W bytes, itself included, and entries of m bytes each. Of the
g = (t + 1) // m complete entries it sees the last M, or a selection of these: all bytes with the
same g form a group and share one selection. One vector is both key and value. n(x) is
x / sqrt(mean(x**2) + eps), R_t is the rotation by the angles of position t, and query head h uses
key head h // (H / G):

    q[t] = R_t n(x[t]),  s[i] = q[t] . c[i] / sqrt(d)             for each visible vector c[i]
    p[i] = exp(s[i]) / (exp(sink[h]) + sum over i of exp(s[i]))
    y[t] = R_-t (sum over i of p[i] c[i])

Vectors are normalised and rotated by their own positions, R_i, so the contribution of c[i] to y is
rotated by the distance, R_i-t. No score exceeds sqrt(d), so no maximum is subtracted.

The share of an entry in a group is the sum of its p over the group's bytes and heads. It is the
target that an indexer is trained on.

Sources: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, for the selection; OpenAI, gpt-oss, for the sink.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention import rotary_norm as rotary
from arbcli.kernels.runtime.backend import chunk_elements
from arbcli.kernels.runtime.operation import Operation, tl, triton


class Sight(NamedTuple):
    """Positions and entries that a byte attends to."""

    window: int
    """W, the number of recent bytes that a byte sees, itself included."""
    ratio: int
    """m, the number of bytes per entry."""
    max_entries: int
    """M, the maximum number of complete entries that a byte sees: the last ones."""
    start: int = 0
    """Position of the first query."""

    def group(self, index: int) -> int:
        """Compute the group of a query, its number of complete entries, from its index."""
        return (self.start + index + 1) // self.ratio

    def groups(self, length: int) -> range:
        """Return the range of groups of `length` queries."""
        return range(self.group(0), self.group(length - 1) + 1)


class Part(NamedTuple):
    """Consecutive groups of queries that the torch backend processes at a time."""

    groups: slice
    """Indices among the groups of all queries."""
    queries: slice
    """Indices among the queries."""
    keys: slice
    """Rows of the recent bytes that these queries see."""
    skipped: int
    """Positions of the first group before the first query."""


def parts_of(length: int, lead: int, sight: Sight, number: int) -> Iterator[Part]:
    """Split the queries into parts of a given number of groups.

    Args:
        length: T, the number of queries.
        lead: S - T, the number of recent bytes before the first query.
        sight: positions and entries that a byte attends to.
        number: maximum number of groups in a part.
    """
    groups = sight.groups(length)
    for first in range(groups.start, groups.stop, number):
        last = min(first + number, groups.stop)
        begin = first * sight.ratio - 1 - sight.start
        queries = slice(max(0, begin), min(length, last * sight.ratio - 1 - sight.start))
        keys = slice(max(0, queries.start + lead - sight.window + 1), queries.stop + lead)
        yield Part(slice(first - groups.start, last - groups.start), queries, keys, max(0, -begin))


def attend_part(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sink: Tensor, cos: Tensor,
    sin: Tensor, sight: Sight, eps: float, part: Part, lead: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Attend with the queries of one part; tensors are slices of those of `compressed_attention`.

    Args:
        x: (B, t, H, d), the queries `part.queries`.
        recent: (B, s, G, d), the recent bytes `part.keys`.
        entries: (B, E, G, d), all entries.
        chosen: (B, n, k) int32, the selections of `part.groups`; None for all entries.
        sink: (H,) float32.
        cos: (t, d / 2) float32.
        sin: like `cos`.
        sight: positions and entries that a byte attends to.
        eps: added to the mean square of a query.
        part: the part.
        lead: number of recent bytes before the first query of all.

    Returns:
        Results (B, t, H, d) in the dtype of x, logarithms of the denominators (B, t, H) float32,
        and shares (B, n, k) float32, or None without `chosen`.
    """
    batch, length, heads, width = x.shape
    device, heads_per_kv = x.device, heads // recent.shape[2]
    q = functional.rms_norm(x.float(), (width,), eps=eps)
    cos, sin = cos[:, None], sin[:, None]
    q = rotary.rotate(q, cos, sin).to(x.dtype).float() * width**-0.5
    q = q.unflatten(2, (-1, heads_per_kv))  # (B, T, G, H / G, d)
    place = torch.arange(part.queries.start, part.queries.stop, device=device)
    at = torch.arange(part.keys.start, part.keys.stop, device=device) - lead
    near = (at <= place[:, None]) & (at > place[:, None] - sight.window)  # (T, S)
    recent, entries = recent.float(), entries.float()
    scores = [torch.einsum("btghd,bsgd->btghs", q, recent)]
    masks = [near[None, :, None, None]]
    complete = (sight.start + place + 1) // sight.ratio
    if chosen is None:
        number = torch.arange(entries.shape[1], device=device)
        seen = (number < complete[:, None]) & (number >= complete[:, None] - sight.max_entries)
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
    total = sums + sink.float().exp().view(-1, heads_per_kv)
    recent_shares, entry_shares = (weight / total[..., None] for weight in weights)
    y = torch.einsum("btghs,bsgd->btghd", recent_shares, recent)
    if chosen is None:
        y = y + torch.einsum("btghj,bjgd->btghd", entry_shares, entries)
        shares = None
    else:
        y = y + torch.einsum("btghk,btkgd->btghd", entry_shares, entries)
        after = (part.groups.stop - part.groups.start) * sight.ratio - part.skipped - length
        shares = entry_shares.sum(dim=(2, 3))  # (B, T, k)
        shares = functional.pad(shares, (0, 0, part.skipped, after))
        shares = shares.unflatten(1, (-1, sight.ratio)).sum(dim=2)
    y = rotary.rotate(y.flatten(2, 3), cos, -sin).to(x.dtype)
    return y, total.log().flatten(2), shares


ELEMENTS = 1 << 22
"""Maximum number of elements of a part's largest tensor."""


def groups_of_part(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sight: Sight
) -> int:
    """Choose the number of groups that the torch backend processes at a time.

    The arguments are those of `compressed_attention`.
    """
    batch, _, heads, _ = x.shape
    if chosen is None:
        query_elements = batch * heads * (entries.shape[1] + sight.window)
    else:
        query_elements = batch * max(
            chosen.shape[2] * recent.shape[2] * recent.shape[3], heads * sight.window
        )
    return max(1, chunk_elements(ELEMENTS) // max(1, query_elements * sight.ratio))


def _compressed_attention_torch(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sink: Tensor, cos: Tensor,
    sin: Tensor, sight: Sight, eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    (batch, length, heads, _), lead = x.shape, recent.shape[1] - x.shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    logs = torch.empty(batch, length, heads, dtype=torch.float32, device=x.device)
    shares = None if chosen is None else torch.empty(chosen.shape, device=x.device)
    for part in parts_of(length, lead, sight, groups_of_part(x, recent, entries, chosen, sight)):
        chosen_here = None if chosen is None else chosen[:, part.groups]
        results = attend_part(
            x[:, part.queries], recent[:, part.keys], entries, chosen_here, sink,
            cos[part.queries], sin[part.queries], sight, eps, part, lead,
        )  # fmt: skip
        y[:, part.queries], logs[:, part.queries], share = results
        if shares is not None and share is not None:
            shares[:, part.groups] = share
    return y, logs, shares


@triton.jit
def load_queries(
    x_ptr, cos_ptr, sin_ptr, t, h, mask, stride_t, stride_h,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Load both halves of queries, cosines and sines: [ROWS, BLOCK_H] float32 each."""
    offs = tl.arange(0, BLOCK_H)[None, :]
    both = mask[:, None] & (offs < HALF)
    ptrs = x_ptr + (t.to(tl.int64) * stride_t + h * stride_h)[:, None] + offs
    first, second = rotary.load_halves(ptrs, both, HALF)
    cos, sin = rotary.load_angles(cos_ptr, sin_ptr, t[:, None] * HALF + offs, both)
    return first, second, cos, sin


@triton.jit
def load_vectors(ptr, rows, mask, stride, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load both halves of the vectors at `rows`: [BLOCK_N, BLOCK_H] each."""
    offs = tl.arange(0, BLOCK_H)[None, :]
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + offs
    both = mask[:, None] & (offs < HALF)
    return tl.load(ptrs, mask=both, other=0), tl.load(ptrs + HALF, mask=both, other=0)


@triton.jit
def queries_of_program(
    T, SHIFT, HEADS_PER_KV: tl.constexpr, KV: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, OF_KV: tl.constexpr,
):  # fmt: skip
    """Map a program to rows: queries of one head each, with heads that share keys side by side.

    Returns:
        Indices of text, key head, block and part; position and head of each row, and whether there
        is such a query, [ROWS]; the first and the last position.
    """
    block, b = tl.program_id(0), (tl.program_id(1) // KV).to(tl.int64)
    kv, part = tl.program_id(1) % KV, 0
    if PARTS > 1:
        part = tl.program_id(2)
    row = part * ROWS + tl.arange(0, ROWS)
    place, head = row // OF_KV, row % OF_KV
    first = block * QUERIES + SHIFT
    t, h = first + place, kv * HEADS_PER_KV + head
    valid = (place < QUERIES) & (head < HEADS_PER_KV) & (t >= 0) & (t < T)
    low, high = tl.maximum(first, 0), tl.minimum(first + QUERIES, T) - 1
    return b, kv, block, part, t, h, valid, low, high


@triton.jit
def entries_at(chosen_ptr, start, offs_n, end, complete, MOST, CHOSEN: tl.constexpr):
    """Return indices of entries, which of them there are, and which rows see which."""
    if CHOSEN:
        j = tl.load(chosen_ptr + start + offs_n, mask=start + offs_n < end, other=-1)
        there = j >= 0
        seen = there[None, :]
    else:
        j = start + offs_n
        there = j < end
        seen = (j[None, :] < complete[:, None]) & (j[None, :] >= complete[:, None] - MOST)
    return j, there, seen


@triton.jit
def scores_of(q1, q2, k1, k2, scale, PRECISION: tl.constexpr):
    """Multiply queries by vectors, both given as halves: [ROWS, BLOCK_N] float32."""
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    return tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION) * scale


@triton.jit
def _compressed_attention_kernel(
    x_ptr, recent_ptr, entries_ptr, chosen_ptr, sink_ptr, cos_ptr, sin_ptr,
    y_ptr, logs_ptr, shares_ptr,
    T, LEAD, NUMBER, SIZE, START, SHIFT, WINDOW, MOST, RATIO, scale, eps,
    stride_xb, stride_xt, stride_xh, stride_rb, stride_rs, stride_rg, stride_eb, stride_ej,
    stride_eg,
    HEADS: tl.constexpr, KV: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, OF_KV: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, CHOSEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b, kv, block, part, t, h, valid, low, high = queries_of_program(
        T, SHIFT, HEADS // KV, KV, QUERIES, ROWS, PARTS, OF_KV
    )
    # normalise and rotate the queries, as halves
    x1, x2, cos, sin = load_queries(
        x_ptr + b * stride_xb, cos_ptr, sin_ptr, t, h, valid, stride_xt, stride_xh, HALF, BLOCK_H
    )
    r = rotary.inverse_rms(x1, x2, eps, HALF)[:, None]
    dtype = x_ptr.dtype.element_ty
    q1 = ((x1 * cos - x2 * sin) * r).to(dtype)
    q2 = ((x1 * sin + x2 * cos) * r).to(dtype)

    # recent bytes: those of the window of any query of the block, masked for each
    total = tl.zeros((ROWS,), dtype=tl.float32)
    y1 = tl.zeros((ROWS, BLOCK_H), dtype=tl.float32)
    y2 = tl.zeros((ROWS, BLOCK_H), dtype=tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    recent_ptr += b * stride_rb + kv * stride_rg
    for start in range(tl.maximum(low + LEAD - WINDOW + 1, 0), high + LEAD + 1, BLOCK_N):
        s = start + offs_n
        k1, k2 = load_vectors(recent_ptr, s, s <= high + LEAD, stride_rs, HALF, BLOCK_H)
        ago = t[:, None] + LEAD - s[None, :]
        p = tl.exp(scores_of(q1, q2, k1, k2, scale, PRECISION))
        p = tl.where((ago >= 0) & (ago < WINDOW), p, 0)
        total += tl.sum(p, axis=1)
        p = p.to(dtype)
        y1 = tl.dot(p, k1, y1, input_precision=PRECISION)
        y2 = tl.dot(p, k2, y2, input_precision=PRECISION)
    # entries: the chosen ones of the group, or all that are complete and in reach
    entries_ptr += b * stride_eb + kv * stride_eg
    complete = (START + t + 1) // RATIO
    if CHOSEN:
        chosen_ptr += (b * NUMBER + block) * SIZE
        begin, end = 0, SIZE
    else:
        begin = tl.maximum((START + low + 1) // RATIO - MOST, 0)
        end = (START + high + 1) // RATIO
    for start in range(begin, end, BLOCK_N):
        j, there, seen = entries_at(chosen_ptr, start, offs_n, end, complete, MOST, CHOSEN)
        k1, k2 = load_vectors(entries_ptr, j, there, stride_ej, HALF, BLOCK_H)
        p = tl.where(seen, tl.exp(scores_of(q1, q2, k1, k2, scale, PRECISION)), 0)
        total += tl.sum(p, axis=1)
        p = p.to(dtype)
        y1 = tl.dot(p, k1, y1, input_precision=PRECISION)
        y2 = tl.dot(p, k2, y2, input_precision=PRECISION)
    # the sink adds to the sum of weights only
    total += tl.exp(tl.load(sink_ptr + h, mask=valid, other=0))
    out = (b * T + t) * HEADS + h
    tl.store(logs_ptr + out, tl.log(total), mask=valid)
    # values were rotated like keys: rotate the output back by the query's angle
    y1, y2 = y1 / total[:, None], y2 / total[:, None]
    offs = tl.arange(0, BLOCK_H)[None, :]
    ptrs = y_ptr + out[:, None] * (2 * HALF) + offs
    both = valid[:, None] & (offs < HALF)
    rotary.store_rotated_back(ptrs, y1, y2, cos, sin, both, HALF)
    # shares of the chosen entries, which train the indexer, need the total: weights again
    if CHOSEN:
        share = tl.where(valid, 1 / total, 0)[:, None]
        shares_ptr += (((b * KV + kv) * PARTS + part) * NUMBER + block) * SIZE
        for start in range(0, SIZE, BLOCK_N):
            at = start + offs_n
            j = tl.load(chosen_ptr + at, mask=at < SIZE, other=-1)
            k1, k2 = load_vectors(entries_ptr, j, j >= 0, stride_ej, HALF, BLOCK_H)
            p = tl.exp(scores_of(q1, q2, k1, k2, scale, PRECISION)) * share
            entry_shares = tl.where(j >= 0, tl.sum(p, axis=0), 0)
            tl.store(shares_ptr + at, entry_shares, mask=at < SIZE)


class Tiling(NamedTuple):
    """Partition of queries and keys among programs."""

    queries: int
    """Positions per program; with selected entries, the positions of a group."""
    shift: int
    """Index of the first query of the first program; negative indices are masked."""
    programs: int
    """Number of programs per text and key head."""
    rows: int
    """Rows per program: `queries` * `heads_per_kv` / `parts`, rounded up to a power of two."""
    parts: int
    """Programs that share the heads and positions of `queries`; wide heads need more."""
    heads_per_kv: int
    """Query heads per key head, rounded up to a power of two."""
    block_h: int
    """Half the width of a head, rounded up to a power of two."""


def most_rows(block_h: int) -> int:
    """Return the maximum rows of a product: 64, and fewer for wide heads."""
    return min(64, 64 * 64 // block_h)


def tiling(x: Tensor, recent: Tensor, chosen: Tensor | None, sight: Sight) -> Tiling:
    """Choose the number of queries per program, from arguments of `compressed_attention`."""
    length, heads, width = x.shape[1:]
    heads_per_kv = triton.next_power_of_2(heads // recent.shape[2])
    block_h = max(16, triton.next_power_of_2(width // 2))
    queries, shift = max(1, most_rows(block_h) // heads_per_kv), 0
    programs = triton.cdiv(length, queries)
    if chosen is not None:
        queries, programs = sight.ratio, chosen.shape[1]
        shift = sight.group(0) * sight.ratio - 1 - sight.start
    rows = max(16, triton.next_power_of_2(queries) * heads_per_kv)  # the smallest size of a product
    parts = max(1, rows // most_rows(block_h))
    return Tiling(queries, shift, programs, rows // parts, parts, heads_per_kv, block_h)


def _compressed_attention_triton(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sink: Tensor, cos: Tensor,
    sin: Tensor, sight: Sight, eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    (batch, length, heads, width), kv = x.shape, recent.shape[2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    logs = torch.empty(batch, length, heads, dtype=torch.float32, device=x.device)
    x, recent, entries = rotary.dense_heads(x, recent, entries)
    sink, cos, sin = (part.contiguous() for part in (sink, cos, sin))
    tile = tiling(x, recent, chosen, sight)
    shares, number, size = logs, 0, 0
    if chosen is not None:
        chosen, (number, size) = chosen.contiguous(), chosen.shape[1:]
        shares = torch.empty(
            batch, kv * tile.parts, number, size, dtype=torch.float32, device=x.device
        )
    _compressed_attention_kernel[(tile.programs, batch * kv, tile.parts)](
        x, recent, entries, chosen, sink, cos, sin, y, logs, shares,
        length, recent.shape[1] - length, number, size, sight.start, tile.shift, sight.window,
        sight.max_entries, sight.ratio, width**-0.5, eps,
        *x.stride()[:3], *recent.stride()[:3], *entries.stride()[:3],
        HEADS=heads, KV=kv, QUERIES=tile.queries, ROWS=tile.rows, PARTS=tile.parts,
        OF_KV=tile.heads_per_kv, HALF=width // 2, BLOCK_H=tile.block_h, BLOCK_N=block_n(x),
        CHOSEN=chosen is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=num_warps(x, tile),
    )  # fmt: skip
    if chosen is None:
        return y, logs, None
    return y, logs, shares[:, 0] if shares.shape[1] == 1 else shares.sum(dim=1)


def block_n(x: Tensor, limit: int = 64) -> int:
    """Choose the vectors per product with x, (..., d); few in float32, which needs registers."""
    if x.dtype == torch.float32:
        return 16
    return min(limit, 32 if x.shape[-1] > 128 else 64)


def num_warps(x: Tensor, tile: Tiling) -> int:
    """Choose the warps per program for queries x, (..., d), such that no register spills."""
    large = tile.block_h >= 128 or tile.rows * tile.block_h > 64 * 64 or x.dtype == torch.float32
    return 8 if large else 4


ATTENTION_WHERE = (
    "D % 2 == 0",
    "G > 0 and H % G == 0",
    "0 < T <= S",
    "E >= sight.groups(T)[-1]",
    "chosen is None or K <= E",
)

compressed_attention = Operation(
    "compressed_attention", _compressed_attention_triton, _compressed_attention_torch,
    "x: real[B, T, H, D]; recent: real[B, S, G, D]; entries: real[B, E, G, D]; chosen: int32[B, "
    "len(sight.groups(T)), K]?; sink: float32[H]; cos, sin: float32[T, D // 2]; sight; eps",
    where=ATTENTION_WHERE,
)  # fmt: skip
"""Attend with queries at consecutive positions from `sight.start` on.

Args:
    x: (B, T, H, d) float32 or bfloat16, d even: projected queries.
    recent: (B, S, G, d) like x, G a divisor of H: recent bytes, normalised and rotated. The last
        one is the byte of the last query; S is T plus the visible bytes before the first query.
    entries: (B, E, G, d) like x: entry j pools positions j m to j m + m - 1, normalised and
        rotated; E covers all entries that a query sees.
    chosen: (B, N, k) int32, k at most E: indices of entries for each group of
        `sight.groups(T)`, padded with -1. None selects all complete entries.
    sink: (H,) float32.
    cos: (T, d / 2) float32, for the positions of the queries.
    sin: like `cos`.
    sight: positions and entries that a byte sees.
    eps: added to the mean square of a query.

Returns:
    y, (B, T, H, d) in the dtype of x; the logarithms of the denominators of p, (B, T, H)
    float32; and the shares of the selected entries, (B, N, k) float32, or None without `chosen`.
"""
