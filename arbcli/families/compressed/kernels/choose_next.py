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

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.decode_attention import PLACE
from arbcli.kernels.attention.eight_bits import numbers_of
from arbcli.kernels.attention.rotation import normalise_reference, rotate, rotate_reference
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3, round_e4m3_reference, to_e4m3
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT32, REAL, Array, Number
from arbcli.kernels.runtime.operation import Case, Gate, Operation
from arbcli.kernels.runtime.texts import stacked_texts, text_by_text
from arbcli.kernels.timed import Timed

SHARED = (5, 6)
"""Arguments of `choose_next_` that are the same for all texts."""


@text_by_text(4, *SHARED)
def choose_next_reference(
    query: Tensor, key: Tensor, keys: Tensor, choice: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, m: int, most: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `choice` and `keys` after `choose_next_`, in float64.

    Only the queries, and the key for their scores, are rounded to the dtype of the queries.
    """
    p, (slots, width), dtype = int(position), keys.shape, query.dtype
    in_eight_bits = keys.dtype == E4M3
    heads = len(query) // (width + 1)
    query, key, keys = (part.double() for part in (query, key, keys))

    def rotated(x: Tensor, place: int) -> Tensor:
        return rotate_reference(normalise_reference(x, eps), cos[place], sin[place])

    new = rotated(key, p // m * m)
    keys[p // m % slots] = round_e4m3_reference(new.to(dtype).double()) if in_eight_bits else new
    complete = (p + 1) // m
    choice = torch.full_like(choice, -1) if complete == 0 else choice.clone()
    if (p + 1) % m == 0:
        q, w = rotated(query[: heads * width].view(heads, width), p), query[heads * width :]
        seen = range(max(0, complete - most), complete)
        q, stored = (part.to(dtype).double() for part in (q, keys))
        dots = stored[[j % slots for j in seen]] @ q.T  # (entries, h)
        scores = (dots.clamp(min=0) * w).sum(dim=1).tolist()
        best = sorted(zip(scores, seen, strict=True), reverse=True)[: len(choice)]
        choice.fill_(-1)
        for place, j in enumerate(sorted(j for _, j in best)):
            choice[place] = j
    return choice, keys


@text_by_text(4, *SHARED)
def _choose_next_torch(
    query: Tensor, key: Tensor, keys: Tensor, choice: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, m: int, most: int, eps: float,
) -> None:  # fmt: skip
    (slots, width), size = keys.shape, len(choice)
    heads = len(query) // (width + 1)
    place = position.long()[None]
    number, complete = place // m, (place + 1) // m

    def rotated(x: Tensor, at: Tensor) -> Tensor:
        normal = functional.rms_norm(x.float(), (width,), eps=eps)
        return rotate(normal, cos[at], sin[at]).to(x.dtype)

    new = rotated(key[None], number * m)
    if keys.dtype == E4M3:  # torch copies no e4m3 by index
        keys.view(torch.int8).index_copy_(0, number % slots, new.to(E4M3).view(torch.int8))
    else:
        keys.index_copy_(0, number % slots, new)
    q = rotated(query[: heads * width].view(heads, width), place)
    w = query[heads * width :].float()
    numbers = number - (number - torch.arange(slots, device=keys.device)) % slots
    seen = (numbers >= 0) & (numbers < complete) & (numbers >= complete - most)
    scores = ((q.float() @ keys.float().T).relu() * w[:, None]).sum(dim=0)
    by_age = numbers.argsort(descending=True)  # ties: the later entry comes first
    order = scores.masked_fill(~seen, -torch.inf)[by_age].sort(descending=True, stable=True)
    best = numbers[by_age[order.indices[:size]]]
    there = order.values[:size] > -torch.inf
    last = torch.iinfo(torch.int64).max
    best = torch.where(there, best, last).sort().values
    best = functional.pad(torch.where(best == last, -1, best), (0, size - len(best)), value=-1)
    kept = torch.where(complete > 0, choice, -1)
    choice.copy_(torch.where((place + 1) % m == 0, best.int(), kept))


@triton.jit
def _turn_rows(x1, x2, cos, sin, WIDTH: tl.constexpr, eps):
    r = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / WIDTH + eps)[:, None]
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
    number, complete = position // M, (position + 1) // M
    dtype = query_ptr.dtype.element_ty
    offs, rows = tl.arange(0, BLOCK_H)[None, :], tl.arange(0, BLOCK_R)
    mask = offs < HALF
    table = (number * M).to(tl.int64) * HALF + offs
    cos = tl.load(cos_ptr + table, mask=mask, other=0)
    sin = tl.load(sin_ptr + table, mask=mask, other=0)
    k1 = tl.load(key_ptr + offs, mask=mask, other=0).to(tl.float32)
    k2 = tl.load(key_ptr + HALF + offs, mask=mask, other=0).to(tl.float32)
    k1, k2 = _turn_rows(k1, k2, cos, sin, WIDTH, eps)
    k1, k2 = k1.to(dtype), k2.to(dtype)
    if EIGHT:
        k1, k2 = to_e4m3(k1.to(tl.float32), NATIVE), to_e4m3(k2.to(tl.float32), NATIVE)
    at = (number % E) * WIDTH + offs
    tl.store(keys_ptr + at, k1, mask=mask)
    tl.store(keys_ptr + at + HALF, k2, mask=mask)
    s = tl.arange(0, BLOCK)
    if complete == 0:
        tl.store(choice_ptr + s, -1, mask=s < SIZE)
    if (position + 1) % M == 0:
        tl.debug_barrier()  # the new key is read again
        of_heads = (rows < HEADS)[:, None] & mask
        table = position.to(tl.int64) * HALF + offs
        cos = tl.load(cos_ptr + table, mask=mask, other=0)
        sin = tl.load(sin_ptr + table, mask=mask, other=0)
        q_ptrs = query_ptr + rows[:, None] * WIDTH + offs
        q1 = tl.load(q_ptrs, mask=of_heads, other=0).to(tl.float32)
        q2 = tl.load(q_ptrs + HALF, mask=of_heads, other=0).to(tl.float32)
        q1, q2 = _turn_rows(q1, q2, cos, sin, WIDTH, eps)
        q1, q2 = q1.to(dtype), q2.to(dtype)
        w = tl.load(query_ptr + HEADS * WIDTH + rows, mask=rows < HEADS, other=0).to(tl.float32)
        for start in range(0, tl.minimum(E, number + 1), BLOCK_N):
            slot = start + tl.arange(0, BLOCK_N)
            ptrs = keys_ptr + slot[:, None] * WIDTH + offs
            both = (slot < E)[:, None] & mask
            n1, n2 = tl.load(ptrs, mask=both, other=0), tl.load(ptrs + HALF, mask=both, other=0)
            if EIGHT:
                n1 = numbers_of(n1, True, NATIVE).to(dtype)
                n2 = numbers_of(n2, True, NATIVE).to(dtype)
            dots = tl.dot(n1, tl.trans(q1), input_precision=PRECISION)
            dots = tl.dot(n2, tl.trans(q2), dots, input_precision=PRECISION)
            found = tl.sum(tl.maximum(dots, 0) * w[None, :], axis=1)
            tl.store(scores_ptr + slot, found, mask=slot < E)
        tl.debug_barrier()  # other threads read these scores
        # scores are in the order of entries: index s is one of the visible entries
        first = tl.maximum(complete - MOST, 0)
        there = first + s < complete
        scores = tl.load(scores_ptr + (first + s) % E, mask=there, other=0)
        bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)  # zero has no sign
        lowest = -2147483648
        order = tl.where(there, bits ^ ((bits >> 31) & 0x7FFFFFFF), lowest)
        least = tl.full((), lowest, tl.int32)
        for bit in range(32):
            higher = least + (tl.full((), 1, tl.int32) << (31 - bit))
            enough = tl.sum((order >= higher).to(tl.int32)) >= SIZE
            least = tl.where(enough, higher, least)
        above = there & (order > least)
        equal = (there & (order == least)).to(tl.int32)
        wanted = SIZE - tl.sum(above.to(tl.int32))
        from_here = tl.sum(equal) - tl.cumsum(equal) + equal
        taken = above | ((equal > 0) & (from_here <= wanted))
        count = tl.cumsum(taken.to(tl.int32))
        tl.store(choice_ptr + count - 1, first + s, mask=taken)
        tl.store(choice_ptr + s, -1, mask=(s >= tl.sum(taken.to(tl.int32))) & (s < SIZE))


def _choose_next_triton(
    query: Tensor, key: Tensor, keys: Tensor, choice: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, m: int, most: int, eps: float,
) -> None:  # fmt: skip
    (slots, width), size = keys.shape[-2:], choice.shape[-1]
    heads = query.shape[-1] // (width + 1)
    scores = torch.empty(keys.shape[:-1], dtype=torch.float32, device=keys.device)
    block = triton.next_power_of_2(max(1, min(most, slots), size))
    in_eight_bits = keys.dtype == E4M3
    codes = keys.view(torch.uint8) if in_eight_bits else keys
    _choose_next_kernel[(position.numel(),)](
        query, key, codes, choice, position, cos, sin, scores, slots, m, most, size, eps,
        HEADS=heads, HALF=width // 2, BLOCK_R=max(16, triton.next_power_of_2(heads)),
        BLOCK_H=max(16, triton.next_power_of_2(width // 2)),
        BLOCK_N=min(256, max(16, triton.next_power_of_2(slots))), BLOCK=block,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", EIGHT=in_eight_bits,
        NATIVE=has_e4m3(keys), num_warps=8,
    )  # fmt: skip


def _with_state(inputs: tuple, _found: None) -> tuple[Tensor, Tensor]:
    """Return the modified buffers."""
    _, _, keys, choice, *_ = inputs
    return choice, keys.float() if keys.dtype == E4M3 else keys


_QUARTERS = (1.0, 0.0, -1.0, 0.0), (0.0, 1.0, 0.0, -1.0)
"""Cosines and sines of multiples of 90 degrees."""


def index_of_byte(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype, heads: int, width: int,
    slots: int, size: int, m: int, most: int, position: int,
) -> tuple:  # fmt: skip
    """Draw inputs of `choose_next_` whose scores are often equal, and exact in every dtype.

    So the selection does not depend on rounding or on the order of sums. Queries and the new key
    contain ones, or alternate ones and fives; with an eps of 3 the norm divides these by 2 or 4.
    Rotations are by multiples of 90 degrees.
    """

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    vectors = 1 - 2 * integers(0, 1, heads + 1, width)
    vectors[:, ::2] *= 1 + 4 * integers(0, 1, heads + 1, 1)
    weights, keys = integers(-3, 3, heads), integers(-3, 3, slots, width)
    query = torch.cat((vectors[1:].flatten(), weights))
    choice = torch.arange(size, dtype=torch.int32, device=device)
    quarter = integers(0, 3, position + 1, width // 2)
    cos, sin = (torch.tensor(of, device=device)[quarter.to(device)] for of in _QUARTERS)
    place = torch.tensor(position, dtype=torch.int32, device=device)
    given = (part.to(device, dtype) for part in (query, vectors[0], keys))
    return (*given, choice, place, cos, sin, m, most, 3.0)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    # (heads, width, slots, k, m, most, position)
    shapes = [
        (1, 4, 5, 2, 3, 4, 0), (2, 8, 5, 2, 3, 4, 2), (2, 8, 5, 3, 3, 4, 29),
        (3, 4, 9, 4, 4, 8, 30), (4, 32, 40, 7, 4, 39, 119), (2, 6, 20, 30, 2, 99, 37),
        (1, 4, 1, 1, 4, 3, 1), (3, 4, 9, 8, 4, 8, 43),
    ]  # fmt: skip
    dtypes = [torch.float32]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        shapes += [(4, 32, 4097, 128, 4, 4096, 16383), (4, 32, 4097, 128, 4, 4096, 17003)]
        dtypes += [torch.bfloat16]
    for heads, width, slots, size, m, most, position in shapes:
        for dtype in dtypes:
            label = f"{heads}x{width} at {position}, {size} of {slots} slots"
            label += " bf16" if dtype == torch.bfloat16 else ""
            inputs = index_of_byte(
                generator, device, dtype, heads, width, slots, size, m, most, position
            )
            yield Case(label, inputs)
            if size < slots:  # all scores are equal: the last entries are selected
                still = inputs[0].clone()
                still[-heads:] = 0
                yield Case(f"{label}, equal", (still, *inputs[1:]))
            yield Case(f"{label}, keys in e4m3", (*inputs[:2], inputs[2].to(E4M3), *inputs[3:]))
            if heads in (2, 4):  # an empty text, and one of a single byte
                places = (position, 0, max(0, position - 1))
                texts = [
                    (*inputs[:4], torch.full_like(inputs[4], place), *inputs[5:])
                    for place in places
                ]
                yield Case(f"3 texts of {label}", stacked_texts(texts, *SHARED))


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    ratio, most, size = 2 + dice.below(4), 1 + dice.below(60), 1 + dice.below(9)
    return index_of_byte(
        dice.seeded(), dice.device, dice.dtype, dice.pick((1, 3)), 2 * (1 + min(k, 19)),
        most + 1, size, ratio, most, dice.below(3 * most * ratio),
    )  # fmt: skip


choose_next_ = Operation(
    "choose_next", _choose_next_triton, _choose_next_torch, choose_next_reference, _cases,
    Gate(
        relative=1e-6,
        reason="choices and drawn keys are exact; a square root may err in its last bit",
    ),
    {
        "query": Array("*T, Q", dense=True), "key": Array("*T, D", dense=True),
        "keys": Array("*T, E, D", (*REAL, E4M3), dense=True),
        "choice": Array("*T, K", INT32, dense=True), **PLACE,
        "m": Number(()), "most": Number(()), "eps": Number(()),
    },
    where=(
        "len(T) < 2", "E > 0", "D % 2 == 0", "Q % (D + 1) == 0",
        "keys.dtype in (query.dtype, torch.float8_e4m3fn)",
    ),
    compared=_with_state, draw=_draw, needs_rows=False,
    timed=[
        Timed(f"{'16 texts of ' * len(texts)}128 of 4096 at {position}", T=texts, Q=132, D=32,
              E=4097, K=128, P=16384, position=position, m=4, most=4096, eps=1e-6)
        for position in (16383, 16382) for texts in ((), (16,))
    ],
)  # fmt: skip
"""Store the open entry's key, and update the selection if the byte completes the entry.

With several texts, all arguments but `cos` and `sin` have a leading batch dimension.

Args:
    query: (h (d + 1),) float32 or bfloat16, contiguous: h queries of even width d, then h weights.
    key: (d,) in the dtype of `query`, contiguous.
    keys: (E, d) in that dtype or float8_e4m3fn, contiguous, modified in place; E is above `most`,
        or the ring never fills.
    choice: (k,) int32, contiguous, modified in place: ascending indices, padded with -1.
    position: int32 scalar tensor, below P.
    cos: (P, d / 2) float32, contiguous.
    sin: like `cos`.
    m: bytes per entry.
    most: M, the maximum number of entries that are visible.
    eps: added to mean squares.
"""
