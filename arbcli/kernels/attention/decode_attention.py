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

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.eight_bits import (
    decode_entries,
    numbers_of,
    quantise_entries,
    quantise_entry,
    scale_of_entry,
)
from arbcli.kernels.attention.rotary_norm import load_angles, rotate
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import backend_of
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last
from arbcli.kernels.runtime.texts import text_by_text

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


class SpeculativeRings(NamedTuple):
    """Rings of one attention layer, and the new vectors that may be stored in them."""

    keys: Tensor
    """(heads, W, d)."""
    values: Tensor
    new: Tensor
    """(2, M, heads, d)."""


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
            codes, new_exponents = quantise_entries(new, rings[i].dtype)
            # torch copies no e4m3 by index
            rings[i].view(torch.int8).index_copy_(1, slot, codes.view(torch.int8)[:, None])
            exponents[i].index_copy_(1, slot, new_exponents[:, None])
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
    cos, sin = load_angles(cos_ptr, sin_ptr, table, mask_d)
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
    # the last program to arrive sees the sums of all others
    arrived = tl.atomic_add(semaphores_ptr + head, 1, sem="acq_rel")
    if arrived == tl.minimum(splits, PROGRAMS) - 1:
        total, weighted = 0.0, tl.zeros(offs_d.shape, dtype=tl.float32)
        # parts are added in a fixed order, whichever program is last
        for start in range(0, splits, BLOCK_P):
            offs_p = start + tl.arange(0, BLOCK_P)
            mask_p, parts = offs_p < splits, head * SPLITS + offs_p
            sums = tl.load(  # [BLOCK_P, BLOCK_D]
                sums_ptr + parts[:, None] * WIDTH + offs_d[None, :],
                mask=mask_p[:, None] & mask_d[None, :], other=0,
            )  # fmt: skip
            total += tl.sum(tl.load(totals_ptr + parts, mask=mask_p, other=0))
            weighted += tl.sum(sums, axis=0)
        y = (weighted / total).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + head * WIDTH + offs_d, y, mask=mask_d)
        # ready for the next launch
        tl.store(semaphores_ptr + head, 0)


@triton.jit
def span_of(seen, BLOCK_S: tl.constexpr, SPLITS: tl.constexpr):
    """Compute the slots per program: the fewest whole blocks that cover the ring."""
    return BLOCK_S * tl.cdiv(tl.cdiv(seen, BLOCK_S), SPLITS)


