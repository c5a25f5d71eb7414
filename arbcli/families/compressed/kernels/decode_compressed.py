"""Compressed attention of one byte to a cache of recent bytes and entries.

The byte at position i is in slot i mod W of the ring, and entry j in slot j mod E of the entries. A
selection lists indices of entries; without one, the byte sees the last M complete entries. With the
byte's own group g = (p + 1) // m:

    s[i] = R_p n(x) . c[i] / sqrt(d)
    y = R_-p (sum of exp(s[i]) c[i]) / (exp(sink) + sum of exp(s[i]))

Bytes and entries may be stored in eight bits, as codes with an exponent each: see `eight_bits`.

The slots of a head are divided among programs. The last program to finish adds all sums in the
order of the slots, so the result has the same bits whichever program is last. With several texts,
each text has as many programs as it would have alone.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.families.compressed.kernels.compressed_attention import load_vectors
from arbcli.kernels.attention import rotary_norm as rotary
from arbcli.kernels.attention.eight_bits import decode_entries, numbers_of, scale_of_entry
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.texts import text_by_text

SLOTS = 32
"""Slots per program."""
SHARED = (4, 6, 7)
"""Arguments of `decode_compressed` that are the same for all texts."""


@text_by_text(5, *SHARED)
def _decode_compressed_torch(
    x: Tensor, recent: Tensor, entries: Tensor, choice: Tensor | None, sink: Tensor,
    position: Tensor, cos: Tensor, sin: Tensor, semaphores: Tensor, m: int, max_entries: int,
    eps: float, recent_exponents: Tensor | None = None, entry_exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    slots, ring, device = len(entries), len(recent), x.device
    place = position.long()[None]
    complete = (place + 1) // m
    if recent_exponents is not None and entry_exponents is not None:
        recent = decode_entries(recent, recent_exponents, x.dtype)
        entries = decode_entries(entries, entry_exponents, x.dtype)
    if choice is None:
        number = place // m  # the open entry
        numbers = number - (number - torch.arange(slots, device=device)) % slots
        seen = (numbers >= 0) & (numbers < complete) & (numbers >= complete - max_entries)
        chosen = entries
    else:
        seen = choice >= 0
        chosen = entries[choice.clamp(min=0).long() % slots]
    near = torch.arange(ring, device=device) <= place
    keys = torch.cat((recent, chosen)).float()  # (S, G, d)
    cos, sin = cos[place], sin[place]
    normal = functional.rms_norm(x.float(), x.shape[-1:], eps=eps)
    q = rotary.rotate(normal, cos, sin).to(x.dtype).float()
    q = (q * x.shape[-1] ** -0.5).unflatten(0, (keys.shape[1], -1))  # (G, H / G, d)
    scores = torch.einsum("ghd,sgd->ghs", q, keys)
    weights = scores.masked_fill(~torch.cat((near, seen)), -torch.inf).exp()
    total = weights.sum(dim=-1) + sink.exp().view(weights.shape[:2])
    y = torch.einsum("ghs,sgd->ghd", weights / total[..., None], keys).flatten(0, 1)
    return rotary.rotate(y, cos, -sin).to(x.dtype)


@triton.jit
def _decode_compressed_kernel(
    x_ptr, recent_ptr, entries_ptr, recent_exponents_ptr, entry_exponents_ptr, choice_ptr, sink_ptr,
    position_ptr, cos_ptr, sin_ptr, semaphores_ptr, totals_ptr, sums_ptr, y_ptr,
    W, E, K, M, MOST, HEADS, KV, scale, eps,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_P: tl.constexpr, CHOSEN: tl.constexpr, EIGHT: tl.constexpr, FLOATS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    head, split, text = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # base pointers of this text
    kv = head // (HEADS // KV)
    position = tl.load(position_ptr + text)
    rows, entry_rows = text * W * KV, text * E * KV
    recent_ptr, entries_ptr = recent_ptr + rows * WIDTH, entries_ptr + entry_rows * WIDTH
    x_ptr, y_ptr = x_ptr + text * HEADS * WIDTH, y_ptr + text * HEADS * WIDTH
    semaphores_ptr, totals_ptr = semaphores_ptr + text * HEADS, totals_ptr + text * HEADS * SPLITS
    sums_ptr += text * HEADS * SPLITS * WIDTH
    if CHOSEN:
        choice_ptr += text * K
    if EIGHT:
        recent_exponents_ptr, entry_exponents_ptr = (
            recent_exponents_ptr + rows,
            entry_exponents_ptr + entry_rows,
        )
    offs = tl.arange(0, BLOCK_H)
    mask = offs < HALF
    # slots of this program: first those of the ring, then those of entries
    s = split * BLOCK_S + tl.arange(0, BLOCK_S)
    near, complete = s < W, (position + 1) // M
    k = s - W
    # index of each entry: from the selection, or from the ring of entries
    if CHOSEN:
        number = tl.load(choice_ptr + k, mask=(k >= 0) & (k < K), other=-1)
        seen = number >= 0
    else:
        opened = position // M
        number = opened - (opened - k + E) % E  # Triton's remainder has the sign of the dividend
        seen = (k >= 0) & (k < K) & (number >= 0)
        seen = seen & (number < complete) & (number >= complete - MOST)
    near = near & (s <= position)
    slot = tl.where(seen, number % E, 0).to(tl.int64)
    # keys, which are values too, from either source, as halves
    r1, r2 = load_vectors(recent_ptr, s * KV + kv, near, WIDTH, HALF, BLOCK_H)
    k1, k2 = load_vectors(entries_ptr, slot * KV + kv, seen, WIDTH, HALF, BLOCK_H)
    k1, k2 = tl.where(near[:, None], r1, k1), tl.where(near[:, None], r2, k2)
    if EIGHT:
        e1 = tl.load(recent_exponents_ptr + s.to(tl.int64) * KV + kv, mask=near, other=0)
        e2 = tl.load(entry_exponents_ptr + slot * KV + kv, mask=seen, other=0)
        power = scale_of_entry(tl.where(near, e1, e2), FLOATS)[:, None]
        k1, k2 = numbers_of(k1, FLOATS, NATIVE) * power, numbers_of(k2, FLOATS, NATIVE) * power
    k1, k2 = k1.to(tl.float32), k2.to(tl.float32)
    seen = seen | near

    # query of the byte, normalised and rotated
    table = position.to(tl.int64) * HALF + offs
    cos, sin = rotary.load_angles(cos_ptr, sin_ptr, table, mask)
    x1, x2 = rotary.load_halves(x_ptr + head * WIDTH + offs, mask, HALF)
    r = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2) / WIDTH + eps)
    dtype = x_ptr.dtype.element_ty
    q1 = ((x1 * cos - x2 * sin) * r).to(dtype).to(tl.float32)
    q2 = ((x1 * sin + x2 * cos) * r).to(dtype).to(tl.float32)
    # partial sums of this program: of weights, and of weighted vectors
    score = tl.sum(k1 * q1[None, :] + k2 * q2[None, :], axis=1) * scale
    weight = tl.where(seen, tl.exp(score), 0)
    part = head * SPLITS + split
    tl.store(totals_ptr + part, tl.sum(weight))
    sums = sums_ptr + part * WIDTH + offs
    tl.store(sums, tl.sum(weight[:, None] * k1, axis=0), mask=mask)
    tl.store(sums + HALF, tl.sum(weight[:, None] * k2, axis=0), mask=mask)

    tl.debug_barrier()  # all threads store their sums before the program is counted
    if tl.atomic_add(semaphores_ptr + head, 1, sem="acq_rel") == SPLITS - 1:
        # the last program adds all parts in order, starting from the sink
        total = tl.exp(tl.load(sink_ptr + head))
        y1, y2 = tl.zeros((BLOCK_H,), dtype=tl.float32), tl.zeros((BLOCK_H,), dtype=tl.float32)
        for start in range(0, SPLITS, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            parts = head * SPLITS + p
            total += tl.sum(tl.load(totals_ptr + parts, mask=p < SPLITS, other=0))
            s1, s2 = load_vectors(sums_ptr, parts, p < SPLITS, WIDTH, HALF, BLOCK_H)
            y1, y2 = y1 + tl.sum(s1, axis=0), y2 + tl.sum(s2, axis=0)
        # values were rotated like keys: rotate the output back by the query's angle
        y1, y2 = y1 / total, y2 / total
        out = y_ptr + head * WIDTH + offs
        rotary.store_rotated_back(out, y1, y2, cos, sin, mask, HALF)
        tl.store(semaphores_ptr + head, 0)


def _decode_compressed_triton(
    x: Tensor, recent: Tensor, entries: Tensor, choice: Tensor | None, sink: Tensor,
    position: Tensor, cos: Tensor, sin: Tensor, semaphores: Tensor, m: int, max_entries: int,
    eps: float, recent_exponents: Tensor | None = None, entry_exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (heads, width), (ring, kv, _) = x.shape[-2:], recent.shape[-3:]
    floats = recent.dtype == E4M3
    if floats:
        recent, entries = recent.view(torch.uint8), entries.view(torch.uint8)
    slots = entries.shape[-3]
    size = slots if choice is None else choice.shape[-1]
    splits = triton.cdiv(ring + size, SLOTS)
    parts = semaphores.numel() * splits
    scratch = torch.empty(parts * (width + 1), dtype=torch.float32, device=x.device)
    y = torch.empty_like(x)
    _decode_compressed_kernel[(heads, splits, position.numel())](
        x, recent, entries, recent_exponents, entry_exponents, choice, sink, position, cos, sin,
        semaphores, *scratch.split([parts, parts * width]), y,
        ring, slots, size, m, max_entries, heads, kv, width**-0.5, eps,
        HALF=width // 2, BLOCK_H=triton.next_power_of_2(width // 2), BLOCK_S=SLOTS,
        SPLITS=splits, BLOCK_P=min(32, triton.next_power_of_2(splits)),
        CHOSEN=choice is not None, EIGHT=recent_exponents is not None, FLOATS=floats,
        NATIVE=has_e4m3(x), num_warps=4 if width <= 128 else 8,
    )  # fmt: skip
    return y


decode_compressed = Operation(
    "decode_compressed", _decode_compressed_triton, _decode_compressed_torch,
    "x: real[*T, H, D] dense; recent: float32|bfloat16|float8_e4m3fn|int8[*T, W, G, D] dense; "
    "entries: float32|bfloat16|float8_e4m3fn|int8[*T, E, G, D] dense; choice: int32[*T, K]? dense; "
    "sink: float32[H] dense; position: int32[*T] dense; cos, sin: float32[P, D // 2] dense; "
    "semaphores: int32[*T, H] dense; m; max_entries; eps; recent_exponents: int8[*T, W, G]? dense; "
    "entry_exponents: int8[*T, E, G]? dense",
    where=(
        "len(T) < 2", "D % 2 == 0", "G > 0 and H % G == 0", "recent.dtype == entries.dtype",
        "(recent_exponents is None) == (entry_exponents is None)",
        "(recent.dtype == x.dtype) == (recent_exponents is None)",
    ),
)  # fmt: skip
"""Attend with one byte that `append_position_` has stored.

With several texts, all arguments but `sink`, `cos` and `sin`, and the result, have a leading
batch dimension.

Args:
    x: (H, d) float32 or bfloat16, contiguous, d even: projected queries.
    recent: (W, G, d) like x, contiguous: the ring; all filled slots are visible.
    entries: (E, G, d) like x, contiguous; E is above `max_entries`, or the ring never fills.
    choice: (k,) int32, contiguous: indices of entries, or -1; None selects all complete ones.
    sink: (H,) float32, contiguous.
    position: int32 scalar tensor, below P.
    cos: (P, d / 2) float32, contiguous.
    sin: like `cos`.
    semaphores: (H,) int32 zeros, reset to zeros.
    m: bytes per entry.
    max_entries: M, the maximum number of visible entries.
    eps: added to mean squares.
    recent_exponents: (W, G) int8, contiguous, if `recent` and `entries` are codes in float8_e4m3fn
        or int8.
    entry_exponents: (E, G) int8, likewise.

Returns:
    (H, d) in the dtype of x.
"""
