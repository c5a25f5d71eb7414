"""Attention of one new byte over a ring of keys: y = softmax(q . k / sqrt(d)) @ v per head.

The byte at position p is stored in slot p mod W of W slots, so the ring holds the last W bytes and
the oldest is overwritten first. Query and key are rotated by row p of the tables and normalised, as
`rotary_norm_` does; key and value are stored before any attention. Only differences of positions
affect q . k, and the softmax does not depend on the order of keys, so the ring is never reordered.

    slots     | block 0 | block 1 | block 2 | ... | not filled |       W of a head
    program       0         1         2       ...                     sums and total to memory, then
    semaphores 0 -> 1 -> 2 -> ... -> n: the last program adds all sums and resets it to 0

Reason: one program per head would leave most multiprocessors idle, and a second launch to add the
sums costs as much as the attention of a short ring. The count of finished programs is in a buffer
that is 0 between launches, so a captured graph does not have to reset it.

The filled slots of a head are divided among programs: one block each, or several blocks if programs
are too few; then the next block is loaded while one is multiplied. Each program computes the sum of
exp(score) over its slots, and the sum of the values with these weights. Queries and keys are
normalised, so no score exceeds sqrt(d), and no maximum is subtracted. The last program to finish
adds all sums in the order of the slots, so the result has the same bits whichever program is last.

Texts are independent: each text has its own rings, position and programs. The partition of slots
depends only on the text's own number of slots, so a text has the same bits in any batch.

In eight bits, keys and values are entries of `eight_bits`: codes, and one exponent per position and
head. The new key and value are quantised before attention, so that a byte that is decoded has the
same result as in a prompt. The power of two of a key multiplies its score, that of a value its
weight, so codes are only converted.
"""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.eight_bits import (
    FORMATS,
    ROOM,
    decode_entries,
    decode_entries_reference,
    numbers_of,
    quantise_entries,
    quantise_entry,
    round_entries_reference,
    scale_of_entry,
)
from arbcli.kernels.attention.rotation import rotate, rotate_reference
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, INT8, INT32, Arguments, Array, Number
from arbcli.kernels.runtime.backend import uses_native
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.texts import stacked_texts, text_by_text

SHARED = (4, 5)
"""Arguments of `decode_attention` that are the same for all texts."""
TILE = 8192
"""Maximum number of elements of keys per block."""
SLOTS = 32
"""Maximum number of slots per block."""
PROGRAMS = 1024
"""Number of programs that saturates memory bandwidth; beyond it, a program has several blocks."""
MAX_PARTS = 32
"""Number of partial sums that are added at a time."""
SLOTS_OF_TEXTS, SPAN_OF_TEXTS = 64, 512
"""Maximum slots per block and per program, if several texts fill the GPU."""