@triton.jit
def _load_slots(
    start, end, keys_ptr, values_ptr, exponents_ptr, slot, offs_d, mask_d, entries,
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
    key_exponents, value_exponents = slot, slot  # not used
    if EIGHT:
        key_exponents = tl.load(exponents_ptr + offs_s, mask=is_old, other=0)
        value_exponents = tl.load(exponents_ptr + entries + offs_s, mask=is_old, other=0)
    return key, value, key_exponents, value_exponents


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
    # the slots of this program; one beyond the filled slots does nothing
    slot, seen = position % W, tl.minimum(position + 1, W)
    span = SPAN if SPAN > 0 else span_of(seen, BLOCK_S, SPLITS) if SEVERAL else BLOCK_S
    first = split * span
    if first < seen:
        # load from the ring first, as it has the longest latency
        offs_d, end = tl.arange(0, BLOCK_D), tl.minimum(first + span, seen)
        mask_d = offs_d < WIDTH
        rings = (keys_ptr, values_ptr, exponents_ptr, slot, offs_d, mask_d, entries)
        block = _load_slots(first, end, *rings, WIDTH, BLOCK_S, EIGHT)
        # query, key and value of the new byte; every program of the head computes them
        q, k, v = load_rotated(
            qkv_ptr, cos_ptr, sin_ptr, position, head, offs_d, mask_d, HEADS, eps, HALF, OVERLAP
        )
        q = q.to(tl.float32)
        if SPAN > 0:  # scale the query once, not every score
            q, scale = q * scale, 1.0
        # the program whose span has the new slot stores key and value
        mine = slot // span == split
        if EIGHT:
            k, key_exponent = quantise_entry(k.to(tl.float32), E4M3, NATIVE)
            v, value_exponent = quantise_entry(v.to(tl.float32), E4M3, NATIVE)
        if mine:
            new = slot * WIDTH + offs_d
            tl.store(keys_ptr + new, k, mask=mask_d)
            tl.store(values_ptr + new, v, mask=mask_d)
            if EIGHT:
                at = exponents_ptr + slot + tl.arange(0, 1)
                tl.store(at, key_exponent)
                tl.store(at + entries, value_exponent)

        # sums of warps stay separate until the end: adding them needs a barrier
        weights = tl.zeros((BLOCK_S, 1), dtype=tl.float32)
        sums = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
        for start in range(first, end if SEVERAL else first + 1, BLOCK_S):
            # prefetch the next block, then weight the values of this one
            key, value, key_exponents, value_exponents = block
            if SEVERAL:
                block = _load_slots(start + BLOCK_S, end, *rings, WIDTH, BLOCK_S, EIGHT)
            offs_s = start + tl.arange(0, BLOCK_S)[:, None]
            products = _numbers(key, EIGHT, E4M3, NATIVE) * q[None, :]
            score = tl.sum(products, axis=1, keep_dims=True)
            score *= scale_of_entry(key_exponents, E4M3) * scale if EIGHT else scale
            weight = tl.where((offs_s < end) & (offs_s != slot), tl.exp(score), 0)  # [BLOCK_S, 1]
            weights += weight
            if EIGHT:
                weight *= scale_of_entry(value_exponents, E4M3)
            sums += weight * _numbers(value, EIGHT, E4M3, NATIVE)
        # the slot of the new byte, which was not loaded
        score, new_value = tl.sum(_numbers(k, EIGHT, E4M3, NATIVE) * q), v.to(tl.float32)
        if EIGHT:
            score *= tl.sum(scale_of_entry(key_exponent, E4M3)) * scale
            new_value = tl.sum(scale_of_entry(value_exponent, E4M3)) * numbers_of(v, E4M3, NATIVE)
        else:
            score *= scale
        new_weight = tl.where(mine, tl.exp(score), 0)

        place = text * HEADS + head
        # add up the slots, and store the output or, if programs share a head, a part of it
        sums = tl.sum(sums, axis=0) + new_weight * new_value
        total = tl.sum(weights) + new_weight
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
    blocks, limit = triton.cdiv(window, slots), max(1, PROGRAMS // heads)
    light = width == block_d and blocks <= limit  # masks and a second block need registers
    warps = 8 if dtype == torch.float32 else 2 if light else 4
    return Tiling(slots, min(blocks, limit), blocks > limit, warps)


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
    sums = torch.empty(parts * (width + 1), dtype=torch.float32, device=qkv.device)
    y = qkv.new_empty(*position.shape, heads, width)
    rings = [ring.view(torch.uint8) if is_e4m3 else ring for ring in (keys, values)]
    _decode_attention_kernel[(heads, tile.splits, position.numel())](
        qkv, *rings, exponents, position, cos, sin, semaphores,
        *sums.split([parts, parts * width]), y, window, heads, width**-0.5, eps,
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
    if backend_of(position) == "native":
        native.call("count", position, length)
    else:
        position += length


_WHERE = ("len(T) < 2", "D % 2 == 0", "W > 0", "W * D < 2**31")

DECODE_ATTENTION = Operation(
    "decode_attention", _decode_attention_triton, _decode_attention_torch,
    "qkv: real[*T, 3, H, D] dense; keys, values: real[*T, H, W, D] dense; position: int32[*T] "
    "dense; cos, sin: float32[P, D // 2] dense; semaphores: int32[*T, H] dense; eps; one_program",
    native=_decode_attention_native, where=_WHERE,
)  # fmt: skip
DECODE_ATTENTION_8BIT = Operation(
    "decode_attention_8bit", _decode_attention_triton, _decode_attention_torch,
    "qkv: real[*T, 3, H, D] dense; keys, values: float8_e4m3fn|int8[*T, H, W, D] dense; "
    "position: int32[*T] dense; cos, sin: float32[P, D // 2] dense; "
    "semaphores: int32[*T, H] dense; eps; one_program; exponents: int8[*T, 2, H, W] dense",
    where=(*_WHERE, "keys.dtype == values.dtype"),
)  # fmt: skip
