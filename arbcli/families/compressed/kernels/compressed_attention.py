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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.rotation import normalise_reference, rotate, rotate_reference
from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, INT32, Arguments, Array, Number
from arbcli.kernels.runtime.backend import chunk_elements
from arbcli.kernels.runtime.inputs import normals
from arbcli.kernels.runtime.operation import Gate, Operation, Timing, cases_of


class Sight(NamedTuple):
    """Positions and entries that a byte attends to."""

    window: int
    """W, the number of recent bytes that a byte sees, itself included."""
    ratio: int
    """m, the number of bytes per entry."""
    most: int
    """M, the maximum number of complete entries that a byte sees: the last ones."""
    start: int = 0
    """Position of the first query."""

    def group(self, index: int) -> int:
        """Compute the group of a query, its number of complete entries, from its index."""
        return (self.start + index + 1) // self.ratio

    def groups(self, length: int) -> range:
        """Return the range of groups of `length` queries."""
        return range(self.group(0), self.group(length - 1) + 1)


def compressed_attention_reference(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sink: Tensor, cos: Tensor,
    sin: Tensor, sight: Sight, eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute `compressed_attention` in float64, one byte at a time."""
    x, recent, entries, sink = (part.double() for part in (x, recent, entries, sink))
    (batch, length, heads, width), lead = x.shape, recent.shape[1] - x.shape[1]
    owner = [head // (heads // recent.shape[2]) for head in range(heads)]
    rows, logs, shares = [], [], None
    if chosen is not None:
        shares = torch.zeros(chosen.shape, dtype=torch.float64, device=x.device)
        picked = chosen.tolist()
    for b in range(batch):
        for t in range(length):
            complete = (sight.start + t + 1) // sight.ratio
            if chosen is None:
                seen = list(range(max(0, complete - sight.most), complete))
            else:
                group = complete - (sight.start + 1) // sight.ratio
                seen = [j for j in picked[b][group] if j >= 0]
            last = lead + t + 1
            q = rotate_reference(normalise_reference(x[b, t], eps), cos[t], sin[t])  # (H, d)
            near = recent[b, max(0, last - sight.window) : last]
            keys = torch.cat((entries[b, seen], near))[:, owner]  # (n, H, d)
            weights = ((keys * q).sum(dim=-1) / width**0.5).exp()
            total = weights.sum(dim=0) + sink.exp()
            y = (weights[..., None] / total[:, None] * keys).sum(dim=0)
            rows.append(rotate_reference(y, cos[t], -sin[t]))
            logs.append(total.log())
            if shares is not None:
                shares[b, group, : len(seen)] += (weights / total)[: len(seen)].sum(dim=1).detach()
    shape = batch, length, heads
    return torch.stack(rows).view(*shape, width), torch.stack(logs).view(shape), shares


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
    """Split the queries into parts of a given number of groups."""
    groups = sight.groups(length)
    for first in range(groups.start, groups.stop, number):
        last = min(first + number, groups.stop)
        begin = first * sight.ratio - 1 - sight.start
        queries = slice(max(0, begin), min(length, last * sight.ratio - 1 - sight.start))
        keys = slice(max(0, queries.start + lead - sight.window + 1), queries.stop + lead)
        of_groups = slice(first - groups.start, last - groups.start)
        yield Part(of_groups, queries, keys, max(0, -begin))


def attend_part(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sink: Tensor, cos: Tensor,
    sin: Tensor, sight: Sight, eps: float, part: Part, lead: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Attend with the queries of one part; all arguments are sliced to this part."""
    batch, length, heads, width = x.shape
    device, of_head = x.device, heads // recent.shape[2]
    q = functional.rms_norm(x.float(), (width,), eps=eps)
    cos, sin = cos[:, None], sin[:, None]
    q = rotate(q, cos, sin).to(x.dtype).float() * width**-0.5
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
    y = rotate(y.flatten(2, 3), cos, -sin).to(x.dtype)
    return y, total.log().flatten(2), shares


ELEMENTS = 1 << 22
"""Maximum number of elements of a part's largest tensor."""


def groups_of_part(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sight: Sight
) -> int:
    """Choose the number of groups that the torch backend processes at a time."""
    batch, _, heads, _ = x.shape
    if chosen is None:
        of_query = batch * heads * (entries.shape[1] + sight.window)
    else:
        of_query = batch * max(
            chosen.shape[2] * recent.shape[2] * recent.shape[3], heads * sight.window
        )
    return max(1, chunk_elements(ELEMENTS) // max(1, of_query * sight.ratio))


def _compressed_attention_torch(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sink: Tensor, cos: Tensor,
    sin: Tensor, sight: Sight, eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    (batch, length, heads, _), lead = x.shape, recent.shape[1] - x.shape[1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    logs = torch.empty(batch, length, heads, dtype=torch.float32, device=x.device)
    shares = None if chosen is None else torch.empty(chosen.shape, device=x.device)
    for part in parts_of(length, lead, sight, groups_of_part(x, recent, entries, chosen, sight)):
        own = None if chosen is None else chosen[:, part.groups]
        found = attend_part(
            x[:, part.queries], recent[:, part.keys], entries, own, sink,
            cos[part.queries], sin[part.queries], sight, eps, part, lead,
        )  # fmt: skip
        y[:, part.queries], logs[:, part.queries], share = found
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
    first = tl.load(ptrs, mask=both, other=0).to(tl.float32)
    second = tl.load(ptrs + HALF, mask=both, other=0).to(tl.float32)
    table = t[:, None] * HALF + offs
    cos = tl.load(cos_ptr + table, mask=both, other=0)
    sin = tl.load(sin_ptr + table, mask=both, other=0)
    return first, second, cos, sin


@triton.jit
def load_vectors(ptr, rows, mask, stride, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load both halves of the vectors at `rows`: [BLOCK_N, BLOCK_H] each."""
    offs = tl.arange(0, BLOCK_H)[None, :]
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + offs
    both = mask[:, None] & (offs < HALF)
    return tl.load(ptrs, mask=both, other=0), tl.load(ptrs + HALF, mask=both, other=0)


@triton.jit
def scores_of(q1, q2, k1, k2, scale, PRECISION: tl.constexpr):
    """Multiply queries by vectors, both given as halves: [ROWS, BLOCK_N] float32."""
    found = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    return tl.dot(q2, tl.trans(k2), found, input_precision=PRECISION) * scale


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
    block, b = tl.program_id(0), (tl.program_id(1) // KV).to(tl.int64)
    kv, part = tl.program_id(1) % KV, 0
    if PARTS > 1:
        part = tl.program_id(2)
    of_kv: tl.constexpr = HEADS // KV
    row = part * ROWS + tl.arange(0, ROWS)
    place, own = row // OF_KV, row % OF_KV
    first = block * QUERIES + SHIFT
    t, h = first + place, kv * of_kv + own
    valid = (place < QUERIES) & (own < of_kv) & (t >= 0) & (t < T)
    low, high = tl.maximum(first, 0), tl.minimum(first + QUERIES, T) - 1
    x1, x2, cos, sin = load_queries(
        x_ptr + b * stride_xb, cos_ptr, sin_ptr, t, h, valid, stride_xt, stride_xh, HALF, BLOCK_H
    )
    r = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF) + eps)[:, None]
    dtype = x_ptr.dtype.element_ty
    q1 = ((x1 * cos - x2 * sin) * r).to(dtype)
    q2 = ((x1 * sin + x2 * cos) * r).to(dtype)

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
    entries_ptr += b * stride_eb + kv * stride_eg
    complete = (START + t + 1) // RATIO
    if CHOSEN:
        chosen_ptr += (b * NUMBER + block) * SIZE
        begin, end = 0, SIZE
    else:
        begin = tl.maximum((START + low + 1) // RATIO - MOST, 0)
        end = (START + high + 1) // RATIO
    for start in range(begin, end, BLOCK_N):
        if CHOSEN:
            j = tl.load(chosen_ptr + start + offs_n, mask=start + offs_n < end, other=-1)
            there = j >= 0
            seen = there[None, :]
        else:
            j = start + offs_n
            there = j < end
            seen = (j[None, :] < complete[:, None]) & (j[None, :] >= complete[:, None] - MOST)
        k1, k2 = load_vectors(entries_ptr, j, there, stride_ej, HALF, BLOCK_H)
        p = tl.where(seen, tl.exp(scores_of(q1, q2, k1, k2, scale, PRECISION)), 0)
        total += tl.sum(p, axis=1)
        p = p.to(dtype)
        y1 = tl.dot(p, k1, y1, input_precision=PRECISION)
        y2 = tl.dot(p, k2, y2, input_precision=PRECISION)
    total += tl.exp(tl.load(sink_ptr + h, mask=valid, other=0))
    out = (b * T + t) * HEADS + h
    tl.store(logs_ptr + out, tl.log(total), mask=valid)
    y1, y2 = y1 / total[:, None], y2 / total[:, None]
    offs = tl.arange(0, BLOCK_H)[None, :]
    ptrs = y_ptr + out[:, None] * (2 * HALF) + offs
    both = valid[:, None] & (offs < HALF)
    tl.store(ptrs, (y1 * cos + y2 * sin).to(dtype), mask=both)
    tl.store(ptrs + HALF, (y2 * cos - y1 * sin).to(dtype), mask=both)
    if CHOSEN:
        share = tl.where(valid, 1 / total, 0)[:, None]
        shares_ptr += (((b * KV + kv) * PARTS + part) * NUMBER + block) * SIZE
        for start in range(0, SIZE, BLOCK_N):
            at = start + offs_n
            j = tl.load(chosen_ptr + at, mask=at < SIZE, other=-1)
            k1, k2 = load_vectors(entries_ptr, j, j >= 0, stride_ej, HALF, BLOCK_H)
            p = tl.exp(scores_of(q1, q2, k1, k2, scale, PRECISION)) * share
            found = tl.where(j >= 0, tl.sum(p, axis=0), 0)
            tl.store(shares_ptr + at, found, mask=at < SIZE)


class Tiling(NamedTuple):
    """Partition of queries and keys among programs."""

    queries: int
    """Positions per program; with selected entries, the positions of a group."""
    shift: int
    """Index of the first query of the first program; negative indices are masked."""
    programs: int
    """Number of programs per text and key head."""
    rows: int
    """Rows per program: `queries` * `of_kv` / `parts`, rounded up to a power of two."""
    parts: int
    """Programs that share the heads and positions of `queries`; wide heads need more."""
    of_kv: int
    """Query heads per key head, rounded up to a power of two."""
    block_h: int
    """Half the width of a head, rounded up to a power of two."""


def most_rows(block_h: int) -> int:
    """Return the maximum rows of a product: 64, and fewer for wide heads."""
    return min(64, 64 * 64 // block_h)


def tiling(x: Tensor, recent: Tensor, chosen: Tensor | None, sight: Sight) -> Tiling:
    """Choose the number of queries per program."""
    length, heads, width = x.shape[1:]
    of_kv = triton.next_power_of_2(heads // recent.shape[2])
    block_h = max(16, triton.next_power_of_2(width // 2))
    queries, shift = max(1, most_rows(block_h) // of_kv), 0
    programs = triton.cdiv(length, queries)
    if chosen is not None:
        queries, programs = sight.ratio, chosen.shape[1]
        shift = sight.group(0) * sight.ratio - 1 - sight.start
    rows = max(16, triton.next_power_of_2(queries) * of_kv)  # the smallest size of a product
    parts = max(1, rows // most_rows(block_h))
    return Tiling(queries, shift, programs, rows // parts, parts, of_kv, block_h)


def _compressed_attention_triton(
    x: Tensor, recent: Tensor, entries: Tensor, chosen: Tensor | None, sink: Tensor, cos: Tensor,
    sin: Tensor, sight: Sight, eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    (batch, length, heads, width), kv = x.shape, recent.shape[2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    logs = torch.empty(batch, length, heads, dtype=torch.float32, device=x.device)
    x, recent, entries = (dense_rows(part) for part in (x, recent, entries))
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
        sight.most, sight.ratio, width**-0.5, eps,
        *x.stride()[:3], *recent.stride()[:3], *entries.stride()[:3],
        HEADS=heads, KV=kv, QUERIES=tile.queries, ROWS=tile.rows, PARTS=tile.parts,
        OF_KV=tile.of_kv, HALF=width // 2, BLOCK_H=tile.block_h, BLOCK_N=block_n(x),
        CHOSEN=chosen is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=num_warps(x, tile),
    )  # fmt: skip
    if chosen is None:
        return y, logs, None
    return y, logs, shares[:, 0] if shares.shape[1] == 1 else shares.sum(dim=1)


def dense_rows(x: Tensor) -> Tensor:
    """Make the last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def block_n(x: Tensor, most: int = 64) -> int:
    """Choose the vectors per product; few in float32, whose products need registers."""
    if x.dtype == torch.float32:
        return 16
    return min(most, 32 if x.shape[-1] > 128 else 64)


def num_warps(x: Tensor, tile: Tiling) -> int:
    """Choose the warps per program such that no register spills."""
    large = tile.block_h >= 128 or tile.rows * tile.block_h > 64 * 64 or x.dtype == torch.float32
    return 8 if large else 4


def random_sight(
    generator: torch.Generator, sight: Sight, batch: int, length: int, kept: int, shape: tuple
) -> tuple:
    """Draw the inputs of `compressed_attention` without its eps.

    Args:
        generator: a generator of the CPU.
        sight: positions and entries that a byte sees.
        batch: B.
        length: T.
        kept: number of bytes before the first query.
        shape: heads, key heads, head width, and number of selected entries; 0 selects all.
    """
    heads, kv, width, top_k = shape
    normal = normals(generator)
    entries = (sight.start + length) // sight.ratio
    x, angle = normal(batch, length, heads, width), 7 * normal(length, width // 2)
    vectors = [
        functional.rms_norm(normal(batch, number, kv, width), (width,))
        for number in (length + kept, entries)
    ]
    chosen = None
    if top_k:
        groups = sight.groups(length)
        complete = torch.arange(groups.start, groups.stop)[:, None]
        scores = torch.rand(batch, len(groups), entries, generator=generator)
        places = torch.arange(entries)
        unseen = (places >= complete) | (places < complete - sight.most)
        order = scores.masked_fill(unseen, -1).sort(-1, descending=True)
        size = min(top_k, entries)
        found = torch.where(order.values < 0, entries, order.indices)[..., :size].sort(-1).values
        chosen = torch.where(found == entries, -1, found).int()
    return x, *vectors, chosen, normal(heads), angle.cos(), angle.sin(), sight


SMALL = (
    (Sight(5, 4, 99), 2, 13, 0, (4, 2, 6, 2)), (Sight(5, 3, 99), 1, 13, 0, (4, 1, 10, 0)),
    (Sight(5, 4, 2, 9), 1, 7, 4, (2, 1, 66, 2)), (Sight(5, 4, 2, 9), 2, 7, 4, (2, 1, 4, 0)),
    (Sight(5, 4, 2), 1, 3, 0, (2, 1, 4, 2)), (Sight(9, 4, 99), 1, 41, 0, (12, 1, 64, 5)),
    (Sight(40, 4, 99, 30), 1, 41, 19, (12, 1, 64, 0)), (Sight(3, 9, 1), 1, 1, 0, (1, 1, 2, 0)),
    (Sight(4, 6, 3, 21), 1, 25, 3, (6, 3, 8, 3)), (Sight(3, 4, 99), 1, 9, 0, (72, 1, 4, 2)),
    (Sight(3, 4, 99), 1, 9, 0, (72, 1, 4, 0)),
)  # fmt: skip
"""(sight, B, T, earlier bytes, shape): ragged sizes, cached bytes, fewer entries than k."""
LARGE = (
    (Sight(128, 4, 4096), 1, 390, 0, (12, 1, 128, 64)),
    (Sight(128, 128, 9), 1, 390, 0, (12, 1, 128, 0)),
    (Sight(64, 4, 4096), 1, 260, 0, (8, 2, 64, 16)),
    (Sight(100, 4, 99), 1, 150, 0, (4, 1, 512, 20)),
    (Sight(128, 4, 4096, 16001), 1, 90, 127, (12, 1, 128, 128)),
    (Sight(20, 4, 99), 1, 50, 0, (12, 1, 512, 5)), (Sight(20, 4, 99), 1, 50, 0, (128, 1, 512, 5)),
    (Sight(20, 8, 99), 1, 50, 0, (128, 1, 512, 0)), (Sight(20, 4, 99), 1, 50, 0, (64, 1, 128, 5)),
)  # fmt: skip


def draw_cases(device: torch.device) -> Iterator[tuple[str, tuple]]:
    """Draw labels and inputs, with the eps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32) for shape in SMALL]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        both = (torch.float32, torch.bfloat16)
        shapes += [(*shape, dtype) for shape in LARGE for dtype in both]
    for sight, batch, length, kept, shape, dtype in shapes:
        x, recent, entries, *drawn = random_sight(generator, sight, batch, length, kept, shape)
        vectors = (part.to(device, dtype) for part in (x, recent, entries))
        rest = (part.to(device) if isinstance(part, Tensor) else part for part in drawn)
        seen = f"{shape[3]} of {entries.shape[1]}" if shape[3] else f"all {entries.shape[1]}"
        label = f"{batch}x{length} after {sight.start}, {shape[0]}/{shape[1]}x{shape[2]}, "
        label += f"{seen} entries of {sight.ratio}, last {sight.window}"
        label += " bf16" if dtype == torch.bfloat16 else ""
        yield label, (*vectors, *rest, 1e-6)


def draw_timed(device: torch.device) -> Iterator[tuple[str, tuple]]:
    """Draw labels and inputs for 16,384 bytes."""
    for sight, top_k in ((Sight(128, 4, 4096), 128), (Sight(128, 128, 128), 0)):
        generator = torch.Generator().manual_seed(0)
        x, *vectors = random_sight(generator, sight, 1, 16384, 0, (12, 1, 128, top_k))
        real = [part.to(device, torch.bfloat16) for part in (x, *vectors[:2])]
        rest = [part.to(device) if isinstance(part, Tensor) else part for part in vectors[2:]]
        yield f"16384 bytes, entries of {sight.ratio} bf16", (*real, *rest, 1e-6)


def _those_there_are(_inputs: tuple, found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(part for part in found if part is not None)


def _reference(*inputs: Any) -> tuple[Tensor, ...]:
    return _those_there_are(inputs, compressed_attention_reference(*inputs))


def _dense_attention(x: Tensor) -> Tensor:
    """Compute dense attention to all bytes, with the same number of products per byte."""
    q = x.view(*x.shape[:2], -1, 64)[:, :, :12].transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    for label, inputs in draw_timed(device):
        yield Timing(
            label, inputs,
            peer=partial(_dense_attention, inputs[0]),
            peer_name="torch's attention to all bytes, 12 heads of 64",
        )  # fmt: skip


GATE = Gate(
    relative=1e-5, peer_slack=0.5,
    reason="float32 sums; in bf16 weights are rounded before products, which torch's are not",
)  # fmt: skip


def draw_attention(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    """Draw the inputs of `compressed_attention`."""
    ratio, length = 2 + dice.below(5), 1 + min(m, dice.pick((1, 5, 60)))
    kept, window = dice.pick((0, 3)), dice.pick((1, 4, 200))
    start = kept + dice.below(9) if kept else 0
    sight = Sight(window, ratio, dice.pick((2, 10**4)), start)
    kv, width = dice.pick((1, 2)), 2 * min(1 + k, dice.pick((1, 9, 32)))
    shape = (kv * dice.pick((1, 3, 8)), kv, width, dice.pick((0, 1, 5, 40)))
    about = dice.seeded()
    x, recent, entries, *rest = random_sight(about, sight, dice.pick((1, 2)), length, kept, shape)
    vectors = (dice.view(part.to(dice.device, dice.dtype)) for part in (x, recent, entries))
    return (*vectors, *(_on(dice.device, part) for part in rest), 1e-6)


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


_VECTORS = Array("B, T, H, D")
ATTENTION: Arguments = {
    "x": _VECTORS,
    "recent": Array("B, S, G, D"),
    "entries": Array("B, E, G, D"),
    "chosen": Array("B, len(sight.groups(T)), K", INT32, optional=True),
    "sink": Array("H", FLOAT),
    "cos": Array("T, D // 2", FLOAT),
    "sin": Array("T, D // 2", FLOAT),
    "sight": Number(()),
    "eps": Number(()),
}
ATTENTION_WHERE = (
    "D % 2 == 0",
    "G > 0 and H % G == 0",
    "0 < T <= S",
    "E >= sight.groups(T)[-1]",
    "chosen is None or K <= E",
)

compressed_attention = Operation(
    "compressed_attention", _compressed_attention_triton, _compressed_attention_torch,
    _reference, cases_of(draw_cases), GATE, ATTENTION,
    where=ATTENTION_WHERE, compared=_those_there_are, draw=draw_attention, needs_rows=True,
    torch_is_peer=True, timings=_timings,
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