@text_by_text(3, *SHARED)
def decode_attention_reference(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, one_program: bool = False, exponents: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the result, the rings and the `semaphores` of `decode_attention`, in float64.

    Keys and values are decoded.
    """
    p, slot, x = int(position), int(position) % keys.shape[1], qkv.to(torch.float64)
    q, k = rotated_reference(x, cos[p], sin[p], eps)
    if exponents is None:
        keys, values = keys.to(torch.float64), values.to(torch.float64)
        keys[:, slot], values[:, slot] = k, x[2]
    else:
        q, k = (part.to(qkv.dtype).to(torch.float64) for part in (q, k))
        stored = keys.dtype
        keys, values = map(decode_entries_reference, (keys, values), exponents)
        keys[:, slot], values[:, slot] = (round_entries_reference(new, stored) for new in (k, x[2]))
    return attend_reference(q, keys, values, p), keys, values, torch.zeros_like(semaphores)


def rotated_reference(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Rotate and normalise the query and the key of one byte, in float64."""
    root = (qkv[:2].square().mean(-1, True) + eps).sqrt()
    return rotate_reference(qkv[:2], cos, sin) / root


def attend_reference(q: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """Attend to a ring that includes the byte at `position`, in float64."""
    seen = min(position + 1, keys.shape[1])
    y = torch.empty_like(q)
    for head in range(len(q)):
        weight = torch.exp(keys[head, :seen] @ q[head] / q.shape[-1] ** 0.5)
        y[head] = weight / weight.sum() @ values[head, :seen]
    return y


def rotated_torch(qkv: Tensor, position: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Rotate and normalise the query and the key of one byte."""
    rotated = rotate(qkv[:2], *(table.index_select(0, position[None]) for table in (cos, sin)))
    return functional.rms_norm(rotated, rotated.shape[-1:], eps=eps).to(qkv.dtype)


@text_by_text(3, *SHARED)
def _decode_attention_torch(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, one_program: bool = False, exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    window, slot = keys.shape[1], (position % keys.shape[1]).long()[None]
    q, k = rotated_torch(qkv, position, cos, sin, eps)
    if exponents is None:
        keys.index_copy_(1, slot, k[:, None])
        values.index_copy_(1, slot, qkv[2][:, None])
    else:
        rings = [keys, values]
        for i, new in enumerate((k, qkv[2])):
            codes, of_new = quantise_entries(new, rings[i].dtype)
            # torch copies no e4m3 by index
            rings[i].view(torch.int8).index_copy_(1, slot, codes.view(torch.int8)[:, None])
            exponents[i].index_copy_(1, slot, of_new[:, None])
            rings[i] = decode_entries(rings[i], exponents[i], torch.float32)
        q, (keys, values) = q.float(), rings
    seen = torch.arange(window, device=qkv.device) <= position
    parts = (q[None, :, None], keys[None], values[None])
    y = functional.scaled_dot_product_attention(*parts, attn_mask=seen[None])
    return y[0, :, 0].to(qkv.dtype)


@text_by_text(3, *SHARED)
def _decode_attention_native(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, one_program: bool = False, exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if exponents is not None:
        return _decode_attention_torch(
            qkv, keys, values, position, cos, sin, semaphores, eps, one_program, exponents
        )
    heads, window, width = keys.shape
    y = torch.empty(heads, width, dtype=qkv.dtype, device=qkv.device)
    native.call(
        "attend_position", qkv, qkv.dtype == torch.bfloat16, keys, values, position, cos, sin, eps,
        y, heads, window, width, native.threads_for(keys.numel()),
    )  # fmt: skip
    return y


@triton.jit
def load_rotated(
    qkv_ptr, cos_ptr, sin_ptr, position, head, offs_d, mask_d, HEADS, eps,
    HALF: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Load a head's query, key and value; rotate and normalise the first two: [BLOCK_D] each."""
    WIDTH: tl.constexpr = 2 * HALF
    # query and key, [BLOCK_D, 2]: an element is rotated with its partner in the other half
    is_first = offs_d < HALF
    other, angle = tl.where(is_first, HALF, -HALF), offs_d - tl.where(is_first, 0, HALF)
    table = position.to(tl.int64) * HALF + angle
    cos = tl.load(cos_ptr + table, mask=mask_d, other=0)
    sin = tl.load(sin_ptr + table, mask=mask_d, other=0)
    sin = tl.where(is_first, -sin, sin)
    q_ptrs = qkv_ptr + head * WIDTH + offs_d
    both = q_ptrs[:, None] + (HEADS * WIDTH * tl.arange(0, 2))[None, :]
    wait_for_last(OVERLAP)
    x = tl.load(both, mask=mask_d[:, None], other=0).to(tl.float32)
    partner = tl.load(both + other[:, None], mask=mask_d[:, None], other=0).to(tl.float32)
    v = tl.load(q_ptrs + 2 * HEADS * WIDTH, mask=mask_d, other=0)
    r = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    x = (x * cos[:, None] + partner * sin[:, None]) * r[None, :]
    q, k = tl.split(x.to(qkv_ptr.dtype.element_ty))
    return q, k, v


@triton.jit
def add_parts(
    totals_ptr, sums_ptr, semaphores_ptr, y_ptr, head, splits, offs_d, mask_d,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_P: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Count this program; in the last one, add the `splits` partial sums of a head."""
    tl.debug_barrier()  # all threads store their sums before the program is counted
    arrived = tl.atomic_add(semaphores_ptr + head, 1, sem="acq_rel")
    if arrived == tl.minimum(splits, PROGRAMS) - 1:
        total, found = 0.0, tl.zeros(offs_d.shape, dtype=tl.float32)
        for start in range(0, splits, BLOCK_P):
            offs_p = start + tl.arange(0, BLOCK_P)
            mask_p, parts = offs_p < splits, head * SPLITS + offs_p
            sums = tl.load(  # [BLOCK_P, BLOCK_D]
                sums_ptr + parts[:, None] * WIDTH + offs_d[None, :],
                mask=mask_p[:, None] & mask_d[None, :], other=0,
            )  # fmt: skip
            total += tl.sum(tl.load(totals_ptr + parts, mask=mask_p, other=0))
            found += tl.sum(sums, axis=0)
        y = (found / total).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + head * WIDTH + offs_d, y, mask=mask_d)
        tl.store(semaphores_ptr + head, 0)


@triton.jit
def span_of(seen, BLOCK_S: tl.constexpr, SPLITS: tl.constexpr):
    """Compute the slots per program: the fewest whole blocks that cover the ring."""
    return BLOCK_S * tl.cdiv(tl.cdiv(seen, BLOCK_S), SPLITS)


@triton.jit
def _load_slots(
    keys_ptr, values_ptr, exponents_ptr, start, end, slot, offs_d, mask_d, entries,
    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """Load the keys and values of a block, [BLOCK_S, BLOCK_D], except the slot of the new byte.

    With `EIGHT` they are codes, followed by their exponents, [BLOCK_S, 1].
    """
    offs_s = start + tl.arange(0, BLOCK_S)[:, None]
    is_old = (offs_s < end) & (offs_s != slot)
    ring, mask = offs_s * WIDTH + offs_d[None, :], is_old & mask_d[None, :]
    key = tl.load(keys_ptr + ring, mask=mask, other=0)
    value = tl.load(values_ptr + ring, mask=mask, other=0)
    of_key, of_value = slot, slot  # not used
    if EIGHT:
        of_key = tl.load(exponents_ptr + offs_s, mask=is_old, other=0)
        of_value = tl.load(exponents_ptr + entries + offs_s, mask=is_old, other=0)
    return key, value, of_key, of_value


@triton.jit
def _numbers(x, EIGHT: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """Convert keys or values to float32; codes are not scaled."""
    if EIGHT:
        return numbers_of(x, E4M3, NATIVE)
    return x.to(tl.float32)


@triton.jit
def _decode_attention_kernel(
    qkv_ptr, keys_ptr, values_ptr, exponents_ptr, position_ptr, cos_ptr, sin_ptr, semaphores_ptr,
    totals_ptr, sums_ptr, y_ptr,
    W, HEADS, scale, eps,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr, SEVERAL: tl.constexpr, SPAN: tl.constexpr, BLOCK_P: tl.constexpr,
    EIGHT: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    head, split, text = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(position_ptr + text)
    # base of this head in int64; offsets within its ring are int32
    ring, entries = (text.to(tl.int64) * HEADS + head) * W, tl.cast(HEADS, tl.int64) * W
    keys_ptr, values_ptr = keys_ptr + ring * WIDTH, values_ptr + ring * WIDTH
    qkv_ptr += text * 3 * HEADS * WIDTH
    if EIGHT:
        exponents_ptr += ring + text * entries
    slot, seen = position % W, tl.minimum(position + 1, W)
    span = SPAN if SPAN > 0 else span_of(seen, BLOCK_S, SPLITS) if SEVERAL else BLOCK_S
    first = split * span
    if first < seen:
        # load from the ring first, as it has the longest latency
        offs_d, end = tl.arange(0, BLOCK_D), tl.minimum(first + span, seen)
        mask_d = offs_d < WIDTH
        block = _load_slots(
            keys_ptr, values_ptr, exponents_ptr, first, end, slot, offs_d, mask_d, entries,
            WIDTH, BLOCK_S, EIGHT,
        )  # fmt: skip
        q, k, v = load_rotated(
            qkv_ptr, cos_ptr, sin_ptr, position, head, offs_d, mask_d, HEADS, eps, HALF, OVERLAP
        )
        q = q.to(tl.float32)
        if SPAN > 0:  # scale the query once, not every score
            q, scale = q * scale, 1.0
        mine = slot // span == split
        if EIGHT:
            k, of_new_key = quantise_entry(k.to(tl.float32), E4M3, NATIVE)
            v, of_new_value = quantise_entry(v.to(tl.float32), E4M3, NATIVE)
        if mine:
            new = slot * WIDTH + offs_d
            tl.store(keys_ptr + new, k, mask=mask_d)
            tl.store(values_ptr + new, v, mask=mask_d)
            if EIGHT:
                at = exponents_ptr + slot + tl.arange(0, 1)
                tl.store(at, of_new_key)
                tl.store(at + entries, of_new_value)

        # sums of warps stay separate until the end: adding them needs a barrier
        weights = tl.zeros((BLOCK_S, 1), dtype=tl.float32)
        sums = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
        for start in range(first, end if SEVERAL else first + 1, BLOCK_S):
            key, value, of_key, of_value = block
            if SEVERAL:
                block = _load_slots(
                    keys_ptr, values_ptr, exponents_ptr, start + BLOCK_S, end, slot, offs_d, mask_d,
                    entries, WIDTH, BLOCK_S, EIGHT,
                )  # fmt: skip
            offs_s = start + tl.arange(0, BLOCK_S)[:, None]
            products = _numbers(key, EIGHT, E4M3, NATIVE) * q[None, :]
            score = tl.sum(products, axis=1, keep_dims=True)
            score *= scale_of_entry(of_key, E4M3) * scale if EIGHT else scale
            weight = tl.where((offs_s < end) & (offs_s != slot), tl.exp(score), 0)  # [BLOCK_S, 1]
            weights += weight
            if EIGHT:
                weight *= scale_of_entry(of_value, E4M3)
            sums += weight * _numbers(value, EIGHT, E4M3, NATIVE)
        # the slot of the new byte, which was not loaded
        score, new_value = tl.sum(_numbers(k, EIGHT, E4M3, NATIVE) * q), v.to(tl.float32)
        if EIGHT:
            score *= tl.sum(scale_of_entry(of_new_key, E4M3)) * scale
            new_value = tl.sum(scale_of_entry(of_new_value, E4M3)) * numbers_of(v, E4M3, NATIVE)
        else:
            score *= scale
        of_new = tl.where(mine, tl.exp(score), 0)

        place = text * HEADS + head
        sums = tl.sum(sums, axis=0) + of_new * new_value
        total = tl.sum(weights) + of_new
        if SPLITS == 1:
            y = (sums / total).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + place * WIDTH + offs_d, y, mask=mask_d)
        else:
            part = place * SPLITS + split
            tl.store(totals_ptr + part, total)
            tl.store(sums_ptr + part.to(tl.int64) * WIDTH + offs_d, sums, mask=mask_d)
            add_parts(
                totals_ptr, sums_ptr, semaphores_ptr, y_ptr, place, tl.cdiv(seen, span), offs_d,
                mask_d, WIDTH, SPLITS, BLOCK_P, SPLITS,
            )  # fmt: skip


class Tiling(NamedTuple):
    """Partition of the slots of a ring among programs."""

    slots: int
    """Number of slots per block."""
    splits: int
    """Maximum number of programs per head."""
    several: bool
    """Whether a program may have several blocks."""
    warps: int
    span: int = 0
    """Slots per program, a multiple of `slots`; 0 is the minimum that `splits` allows."""
    registers: int | None = None
    """Maximum number of registers per thread."""


def tiling(
    heads: int, window: int, width: int, dtype: torch.dtype, one_program: bool = False
) -> Tiling:
    """Choose the tiling that was fastest on an H200; `one_program` is as in `decode_attention`."""
    block_d = triton.next_power_of_2(width)
    if one_program and block_d * triton.next_power_of_2(window) <= TILE:
        return Tiling(triton.next_power_of_2(window), 1, False, 8)
    slots = max(1, min(SLOTS, TILE // block_d))
    blocks, most = triton.cdiv(window, slots), max(1, PROGRAMS // heads)
    light = width == block_d and blocks <= most  # masks and a second block need registers
    warps = 8 if dtype == torch.float32 else 2 if light else 4
    return Tiling(slots, min(blocks, most), blocks > most, warps)


def _tiling_of_texts(window: int, width: int) -> Tiling:
    """Choose the tiling of several texts: few programs per head, with a long span each."""
    slots = max(1, min(SLOTS_OF_TEXTS, TILE // triton.next_power_of_2(width)))
    return Tiling(slots, triton.cdiv(window, SPAN_OF_TEXTS), True, 8, SPAN_OF_TEXTS, 128)


def _decode_attention_triton(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, one_program: bool = False, exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (heads, window, width), is_e4m3 = keys.shape[-3:], keys.dtype == E4M3
    if exponents is not None:
        tile = tiling(heads, window, width, qkv.dtype)
        if width > 128 and qkv.dtype != torch.float32:  # avoids register spills
            tile = tile._replace(warps=4 * tile.warps)
    elif position.dim():
        tile = _tiling_of_texts(window, width)
    else:
        tile = tiling(heads, window, width, qkv.dtype, one_program)
    parts = semaphores.numel() * tile.splits if tile.splits > 1 else 0
    found = torch.empty(parts * (width + 1), dtype=torch.float32, device=qkv.device)
    y = qkv.new_empty(*position.shape, heads, width)
    rings = [ring.view(torch.uint8) if is_e4m3 else ring for ring in (keys, values)]
    _decode_attention_kernel[(heads, tile.splits, position.numel())](
        qkv, *rings, exponents, position, cos, sin, semaphores,
        *found.split([parts, parts * width]), y, window, heads, width**-0.5, eps,
        HALF=width // 2, BLOCK_D=triton.next_power_of_2(width), BLOCK_S=tile.slots,
        SPLITS=tile.splits, SEVERAL=tile.several, SPAN=tile.span,
        BLOCK_P=min(triton.next_power_of_2(tile.splits), MAX_PARTS),
        EIGHT=exponents is not None, E4M3=is_e4m3, NATIVE=has_e4m3(qkv),
        num_warps=tile.warps, maxnreg=tile.registers, **overlap_options(qkv),
    )  # fmt: skip
    return y


def decode_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, one_program: bool = False, exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Store the key and value of one byte in a ring, and attend to the ring.

    With several texts, all arguments but `cos` and `sin`, and the result, have a leading batch
    dimension.

    Args:
        qkv: (3, heads, d) float32 or bfloat16, contiguous, d even: query, key and value.
        keys: (heads, W, d) in the dtype of `qkv`, contiguous; slot `position` mod W is written.
            Keys must be normalised, so that exp(score) does not overflow. Slots that were never
            written must be finite.
        values: like `keys`.
        position: int32 scalar tensor: number of earlier bytes. It is read on the device, and
            must be below P.
        cos: (P, d / 2) float32, contiguous.
        sin: like `cos`.
        semaphores: (heads,) int32 zeros, reset to zeros.
        eps: added to the mean square.
        one_program: whether one program computes all slots of a head, if they fit in one block: for
            short rings of one text, which gain nothing from several programs.
        exponents: (2, heads, W) int8, contiguous, modified in place: the exponents of keys and
            values, if these are float8_e4m3fn or int8 codes of `quantise_entries`.

    Returns:
        (heads, d) in the dtype of `qkv`: the mean of the last min(position + 1, W) values, weighted
        by softmax(q . k / sqrt(d)); computed in float32.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    inputs = qkv, keys, values, position, cos, sin, semaphores, eps, one_program
    if exponents is None:
        DECODE_ATTENTION.check(*inputs)
    else:
        DECODE_ATTENTION_8BIT.check(*inputs, exponents)
    return DECODE_ATTENTION.chosen(qkv)(*inputs, exponents)


def count_on_(position: Tensor, length: int) -> None:
    """Add `length` to a position, an int32 scalar tensor, in place."""
    if uses_native(position):
        native.call("count", position, length)
    else:
        position += length


SHAPES = ((1, 1, 2, 0), (1, 3, 10, 1), (2, 7, 66, 30), (3, 65, 16, 64), (2, 100, 64, 17),
          (1, 200, 128, 1000), (2, 130, 8, 128), (1, 2100, 4, 2099))  # fmt: skip
"""(heads, W, d, position): rings that are empty, filling, just full and overwritten."""
SHORT = ((1, 33, 10, 20), (3, 65, 16, 64), (2, 100, 6, 130))
"""Rings that fit in one program."""
LARGE = ((6, 256, 64, 300), (16, 2048, 128, 2047), (16, 2048, 128, 77), (4, 5000, 96, 4999))


OF_TEXTS = ((1, 1, 1, 2, (0,)), (3, 2, 70, 10, (0, 69, 200)), (2, 3, 100, 64, (199, 5)),
            (4, 1, 40, 16, (31, 32, 40, 79)), (3, 1, 1100, 2, (5, 1090, 1400)))  # fmt: skip
"""(texts, heads, W, d, positions)."""
LARGE_OF_TEXTS = ((16, 16, 2048, 128, tuple(range(0, 2400, 150))), (2, 6, 256, 64, (300, 7)))


def _byte_of(
    sizes: tuple, position: int | tuple[int, ...], device: torch.device, dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple:  # fmt: skip
    """Draw the inputs of one byte, or of one byte per text, with their rings; the eps is last."""
    parts = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    *_, heads, width = sizes[0]
    place = torch.tensor(position, dtype=torch.int32, device=device)
    rows = max(position) + 1 if isinstance(position, tuple) else position + 2
    angle = 7 * torch.randn(rows, width // 2, generator=generator).to(device)
    semaphores = torch.zeros(*place.shape, heads, dtype=torch.int32, device=device)
    return (*parts, place, angle.cos(), angle.sin(), semaphores, 0.1)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32, False) for shape in SHAPES]
    shapes += [(*shape, torch.float32, True) for shape in SHORT]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        both = (torch.float32, torch.bfloat16)
        shapes += [(*shape, dtype, False) for shape in LARGE for dtype in both]
        shapes += [(8, 128, 64, 500, dtype, True) for dtype in both]
    for heads, window, width, position, dtype, one_program in shapes:
        low = dtype == torch.bfloat16
        label = (
            f"{heads}x{window}x{width} at {position}{' bf16' * low}{' one program' * one_program}"
        )
        sizes = ((3, heads, width), (heads, window, width), (heads, window, width))
        inputs = _byte_of(sizes, position, device, dtype, generator)
        yield Case(label, (*inputs, one_program))
    yield from _cases_of_texts(device)


def _cases_of_texts(device: torch.device) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32) for shape in OF_TEXTS]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        both = (torch.float32, torch.bfloat16)
        shapes += [(*shape, dtype) for shape in LARGE_OF_TEXTS for dtype in both]
    for texts, heads, window, width, positions, dtype in shapes:
        low, ring = dtype == torch.bfloat16, (texts, heads, window, width)
        sizes = ((texts, 3, heads, width), ring, ring)
        inputs = _byte_of(sizes, positions, device, dtype, generator)
        label = f"{texts} texts of {heads}x{window}x{width}{' bf16' * low}"
        yield Case(label, inputs)


SMALL_8BIT = (*SHAPES[:-1], (1, 40, 512, 33))
LARGE_8BIT = (*LARGE, (1, 300, 512, 299), (4, 16384, 64, 16383), (2, 16384, 128, 40000))


def _cases_8bit(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32) for shape in SMALL_8BIT]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        large = (torch.float32, torch.bfloat16)
        shapes += [(*shape, dtype) for shape in LARGE_8BIT for dtype in large]
    for heads, window, width, position, dtype in shapes:
        qkv = torch.randn(3, heads, width, generator=generator).to(device, dtype)
        if width == 10:
            qkv[2, :, 3] = 3.99  # rounds up to the next octave, beyond int8 codes
        rings = [torch.randn(heads, window, width, generator=generator) for _ in range(2)]
        rings[1] *= torch.exp2(torch.randint(-9, 9, (heads, window, 1), generator=generator))
        angle = 7 * torch.randn(position + 1, width // 2, generator=generator).to(device)
        place = torch.tensor(position, dtype=torch.int32, device=device)
        semaphores = torch.zeros(heads, dtype=torch.int32, device=device)
        for name, stored in FORMATS.items():
            quantised = [quantise_entries(ring.to(device), stored) for ring in rings]
            (keys, values), exponents = zip(*quantised, strict=True)
            label = f"{name} {heads}x{window}x{width} at {position}"
            label += " next octave" if width == 10 else ""
            label += " bf16" if dtype == torch.bfloat16 else ""
            ring, table = (qkv, keys, values, place), (angle.cos(), angle.sin())
            inputs = (*ring, *table, semaphores, 0.1, False, torch.stack(exponents))
            yield Case(label, inputs)
            if position in (17, 300):  # one text is at its first position
                begins = (torch.roll(qkv, 1, 1), keys, values, torch.zeros_like(place))
                texts = [inputs, (*begins, *inputs[4:]), inputs]
                yield Case(f"3 texts of {label}", stacked_texts(texts, *SHARED))


def _with_state(inputs: tuple, y: Tensor) -> tuple[Tensor, ...]:
    """Return the result, the semaphores and the decoded rings."""
    _, keys, values, *_, semaphores, _, _, exponents = inputs
    rings = zip((keys, values), exponents.unbind(-3), strict=True)
    return y, *(decode_entries(*ring, torch.float32) for ring in rings), semaphores


def _timed(device: torch.device, heads: int, window: int, width: int, *texts: int) -> tuple:
    """Draw the inputs of one byte, or of one byte per text, at the end of full bf16 rings."""
    ring, place = (*texts, heads, window, width), window - 1
    sizes = ((*texts, 3, heads, width), ring, ring)
    at = (place,) * texts[0] if texts else place
    return _byte_of(sizes, at, device, torch.bfloat16, torch.Generator().manual_seed(0))


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    attend = functional.scaled_dot_product_attention
    for texts in ((), (16,)):
        inputs = _timed(device, 16, 2048, 128, *texts)
        q, *rings = (
            part if texts else part[None] for part in (inputs[0][..., 0, :, :], *inputs[1:3])
        )
        yield Timing(
            f"{'16 texts of ' if texts else ''}16x2048x128 bf16", inputs,
            run=_decode_attention_triton, peer=partial(attend, q[:, :, None], *rings),
            peer_name="torch's attention alone",
        )  # fmt: skip


def _timings_8bit(device: torch.device, _group_size: int) -> Iterator[Timing]:
    for shape in ((16, 2048, 128), (16, 16384, 64)):
        plain = _timed(device, *shape)
        for name, stored in FORMATS.items():
            codes, exponents = quantise_entries(torch.stack(plain[1:3]), stored)
            inputs = (plain[0], *codes.unbind(), *plain[3:], False, exponents)
            label = f"{name} {'x'.join(map(str, shape))}"
            yield Timing(
                label, inputs, run=_decode_attention_triton,
                peer=partial(decode_attention, *plain), peer_name="the ring in bf16",
            )  # fmt: skip
            if shape[1] < 16384:
                texts = stacked_texts([inputs] * 16, *SHARED)
                yield Timing(f"16 texts of {label}", texts, run=_decode_attention_triton)


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    texts = (1 + dice.below(4),) if dice.chance(0.4) else ()
    heads, half = 1 + dice.below(4), 1 + min(k, 64)
    qkv, keys, values = (
        dice.reals(prod(shape[:-1]), shape[-1]).contiguous().view(shape)
        for shape in ((*texts, 3, heads, 2 * half), *(((*texts, heads, n, 2 * half),) * 2))
    )
    position = dice.integers(0, 3 * n - 1, *texts, dtype=torch.int32).contiguous()
    angle = dice.reals(3 * n, half, dtype=torch.float32).contiguous()
    semaphores = torch.zeros(*texts, heads, dtype=torch.int32, device=dice.device)
    return qkv, keys, values, position, angle.cos(), angle.sin(), semaphores, 0.1


def _draw_8bit(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    qkv, keys, values, *rest = _draw(dice, group_size, m, n, k)
    stored = dice.pick((*FORMATS.values(),))
    values = values * torch.exp2(dice.integers(-9, 9, *values.shape[:-1])[..., None].float())
    (keys, of_keys), (values, of_values) = (quantise_entries(x, stored) for x in (keys, values))
    return qkv, keys, values, *rest, False, torch.stack((of_keys, of_values), dim=-3)


PLACE: Arguments = {
    "position": Array("*T", INT32, dense=True),
    "cos": Array("P, D // 2", FLOAT, dense=True),
    "sin": Array("P, D // 2", FLOAT, dense=True),
}
"""Position of each text's byte, and the cosines and sines that rotate vectors of width D."""
_ARGUMENTS: Arguments = {
    "qkv": Array("*T, 3, H, D", dense=True),
    "keys": Array("*T, H, W, D", dense=True),
    "values": Array("*T, H, W, D", dense=True),
    **PLACE,
    "semaphores": Array("*T, H", INT32, dense=True),
    "eps": Number(()),
    "one_program": Number(()),
}
_CODES = Array("*T, H, W, D", tuple(ROOM), dense=True)
_WHERE = ("len(T) < 2", "D % 2 == 0", "W > 0", "W * D < 2**31")

DECODE_ATTENTION = Operation(
    "decode_attention", _decode_attention_triton, _decode_attention_torch,
    decode_attention_reference, _cases,
    Gate(
        relative=1e-5, peer_slack=0.1,
        reason="float32 sums of up to 5000 values; in bf16 no worse than torch's attention by 10 %",
    ),
    _ARGUMENTS, where=_WHERE, compared=("keys", "values", "semaphores"), draw=_draw,
    needs_rows=False, torch_is_peer=True, timings=_timings, native=_decode_attention_native,
)  # fmt: skip
DECODE_ATTENTION_8BIT = Operation(
    "decode_attention_8bit", _decode_attention_triton, _decode_attention_torch,
    decode_attention_reference, _cases_8bit,
    Gate(
        relative=3e-3,
        reason="a result in bf16 is rounded, and a sum's last bit may decide how a code is",
    ),
    {
        **_ARGUMENTS, "keys": _CODES, "values": _CODES,
        "exponents": Array("*T, 2, H, W", INT8, dense=True),
    },
    where=(*_WHERE, "keys.dtype == values.dtype"), compared=_with_state, draw=_draw_8bit,
    needs_rows=False, timings=_timings_8bit,
)  # fmt: skip
