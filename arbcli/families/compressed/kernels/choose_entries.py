"""Selection of the entries that a group of bytes attends to: the top k by an indexer's scores.

    s[g, j] = sum over h of w[g, h] max(0, q[g, h] . k[j])

Group g sees the entries g - M to g - 1 and selects the k entries with the largest s. Ties go to the
later entry. Queries and keys may be e4m3; GPUs with e4m3 products use them.
Source: DeepSeek-AI, "DeepSeek-V3.2-Exp", 2025, eq. 1 and 2.
"""

import torch
from torch import Tensor

from arbcli.kernels.attention.rotary_norm import dense_heads
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3
from arbcli.kernels.runtime.backend import chunk_elements
from arbcli.kernels.runtime.operation import Operation, tl, triton

ELEMENTS = 1 << 24
"""Maximum number of scores that are computed at once."""


def _choose_entries_torch(
    q: Tensor, w: Tensor, k: Tensor, first: int, max_entries: int, top_k: int
) -> Tensor:
    (batch, groups, heads, _), number = q.shape, k.shape[1]
    size = min(top_k, number)
    chosen = torch.full((batch, groups, size), -1, dtype=torch.int32, device=q.device)
    step = max(1, chunk_elements(ELEMENTS) // max(1, batch * heads * number))
    entry_ids = torch.arange(number, device=q.device)
    for start in range(0, groups if size else 0, step):
        chunk = slice(start, min(start + step, groups))
        dots = torch.einsum("bnhd,bjd->bnhj", q[:, chunk].float(), k.float())
        scores = (dots.relu() * w[:, chunk].float()[..., None]).sum(dim=2)
        complete = torch.arange(chunk.start, chunk.stop, device=q.device)[:, None] + first
        seen = (entry_ids < complete) & (entry_ids >= complete - max_entries)
        # reversed, so that ties go to the later entry
        scores = scores.masked_fill(~seen, -torch.inf).flip(-1)
        order = scores.sort(dim=-1, descending=True, stable=True)
        best = number - 1 - order.indices[..., :size]
        best = torch.where(order.values[..., :size] == -torch.inf, number, best).sort(-1).values
        chosen[:, chunk] = torch.where(best == number, -1, best).int()
    return chosen


@triton.jit
def _score_entries_kernel(
    q_ptr, w_ptr, k_ptr, scores_ptr,
    N, E, FIRST, MOST,
    stride_qb, stride_qn, stride_qh, stride_wb, stride_wn, stride_wh, stride_kb, stride_kj,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    j = (tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)
    last = FIRST + tl.program_id(0) * BLOCK_N + BLOCK_N - 1
    if tl.program_id(1) * BLOCK_E < last:  # otherwise the groups see no entry of the block
        offs = tl.arange(0, BLOCK_W)
        k_ptrs = k_ptr + b * stride_kb + j[:, None] * stride_kj + offs[None, :]
        k = tl.load(k_ptrs, mask=(j < E)[:, None] & (offs < WIDTH)[None, :], other=0.0)
        scores = tl.zeros((BLOCK_N, BLOCK_E), dtype=tl.float32)
        for h in tl.static_range(HEADS):
            q_ptrs = q_ptr + b * stride_qb + n[:, None] * stride_qn + h * stride_qh + offs[None, :]
            q = tl.load(q_ptrs, mask=(n < N)[:, None] & (offs < WIDTH)[None, :], other=0.0)
            w_ptrs = w_ptr + b * stride_wb + n * stride_wn + h * stride_wh
            w = tl.load(w_ptrs, mask=n < N, other=0).to(tl.float32)
            dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores += tl.maximum(dots, 0) * w[:, None]
        complete = FIRST + n[:, None]
        seen = (j[None, :] < complete) & (j[None, :] >= complete - MOST)
        out = (b * N + n[:, None]) * E + j[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        tl.store(scores_ptr + out, scores, mask=(n < N)[:, None] & (j < E)[None, :])


@triton.jit
def store_best(chosen_ptr, numbers, scores, seen, SIZE, BLOCK: tl.constexpr):
    """Store the `SIZE` seen numbers, ascending, with the highest scores, [BLOCK], and -1 after."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)  # remove the sign of zero
    lowest = -2147483648
    order = tl.where(seen, bits ^ ((bits >> 31) & 0x7FFFFFFF), lowest)
    least = tl.full((), lowest, tl.int32)  # find the threshold one bit at a time
    for bit in range(32):
        higher = least + (tl.full((), 1, tl.int32) << (31 - bit))
        enough = tl.sum((order >= higher).to(tl.int32)) >= SIZE
        least = tl.where(enough, higher, least)
    above = seen & (order > least)
    equal = (seen & (order == least)).to(tl.int32)
    remaining = SIZE - tl.sum(above.to(tl.int32))
    later_ties = tl.sum(equal) - tl.cumsum(equal) + equal  # ties from this entry on are selected
    selected = above | ((equal > 0) & (later_ties <= remaining))
    tl.store(chosen_ptr + tl.cumsum(selected.to(tl.int32)) - 1, numbers, mask=selected)
    place, total = tl.arange(0, BLOCK), tl.sum(selected.to(tl.int32))
    tl.store(chosen_ptr + place, -1, mask=(place >= total) & (place < SIZE))


@triton.jit
def _take_best_kernel(scores_ptr, chosen_ptr, N, E, FIRST, MOST, SIZE, BLOCK: tl.constexpr):
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK)
    seen = (j < tl.minimum(FIRST + n, E)) & (j >= FIRST + n - MOST)
    scores = tl.load(scores_ptr + (b * N + n) * E + j, mask=seen, other=0) + 0.0
    store_best(chosen_ptr + (b * N + n) * SIZE, j, scores, seen, SIZE, BLOCK)


def _choose_entries_triton(
    q: Tensor, w: Tensor, k: Tensor, first: int, max_entries: int, top_k: int
) -> Tensor:
    (batch, groups, heads, width), number = q.shape, k.shape[1]
    size = min(top_k, number)
    chosen = torch.empty(batch, groups, size, dtype=torch.int32, device=q.device)
    if not chosen.numel():
        return chosen
    if q.dtype == E4M3 and not has_e4m3(q):  # exact: bfloat16 represents all e4m3 numbers
        q, k = q.to(w.dtype), k.to(w.dtype)
    q, k = dense_heads(q, k)
    tile = 16 if q.dtype == torch.float32 else 64  # larger float32 tiles spill registers
    together = min(batch, max(1, chunk_elements(ELEMENTS) // (groups * number)))
    scores = torch.empty(together, groups, number, dtype=torch.float32, device=q.device)
    block = triton.next_power_of_2(number)
    for start in range(0, batch, together):  # texts per pass, to bound the size of the scores
        qs, ws, ks, chosen_of_texts = (part[start : start + together] for part in (q, w, k, chosen))
        grid = triton.cdiv(groups, tile), triton.cdiv(number, tile), len(qs)
        _score_entries_kernel[grid](
            qs, ws, ks, scores, groups, number, first, max_entries,
            *q.stride()[:3], *w.stride(), *k.stride()[:2],
            HEADS=heads, WIDTH=width, BLOCK_N=tile, BLOCK_E=tile,
            BLOCK_W=max(32 if q.dtype == E4M3 else 16, triton.next_power_of_2(width)),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        _take_best_kernel[(groups, len(qs))](
            scores, chosen_of_texts, groups, number, first, max_entries, size,
            BLOCK=block, num_warps=4 if block <= 4096 else 16,
        )  # fmt: skip
    return chosen


choose_entries = Operation(
    "choose_entries", _choose_entries_triton, _choose_entries_torch,
    "q: float32|bfloat16|float8_e4m3fn[B, N, H, D]; w: any_real[B, N, H]; "
    "k: float32|bfloat16|float8_e4m3fn[B, E, D]; first; max_entries; top_k",
    where=("q.dtype == k.dtype", "q.dtype in (w.dtype, torch.float8_e4m3fn)"),
)  # fmt: skip
"""Select the top-k entries of each group.

Args:
    q: (B, N, h, d) float32, bfloat16 or float8_e4m3fn: queries of N consecutive groups.
    w: (B, N, h) float32 or bfloat16: weights of the heads.
    k: (B, E, d) like q: keys of the entries.
    first: index of the first group, equal to its number of complete entries.
    max_entries: M, the maximum number of entries that a group sees.
    top_k: maximum number of entries per group.

Returns:
    (B, N, min(top_k, E)) int32: indices of entries, ascending, padded with -1.
"""
