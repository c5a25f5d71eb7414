"""Indexer step for one byte: store the open entry's key; at the end of an entry, select anew.

Entry j is stored in slot j mod E of E slots. For the byte at position p of entry j = p // m:

    keys[j mod E] = R_(j m) n(k)

If the byte completes entry j, g = j + 1 entries are complete. Of the entries from g - M on, those
with the largest scores are selected; ties go to the later entry:

    s[i] = sum over h of w[h] max(0, q[h] . keys[i mod E]),  q[h] = R_p n(x[h])

Otherwise the selection does not change; it is empty until the first entry is complete. Rotated
queries and keys are rounded to the dtype of the queries, so scores are computed from stored values.
Keys may be stored in e4m3: they are normalised and need no scale. Each text has one program.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.families.compressed.kernels.choose_entries import store_best
from arbcli.kernels.attention import rotary_norm as rotary
from arbcli.kernels.codec.decode_digits import from_e4m3
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3, to_e4m3
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.texts import text_by_text

SHARED = (5, 6)
"""Arguments of `choose_next_` that are the same for all texts."""


@text_by_text(4, *SHARED)
def _choose_next_torch(
    query: Tensor, key: Tensor, keys: Tensor, choice: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, m: int, max_entries: int, eps: float,
) -> None:  # fmt: skip
    (slots, width), size = keys.shape, len(choice)
    heads = len(query) // (width + 1)
    place = position.long()[None]
    number, complete = place // m, (place + 1) // m

    def rotated(x: Tensor, at: Tensor) -> Tensor:
        normal = functional.rms_norm(x.float(), (width,), eps=eps)
        return rotary.rotate(normal, cos[at], sin[at]).to(x.dtype)

    new = rotated(key[None], number * m)
    if keys.dtype == E4M3:  # torch copies no e4m3 by index
        keys.view(torch.int8).index_copy_(0, number % slots, new.to(E4M3).view(torch.int8))
    else:
        keys.index_copy_(0, number % slots, new)
    q = rotated(query[: heads * width].view(heads, width), place)
    w = query[heads * width :].float()
    numbers = number - (number - torch.arange(slots, device=keys.device)) % slots
    seen = (numbers >= 0) & (numbers < complete) & (numbers >= complete - max_entries)
    scores = ((q.float() @ keys.float().T).relu() * w[:, None]).sum(dim=0)
    newest_first = numbers.argsort(descending=True)  # ties: the later entry comes first
    order = scores.masked_fill(~seen, -torch.inf)[newest_first].sort(descending=True, stable=True)
    best = numbers[newest_first[order.indices[:size]]]
    there = order.values[:size] > -torch.inf
    last = torch.iinfo(torch.int64).max
    best = torch.where(there, best, last).sort().values
    best = functional.pad(torch.where(best == last, -1, best), (0, size - len(best)), value=-1)
    kept = torch.where(complete > 0, choice, -1)
    choice.copy_(torch.where((place + 1) % m == 0, best.int(), kept))


@triton.jit
def _rotate_rows(x1, x2, cos, sin, eps, HALF: tl.constexpr):
    r = rotary.inverse_rms(x1, x2, eps, HALF)[:, None]
    x1, x2 = x1 * r, x2 * r
    return x1 * cos - x2 * sin, x1 * sin + x2 * cos


@triton.jit
def _choose_next_kernel(
    query_ptr, key_ptr, keys_ptr, choice_ptr, position_ptr, cos_ptr, sin_ptr, scores_ptr,
    E, M, MOST, SIZE, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, EIGHT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    text = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + text)
    query_ptr, key_ptr = query_ptr + text * HEADS * (WIDTH + 1), key_ptr + text * WIDTH
    keys_ptr, choice_ptr = keys_ptr + text * E * WIDTH, choice_ptr + text * SIZE
    scores_ptr += text * E
    # the entry that the byte belongs to, and the number of complete entries
    number, complete = position // M, (position + 1) // M
    dtype = query_ptr.dtype.element_ty
    offs, rows = tl.arange(0, BLOCK_H)[None, :], tl.arange(0, BLOCK_R)
    mask = offs < HALF
    # store the key of the open entry, rotated by its first position
    table = (number * M).to(tl.int64) * HALF + offs
    cos, sin = rotary.load_angles(cos_ptr, sin_ptr, table, mask)
    k1, k2 = rotary.load_halves(key_ptr + offs, mask, HALF)
    k1, k2 = _rotate_rows(k1, k2, cos, sin, eps, HALF)
    k1, k2 = k1.to(dtype), k2.to(dtype)
    if EIGHT:
        k1, k2 = to_e4m3(k1.to(tl.float32), NATIVE), to_e4m3(k2.to(tl.float32), NATIVE)
    at = (number % E) * WIDTH + offs
    rotary.store_halves(keys_ptr + at, k1, k2, mask, HALF)
    s = tl.arange(0, BLOCK)
    # an empty selection until the first entry is complete
    if complete == 0:
        tl.store(choice_ptr + s, -1, mask=s < SIZE)
    if (position + 1) % M == 0:
        tl.debug_barrier()  # the new key is read again
        # queries of all heads, normalised and rotated, and their weights
        head_mask = (rows < HEADS)[:, None] & mask
        table = position.to(tl.int64) * HALF + offs
        cos, sin = rotary.load_angles(cos_ptr, sin_ptr, table, mask)
        q_ptrs = query_ptr + rows[:, None] * WIDTH + offs
        q1, q2 = rotary.load_halves(q_ptrs, head_mask, HALF)
        q1, q2 = _rotate_rows(q1, q2, cos, sin, eps, HALF)
        q1, q2 = q1.to(dtype), q2.to(dtype)
        w = tl.load(query_ptr + HEADS * WIDTH + rows, mask=rows < HEADS, other=0).to(tl.float32)
        # scores of all slots, to memory: weighted sum over heads of relu(q . k)
        for start in range(0, tl.minimum(E, number + 1), BLOCK_N):
            slot = start + tl.arange(0, BLOCK_N)
            ptrs = keys_ptr + slot[:, None] * WIDTH + offs
            both = (slot < E)[:, None] & mask
            n1, n2 = tl.load(ptrs, mask=both, other=0), tl.load(ptrs + HALF, mask=both, other=0)
            if EIGHT:
                n1 = from_e4m3(n1, NATIVE).to(dtype)
                n2 = from_e4m3(n2, NATIVE).to(dtype)
            dots = tl.dot(n1, tl.trans(q1), input_precision=PRECISION)
            dots = tl.dot(n2, tl.trans(q2), dots, input_precision=PRECISION)
            slot_scores = tl.sum(tl.maximum(dots, 0) * w[None, :], axis=1)
            tl.store(scores_ptr + slot, slot_scores, mask=slot < E)
        tl.debug_barrier()  # other threads read these scores
        # scores are in the order of entries: index s is one of the visible entries
        first = tl.maximum(complete - MOST, 0)
        there = first + s < complete
        scores = tl.load(scores_ptr + (first + s) % E, mask=there, other=0)
        store_best(choice_ptr, first + s, scores, there, SIZE, BLOCK)


def _choose_next_triton(
    query: Tensor, key: Tensor, keys: Tensor, choice: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, m: int, max_entries: int, eps: float,
) -> None:  # fmt: skip
    (slots, width), size = keys.shape[-2:], choice.shape[-1]
    heads = query.shape[-1] // (width + 1)
    scores = torch.empty(keys.shape[:-1], dtype=torch.float32, device=keys.device)
    block = triton.next_power_of_2(max(1, min(max_entries, slots), size))
    is_e4m3 = keys.dtype == E4M3
    codes = keys.view(torch.uint8) if is_e4m3 else keys
    _choose_next_kernel[(position.numel(),)](
        query, key, codes, choice, position, cos, sin, scores, slots, m, max_entries, size, eps,
        HEADS=heads, HALF=width // 2, BLOCK_R=max(16, triton.next_power_of_2(heads)),
        BLOCK_H=max(16, triton.next_power_of_2(width // 2)),
        BLOCK_N=min(256, max(16, triton.next_power_of_2(slots))), BLOCK=block,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", EIGHT=is_e4m3,
        NATIVE=has_e4m3(keys), num_warps=8,
    )  # fmt: skip


choose_next_ = Operation(
    "choose_next", _choose_next_triton, _choose_next_torch,
    "query: real[*T, Q] dense; key: real[*T, D] dense; "
    "keys: float32|bfloat16|float8_e4m3fn[*T, E, D] dense; choice: int32[*T, K] dense; "
    "position: int32[*T] dense; cos, sin: float32[P, D // 2] dense; m; max_entries; eps",
    where=(
        "len(T) < 2", "E > 0", "D % 2 == 0", "Q % (D + 1) == 0",
        "keys.dtype in (query.dtype, torch.float8_e4m3fn)",
    ),
)  # fmt: skip
"""Store the open entry's key, and update the selection if the byte completes the entry.

With several texts, all arguments but `cos` and `sin` have a leading batch dimension.

Args:
    query: (h (d + 1),) float32 or bfloat16, contiguous: h queries of even width d, then h weights.
    key: (d,) in the dtype of `query`, contiguous.
    keys: (E, d) in that dtype or float8_e4m3fn, contiguous, modified in place; E is above
        `max_entries`, or the ring never fills.
    choice: (k,) int32, contiguous, modified in place: ascending indices, padded with -1.
    position: int32 scalar tensor, below P.
    cos: (P, d / 2) float32, contiguous.
    sin: like `cos`.
    m: bytes per entry.
    max_entries: M, the maximum number of entries that are visible.
    eps: added to mean squares.
"""
