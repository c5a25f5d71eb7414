"""Gradients of compressed attention.

With p[i] as in `compressed_attention`, D[t] = y[t] . dy[t] and do[t] = R_t dy[t]:

    ds[i] = p[i] (do . c[i] - D),  dc[i] = sum over t, h of p[i] do + ds[i] q / sqrt(d)
    dq = sum over i of ds[i] c[i] / sqrt(d),  dsink = -sum over t of exp(sink) / total D

dx follows from dq through rotation and norm. Sums over bytes have a fixed order, so gradients are
bitwise deterministic: a program loops over the bytes that see its block of vectors. With selected
entries, each group computes its own sums, and `sum_choices` adds them.
"""

import torch
from torch import Tensor

from arbcli.families.compressed.kernels.compressed_attention import (
    ATTENTION_WHERE,
    Sight,
    attend_part,
    block_n,
    entries_at,
    groups_of_part,
    load_queries,
    load_vectors,
    most_rows,
    num_warps,
    parts_of,
    queries_of_program,
    scores_of,
    tiling,
)
from arbcli.families.compressed.kernels.sum_choices import sum_choices
from arbcli.kernels.attention import rotary_norm as rotary
from arbcli.kernels.runtime.operation import Operation, tl, triton


def _compressed_attention_backward_torch(
    grad_y: Tensor, y: Tensor, logs: Tensor, x: Tensor, recent: Tensor, entries: Tensor,
    chosen: Tensor | None, sink: Tensor, cos: Tensor, sin: Tensor, sight: Sight, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    length, lead = x.shape[1], recent.shape[1] - x.shape[1]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = [torch.zeros(t.shape, device=x.device) for t in (recent, entries, sink)]
    grad_recent, grad_entries, grad_sink = sums
    for part in parts_of(length, lead, sight, groups_of_part(x, recent, entries, chosen, sight)):
        chosen_here = None if chosen is None else chosen[:, part.groups]
        sources = x[:, part.queries], recent[:, part.keys], entries, sink
        leaves = [t.detach().float().requires_grad_() for t in sources]
        with torch.enable_grad():
            y, *_ = attend_part(
                leaves[0], leaves[1], leaves[2], chosen_here, leaves[3],
                cos[part.queries], sin[part.queries], sight, eps, part, lead,
            )  # fmt: skip
        grads = torch.autograd.grad(y, leaves, grad_y[:, part.queries].float())
        grad_x[:, part.queries] = grads[0].to(x.dtype)
        grad_recent[:, part.keys] += grads[1]
        grad_entries += grads[2]
        grad_sink += grads[3]
    return grad_x, grad_recent, grad_entries, grad_sink


@triton.jit
def _rotate_gradients_kernel(
    grad_ptr, y_ptr, x_ptr, cos_ptr, sin_ptr, q_ptr, do_ptr, delta_ptr,
    num_rows, T, HEADS, eps,
    stride_xb, stride_xt, stride_xh,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = row < num_rows
    b, t, h = row // (T * HEADS), row // HEADS % T, row % HEADS
    offs = tl.arange(0, BLOCK_H)[None, :]
    both = mask[:, None] & (offs < HALF)
    x_rows = b.to(tl.int64) * stride_xb + t.to(tl.int64) * stride_xt + h * stride_xh
    rows = row.to(tl.int64) * (2 * HALF)
    # load queries before rotation, output gradients and outputs, as halves
    cos = tl.load(cos_ptr + t[:, None] * HALF + offs, mask=both, other=0)
    sin = tl.load(sin_ptr + t[:, None] * HALF + offs, mask=both, other=0)
    x1, x2 = rotary.load_halves(x_ptr + x_rows[:, None] + offs, both, HALF)
    at = rows[:, None] + offs
    g1, g2 = rotary.load_halves(grad_ptr + at, both, HALF)
    y1, y2 = rotary.load_halves(y_ptr + at, both, HALF)
    # D, then queries and output gradients in the rotated frame of keys
    tl.store(delta_ptr + row, tl.sum(g1 * y1 + g2 * y2, axis=1), mask=mask)
    r = rotary.inverse_rms(x1, x2, eps, HALF)[:, None]
    rotary.store_rotated(q_ptr + at, x1, x2, cos, sin, r, both, HALF)
    rotary.store_rotated(do_ptr + at, g1, g2, cos, sin, 1.0, both, HALF)


@triton.jit
def _slopes(q1, q2, do1, do2, k1, k2, log, delta, seen, scale, PRECISION: tl.constexpr):
    """Compute p and ds / sqrt(d), [ROWS, BLOCK_N] float32."""
    p = tl.exp(scores_of(q1, q2, k1, k2, scale, PRECISION) - log[:, None])
    p = tl.where(seen, p, 0)
    dp = scores_of(do1, do2, k1, k2, 1.0, PRECISION)
    return p, p * (dp - delta[:, None]) * scale


@triton.jit
def _grad_queries_kernel(
    q_ptr, do_ptr, x_ptr, recent_ptr, entries_ptr, chosen_ptr, cos_ptr, sin_ptr, logs_ptr,
    delta_ptr, grad_x_ptr, pairs_ptr,
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
    # queries, output gradients and row sums that the first kernel prepared
    rows = (b * T + t) * HEADS + h
    q1, q2 = load_vectors(q_ptr, rows, valid, 2 * HALF, HALF, BLOCK_H)
    do1, do2 = load_vectors(do_ptr, rows, valid, 2 * HALF, HALF, BLOCK_H)
    log = tl.load(logs_ptr + rows, mask=valid, other=0)
    delta = tl.load(delta_ptr + rows, mask=valid, other=0)
    dtype = x_ptr.dtype.element_ty
    dq1 = tl.zeros((ROWS, BLOCK_H), dtype=tl.float32)
    dq2 = tl.zeros((ROWS, BLOCK_H), dtype=tl.float32)
    # recent bytes
    offs_n = tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_H)[None, :]
    recent_ptr += b * stride_rb + kv * stride_rg
    for start in range(tl.maximum(low + LEAD - WINDOW + 1, 0), high + LEAD + 1, BLOCK_N):
        s = start + offs_n
        k1, k2 = load_vectors(recent_ptr, s, s <= high + LEAD, stride_rs, HALF, BLOCK_H)
        ago = t[:, None] + LEAD - s[None, :]
        seen = (ago >= 0) & (ago < WINDOW) & valid[:, None]
        _, ds = _slopes(q1, q2, do1, do2, k1, k2, log, delta, seen, scale, PRECISION)
        ds = ds.to(dtype)
        dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
        dq2 = tl.dot(ds, k2, dq2, input_precision=PRECISION)
    # entries; a chosen one's gradient is stored per choice, and summed by `sum_choices`
    entries_ptr += b * stride_eb + kv * stride_eg
    complete = (START + t + 1) // RATIO
    if CHOSEN:
        chosen_ptr += (b * NUMBER + block) * SIZE
        pairs_ptr += (((b * NUMBER + block) * PARTS + part) * SIZE * KV + kv) * (2 * HALF)
        begin, end = 0, SIZE
    else:
        begin = tl.maximum((START + low + 1) // RATIO - MOST, 0)
        end = (START + high + 1) // RATIO
    for start in range(begin, end, BLOCK_N):
        j, there, seen = entries_at(chosen_ptr, start, offs_n, end, complete, MOST, CHOSEN)
        seen = seen & valid[:, None]
        k1, k2 = load_vectors(entries_ptr, j, there, stride_ej, HALF, BLOCK_H)
        p, ds = _slopes(q1, q2, do1, do2, k1, k2, log, delta, seen, scale, PRECISION)
        ds = ds.to(dtype)
        dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
        dq2 = tl.dot(ds, k2, dq2, input_precision=PRECISION)
        if CHOSEN:
            p, ds = tl.trans(p.to(dtype)), tl.trans(ds)
            dk1 = tl.dot(ds, q1, input_precision=PRECISION)
            dk1 = tl.dot(p, do1, dk1, input_precision=PRECISION)
            dk2 = tl.dot(ds, q2, input_precision=PRECISION)
            dk2 = tl.dot(p, do2, dk2, input_precision=PRECISION)
            at = (start + offs_n)[:, None] * (KV * 2 * HALF) + offs
            both = (start + offs_n < end)[:, None] & (offs < HALF)
            rotary.store_halves(pairs_ptr + at, dk1, dk2, both, HALF)
    # backward of rotation and norm
    x1, x2, cos, sin = load_queries(
        x_ptr + b * stride_xb, cos_ptr, sin_ptr, t, h, valid, stride_xt, stride_xh, HALF, BLOCK_H
    )
    r = rotary.inverse_rms(x1, x2, eps, HALF)[:, None]
    g1, g2 = rotary.rotate_back(dq1, dq2, cos, sin)
    x1, x2 = x1 * r, x2 * r
    mean = (tl.sum(g1 * x1 + g2 * x2, axis=1) / (2 * HALF))[:, None]
    ptrs = grad_x_ptr + rows[:, None] * (2 * HALF) + offs
    both = valid[:, None] & (offs < HALF)
    tl.store(ptrs, ((g1 - x1 * mean) * r).to(dtype), mask=both)
    tl.store(ptrs + HALF, ((g2 - x2 * mean) * r).to(dtype), mask=both)


@triton.jit
def _grad_vectors_kernel(
    q_ptr, do_ptr, vectors_ptr, logs_ptr, delta_ptr, grad_ptr,
    T, LEAD, VECTORS, START, WINDOW, MOST, RATIO, scale,
    stride_vb, stride_vs, stride_vg,
    HEADS: tl.constexpr, KV: tl.constexpr, ROWS: tl.constexpr, OF_KV: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    ENTRIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    b, kv = (tl.program_id(2) // KV).to(tl.int64), tl.program_id(2) % KV
    heads_per_kv: tl.constexpr = HEADS // KV
    queries: tl.constexpr = (ROWS + OF_KV - 1) // OF_KV
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.minimum(block * BLOCK_N + BLOCK_N, VECTORS) - 1
    vectors_ptr += b * stride_vb + kv * stride_vg
    k1, k2 = load_vectors(vectors_ptr, offs_n, offs_n < VECTORS, stride_vs, HALF, BLOCK_H)
    # the range of queries that see any vector of the block
    if ENTRIES:  # from the byte that completes the first of these entries
        low = tl.maximum((block * BLOCK_N + 1) * RATIO - 1 - START, 0)
        high = tl.minimum((last + MOST + 1) * RATIO - 1 - START, T)
    else:
        low = tl.maximum(block * BLOCK_N - LEAD, 0)
        high = tl.minimum(last - LEAD + WINDOW, T)
    # programs divide that range
    share = tl.cdiv(tl.cdiv(high - low, SPLITS), queries) * queries
    first = low + split * share
    dtype = q_ptr.dtype.element_ty
    dk1 = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    dk2 = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    for start in range(first * OF_KV, tl.minimum(first + share, high) * OF_KV, ROWS):
        row = start + tl.arange(0, ROWS)  # OF_KV rows per position
        t, head = row // OF_KV, row % OF_KV
        h = kv * heads_per_kv + head
        valid = (head < heads_per_kv) & (t < high)
        rows = (b * T + t) * HEADS + h
        q1, q2 = load_vectors(q_ptr, rows, valid, 2 * HALF, HALF, BLOCK_H)
        do1, do2 = load_vectors(do_ptr, rows, valid, 2 * HALF, HALF, BLOCK_H)
        log = tl.load(logs_ptr + rows, mask=valid, other=0)
        delta = tl.load(delta_ptr + rows, mask=valid, other=0)
        # which query sees which vector
        if ENTRIES:
            complete = ((START + t + 1) // RATIO)[:, None]
            seen = (offs_n[None, :] < complete) & (offs_n[None, :] >= complete - MOST)
        else:
            ago = t[:, None] + LEAD - offs_n[None, :]
            seen = (ago >= 0) & (ago < WINDOW)
        seen = seen & valid[:, None]
        # a vector is key and value: its gradient has a term of each
        p, ds = _slopes(q1, q2, do1, do2, k1, k2, log, delta, seen, scale, PRECISION)
        p, ds = tl.trans(p.to(dtype)), tl.trans(ds.to(dtype))
        dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
        dk1 = tl.dot(p, do1, dk1, input_precision=PRECISION)
        dk2 = tl.dot(ds, q2, dk2, input_precision=PRECISION)
        dk2 = tl.dot(p, do2, dk2, input_precision=PRECISION)
    offs = tl.arange(0, BLOCK_H)[None, :]
    out = ((split * tl.num_programs(2) // KV + b) * VECTORS + offs_n) * KV + kv
    ptrs = grad_ptr + out[:, None] * (2 * HALF) + offs
    rotary.store_halves(ptrs, dk1, dk2, (offs_n < VECTORS)[:, None] & (offs < HALF), HALF)


SPLITS = 64
"""Parts into which the bytes that see an entry are split, as entries of many bytes are few."""


def _compressed_attention_backward_triton(
    grad_y: Tensor, y: Tensor, logs: Tensor, x: Tensor, recent: Tensor, entries: Tensor,
    chosen: Tensor | None, sink: Tensor, cos: Tensor, sin: Tensor, sight: Sight, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, length, heads, width), kv = x.shape, recent.shape[2]
    lead, precision = recent.shape[1] - length, "ieee" if x.dtype == torch.float32 else "tf32"
    grad_y, y, logs, cos, sin = (part.contiguous() for part in (grad_y, y, logs, cos, sin))
    x, recent, entries = rotary.dense_heads(x, recent, entries)
    tile = tiling(x, recent, chosen, sight)
    q, do = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device).unbind()
    delta = torch.empty_like(logs)
    rows = logs.numel()
    shape: dict[str, int | str] = {"HALF": width // 2, "BLOCK_H": tile.block_h}
    _rotate_gradients_kernel[(triton.cdiv(rows, 16),)](
        grad_y, y, x, cos, sin, q, do, delta, rows, length, heads, eps, *x.stride()[:3],
        **shape, BLOCK_R=16,
    )  # fmt: skip
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pairs, number, size = q, 0, 0
    if chosen is not None:
        chosen, (number, size) = chosen.contiguous(), chosen.shape[1:]
        shape_of_pairs = batch, number * tile.parts, size, kv * width
        pairs = torch.empty(shape_of_pairs, dtype=x.dtype, device=x.device)
    options, max_rows = {"num_warps": num_warps(x, tile)}, most_rows(tile.block_h)
    if x.dtype == torch.float32:  # prefetched vectors leave too little shared memory
        options["num_stages"] = 1
        max_rows = max_rows // 2 if width > 64 else max_rows  # more rows spill registers
    shape |= {"HEADS": heads, "KV": kv, "OF_KV": tile.heads_per_kv, "PRECISION": precision}
    _grad_queries_kernel[(tile.programs, batch * kv, tile.parts)](
        q, do, x, recent, entries, chosen, cos, sin, logs, delta, grad_x, pairs,
        length, lead, number, size, sight.start, tile.shift, sight.window, sight.max_entries,
        sight.ratio, width**-0.5, eps,
        *x.stride()[:3], *recent.stride()[:3], *entries.stride()[:3],
        **shape, QUERIES=tile.queries, ROWS=tile.rows, PARTS=tile.parts,
        BLOCK_N=block_n(x, 32), CHOSEN=chosen is not None, **options,
    )  # fmt: skip
    block_rows = max(16, max_rows)

    def grad_of(vectors: Tensor, splits: int, entries_side: bool) -> Tensor:
        count, size = vectors.shape[1], block_n(x, 32)
        grad = torch.empty(splits, *vectors.shape, dtype=torch.float32, device=x.device)
        if grad.numel():
            _grad_vectors_kernel[(triton.cdiv(count, size), splits, batch * kv)](
                q, do, vectors, logs, delta, grad,
                length, lead, count, sight.start, sight.window, sight.max_entries, sight.ratio,
                width**-0.5, *vectors.stride()[:3],
                **shape, ROWS=block_rows, BLOCK_N=size, SPLITS=splits, ENTRIES=entries_side,
                **options,
            )  # fmt: skip
        return grad[0] if splits == 1 else grad.sum(dim=0)

    grad_recent = grad_of(recent, 1, False)
    if chosen is None:
        splits = min(SPLITS, triton.cdiv(length, 4 * triton.cdiv(block_rows, tile.heads_per_kv)))
        grad_entries = grad_of(entries, splits, True)
    else:
        sums = sum_choices(pairs, chosen.repeat_interleave(tile.parts, dim=1), entries.shape[1])
        grad_entries = sums.view(entries.shape)
    grad_sink = -((sink - logs).exp() * delta).sum(dim=(0, 1))
    return grad_x, grad_recent, grad_entries, grad_sink


compressed_attention_backward = Operation(
    "compressed_attention_backward", _compressed_attention_backward_triton,
    _compressed_attention_backward_torch,
    "grad_y, y: real[B, T, H, D]; logs: float32[B, T, H]; x: real[B, T, H, D]; recent: real[B, S, "
    "G, D]; entries: real[B, E, G, D]; chosen: int32[B, len(sight.groups(T)), K]?; sink: "
    "float32[H]; cos, sin: float32[T, D // 2]; sight; eps",
    where=ATTENTION_WHERE,
)  # fmt: skip
"""Propagate a gradient back through `compressed_attention`.

`grad_y` is (B, T, H, d) in the dtype of x; `y` and `logs` are results of `compressed_attention`,
and the other arguments are those of `compressed_attention`.

Returns:
    Gradients of x, in its dtype, and of recent, entries and sink, in float32.
"""
