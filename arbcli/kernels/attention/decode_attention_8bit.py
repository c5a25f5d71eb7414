"""Attention of one new byte over a ring in eight bits: `decode_attention` with half the bytes.

Keys and values are entries of `eight_bits`: codes, and one exponent a position and head. The new
key and value are rounded to entries first, and attended to as what is then stored, so a byte that
is read by itself sees what it would see had it been part of a prompt. A key's power of two
multiplies its score, a value's its weight, so codes are only converted. Of several texts each has
programs of its own, as many as it would have alone, so it has the same bits.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.decode_attention import (
    LARGE,
    MAX_PARTS,
    PLACE,
    SHAPES,
    Tiling,
    add_parts,
    attend_reference,
    decode_attention,
    draw_byte,
    load_rotated,
    rotated_reference,
    rotated_torch,
    span_of,
    tiling,
)
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
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT8, INT32, Array, Number
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing
from arbcli.kernels.runtime.overlap import overlap_options
from arbcli.kernels.runtime.texts import stacked_texts, text_by_text

SHARED = (5, 6)
"""Arguments of `decode_attention_8bit` that are the same for all texts."""


@text_by_text(4, *SHARED)
def decode_attention_8bit_reference(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    exponents: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    semaphores: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute what `decode_attention_8bit` must return, and leave in the ring: float64.

    Keys and values are numbers here, not codes.
    """
    p, window = int(position), keys.shape[1]
    x = qkv.to(torch.float64)
    q, k = rotated_reference(x, cos[p], sin[p], eps).to(qkv.dtype).to(torch.float64)
    rings = []
    for ring, exponent, new in zip((keys, values), exponents, (k, x[2]), strict=True):
        numbers = decode_entries_reference(ring, exponent)
        numbers[:, p % window] = round_entries_reference(new, ring.dtype)
        rings.append(numbers)
    y = attend_reference(q, rings[0], rings[1], p)
    return y, *rings, torch.zeros_like(semaphores)


@text_by_text(4, *SHARED)
def _decode_attention_8bit_torch(
    qkv: Tensor, keys: Tensor, values: Tensor, exponents: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, semaphores: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    window, slot = keys.shape[1], (position % keys.shape[1]).long()[None]
    q, k = rotated_torch(qkv, position, cos, sin, eps)
    numbers = []
    for ring, exponent, new in zip((keys, values), exponents, (k, qkv[2]), strict=True):
        codes, new_exponent = quantise_entries(new, ring.dtype)
        # torch copies no e4m3 by index
        ring.view(torch.int8).index_copy_(1, slot, codes.view(torch.int8)[:, None])
        exponent.index_copy_(1, slot, new_exponent[:, None])
        numbers.append(decode_entries(ring, exponent, torch.float32)[None])
    seen = torch.arange(window, device=qkv.device) <= position
    query, (all_keys, all_values) = q.float()[None, :, None], numbers
    y = functional.scaled_dot_product_attention(query, all_keys, all_values, attn_mask=seen[None])
    return y[0, :, 0].to(qkv.dtype)


@triton.jit
def _load_slots(
    keys_ptr, values_ptr, exponents_ptr, row, start, end, slot, offs_d, mask_d, entries,
    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Load the entries of a block, [BLOCK_S, BLOCK_D] and [BLOCK_S, 1], but for this byte's."""
    offs_s = start + tl.arange(0, BLOCK_S)[:, None]
    is_old, at = (offs_s < end) & (offs_s != slot), row + offs_s
    ring, mask = at * WIDTH + offs_d[None, :], is_old & mask_d[None, :]
    key = tl.load(keys_ptr + ring, mask=mask, other=0)
    value = tl.load(values_ptr + ring, mask=mask, other=0)
    key_exponent = tl.load(exponents_ptr + at, mask=is_old, other=0)
    value_exponent = tl.load(exponents_ptr + entries + at, mask=is_old, other=0)
    return key, value, key_exponent, value_exponent


@triton.jit
def _decode_attention_8bit_kernel(
    qkv_ptr, keys_ptr, values_ptr, exponents_ptr, position_ptr, cos_ptr, sin_ptr, semaphores_ptr,
    totals_ptr, sums_ptr, y_ptr,
    W, HEADS, scale, eps,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr, SEVERAL: tl.constexpr, BLOCK_P: tl.constexpr,
    E4M3: tl.constexpr, NATIVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    head, split, text = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(position_ptr + text)
    ring = text.to(tl.int64) * HEADS * W
    keys_ptr, values_ptr = keys_ptr + ring * WIDTH, values_ptr + ring * WIDTH
    exponents_ptr, qkv_ptr = exponents_ptr + 2 * ring, qkv_ptr + text * 3 * HEADS * WIDTH
    slot, seen = position % W, tl.minimum(position + 1, W)
    span = span_of(seen, BLOCK_S, SPLITS) if SEVERAL else BLOCK_S
    first = split * span
    if first < seen:
        # load from the ring first: it has the longest latency
        offs_d, row, end = (
            tl.arange(0, BLOCK_D),
            head.to(tl.int64) * W,
            tl.minimum(first + span, seen),
        )
        mask_d, entries = offs_d < WIDTH, tl.cast(HEADS, tl.int64) * W
        block = _load_slots(
            keys_ptr, values_ptr, exponents_ptr, row, first, end, slot, offs_d, mask_d, entries,
            WIDTH, BLOCK_S,
        )  # fmt: skip
        q, k, v = load_rotated(
            qkv_ptr, cos_ptr, sin_ptr, position, head, offs_d, mask_d, HEADS, eps, HALF, OVERLAP
        )
        q = q.to(tl.float32)
        k, new_key_exponent = quantise_entry(k.to(tl.float32), E4M3, NATIVE)
        v, new_value_exponent = quantise_entry(v.to(tl.float32), E4M3, NATIVE)

        if slot // span == split:
            new = (row + slot) * WIDTH + offs_d
            tl.store(keys_ptr + new, k, mask=mask_d)
            tl.store(values_ptr + new, v, mask=mask_d)
            at = exponents_ptr + row + slot + tl.arange(0, 1)
            tl.store(at, new_key_exponent)
            tl.store(at + entries, new_value_exponent)

        weights = tl.zeros((BLOCK_S, 1), dtype=tl.float32)
        sums = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
        for start in range(first, end if SEVERAL else first + 1, BLOCK_S):
            key, value, key_exponent, value_exponent = block
            if SEVERAL:
                block = _load_slots(
                    keys_ptr, values_ptr, exponents_ptr, row, start + BLOCK_S, end, slot,
                    offs_d, mask_d, entries, WIDTH, BLOCK_S,
                )  # fmt: skip
            offs_s = start + tl.arange(0, BLOCK_S)[:, None]
            products = numbers_of(key, E4M3, NATIVE) * q[None, :]
            score = tl.sum(products, axis=1, keep_dims=True)
            score *= scale_of_entry(key_exponent, E4M3) * scale
            weight = tl.where((offs_s < end) & (offs_s != slot), tl.exp(score), 0)  # [BLOCK_S, 1]
            weights += weight
            weight *= scale_of_entry(value_exponent, E4M3)
            sums += weight * numbers_of(value, E4M3, NATIVE)
        # the slot of this byte, which was not loaded
        score = tl.sum(numbers_of(k, E4M3, NATIVE) * q)
        score *= tl.sum(scale_of_entry(new_key_exponent, E4M3)) * scale
        of_new = tl.where(slot // span == split, tl.exp(score), 0)
        new_value = tl.sum(scale_of_entry(new_value_exponent, E4M3)) * numbers_of(v, E4M3, NATIVE)

        place = text * HEADS + head
        part = place * SPLITS + split
        sums = tl.sum(sums, axis=0) + of_new * new_value
        tl.store(totals_ptr + part, tl.sum(weights) + of_new)
        tl.store(sums_ptr + part * WIDTH + offs_d, sums, mask=mask_d)
        add_parts(
            totals_ptr, sums_ptr, semaphores_ptr, y_ptr, place, tl.cdiv(seen, span), offs_d, mask_d,
            WIDTH, SPLITS, BLOCK_P, SPLITS,
        )  # fmt: skip


def _tiling(heads: int, window: int, width: int, dtype: torch.dtype) -> Tiling:
    """Choose so that no register spills."""
    found = tiling(heads, window, width, dtype)
    wide = width > 128 and dtype != torch.float32
    return found._replace(warps=4 * found.warps) if wide else found


def _decode_attention_8bit_triton(
    qkv: Tensor, keys: Tensor, values: Tensor, exponents: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, semaphores: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    heads, window, width = keys.shape[-3:]
    block_s, splits, several, num_warps = _tiling(heads, window, width, qkv.dtype)
    parts = semaphores.numel() * splits
    found = torch.empty(parts * (width + 1), dtype=torch.float32, device=qkv.device)
    y = qkv.new_empty(*position.shape, heads, width)
    is_e4m3 = keys.dtype == E4M3
    codes = [ring.view(torch.uint8) if is_e4m3 else ring for ring in (keys, values)]
    _decode_attention_8bit_kernel[(heads, splits, position.numel())](
        qkv, *codes, exponents, position, cos, sin, semaphores,
        *found.split([parts, parts * width]), y, window, heads, width**-0.5, eps,
        HALF=width // 2, BLOCK_D=triton.next_power_of_2(width), BLOCK_S=block_s, SPLITS=splits,
        SEVERAL=several, BLOCK_P=min(triton.next_power_of_2(splits), MAX_PARTS),
        E4M3=is_e4m3, NATIVE=has_e4m3(qkv),
        num_warps=num_warps, **overlap_options(qkv),
    )  # fmt: skip
    return y


def decode_attention_8bit(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    exponents: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    semaphores: Tensor,
    eps: float,
) -> Tensor:
    """Store the key and value of one byte in a ring in eight bits, and attend to all in it.

    Of several texts all but `cos` and `sin` have a dimension for them in front, and so has the
    result.

    Args:
        qkv: (3, heads, d) float32 or bfloat16, contiguous, d even: query, key and value.
        keys: (heads, W, d) float8_e4m3fn or int8, contiguous: codes of `quantise_entries`; slot
            `position` mod W is written.
        values: like `keys`.
        exponents: (2, heads, W) int8, contiguous: of the keys, and of the values.
        position: int32 scalar tensor: how many bytes came before. It is read on the device, and
            must be below P.
        cos: (P, d / 2) float32, contiguous.
        sin: like `cos`.
        semaphores: (heads,) int32 zeros, and zeros again afterwards.
        eps: added to the mean square.

    Returns:
        (heads, d) in the dtype of `qkv`: what `decode_attention` computes over the numbers that
        codes and exponents stand for, the new ones among them; in float32.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    return DECODE_ATTENTION_8BIT(qkv, keys, values, exponents, position, cos, sin, semaphores, eps)


SMALL_8BIT = (*SHAPES[:-1], (1, 40, 512, 33))
LARGE_8BIT = (*LARGE, (1, 300, 512, 299), (4, 16384, 64, 16383), (2, 16384, 128, 40000))


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32) for shape in SMALL_8BIT]
    if device.type == "cuda":  # the interpreter computes wrongly in bf16
        large = (torch.float32, torch.bfloat16)
        shapes += [(*shape, dtype) for shape in LARGE_8BIT for dtype in large]
    for heads, window, width, position, dtype in shapes:
        qkv = torch.randn(3, heads, width, generator=generator).to(device, dtype)
        if width == 10:
            qkv[2, :, 3] = 3.99  # rounds to the next octave, which integers do not have
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
            state = (keys, values, torch.stack(exponents), place)
            inputs = (qkv, *state, angle.cos(), angle.sin(), semaphores, 1e-6)
            yield Case(label, inputs)
            if position in (17, 300):  # a text that begins among others
                begins = (torch.roll(qkv, 1, 1), *inputs[1:4], torch.zeros_like(place))
                texts = [inputs, (*begins, *inputs[5:]), inputs]
                yield Case(f"3 texts of {label}", stacked_texts(texts, *SHARED))


def _with_state(inputs: tuple, y: Tensor) -> tuple[Tensor, ...]:
    """Give what is left in the ring too, as numbers."""
    _, keys, values, exponents, _, _, _, semaphores, _ = inputs
    rings = zip((keys, values), exponents.unbind(-3), strict=True)
    return y, *(decode_entries(*ring, torch.float32) for ring in rings), semaphores


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    real: TensorOptions = {"device": device, "dtype": torch.bfloat16}
    for heads, window, width in ((16, 2048, 128), (16, 16384, 64)):
        qkv = torch.randn(3, heads, width, **real)
        plain = torch.randn(2, heads, window, width, **real)
        position = torch.tensor(window - 1, dtype=torch.int32, device=device)
        cos, sin = torch.rand(2, window, width // 2, device=device).unbind()
        semaphores = torch.zeros(heads, dtype=torch.int32, device=device)
        peer = partial(
            decode_attention, qkv, plain[0], plain[1], position, cos, sin, semaphores, 1e-6
        )
        for name, stored in FORMATS.items():
            codes, exponents = quantise_entries(plain, stored)
            yield Timing(
                f"{name} {heads}x{window}x{width}",
                (qkv, *codes.unbind(), exponents, position, cos, sin, semaphores, 1e-6),
                run=_decode_attention_8bit_triton,
                peer=peer,
                peer_name="the ring in bf16",
            )
            if window < 16384:
                one = (qkv, *codes.unbind(), exponents, position, cos, sin, semaphores, 1e-6)
                texts = stacked_texts([one] * 16, *SHARED)
                label = f"16 texts of {name} {heads}x{window}x{width}"
                yield Timing(label, texts, run=_decode_attention_8bit_triton)


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    qkv, keys, values, *rest = draw_byte(dice, group_size, m, n, k)
    stored = dice.pick((*FORMATS.values(),))
    values = values * torch.exp2(dice.integers(-9, 9, *values.shape[:2])[..., None].float())
    (keys, of_keys), (values, of_values) = (quantise_entries(x, stored) for x in (keys, values))
    return qkv, keys, values, torch.stack((of_keys, of_values)), *rest


_RING = Array("*T, H, W, D", tuple(ROOM), dense=True)

DECODE_ATTENTION_8BIT = Operation(
    "decode_attention_8bit", _decode_attention_8bit_triton, _decode_attention_8bit_torch,
    decode_attention_8bit_reference, _cases,
    Gate(
        exact=False,
        relative=3e-3,
        reason="a result in bf16 is rounded, and a sum's last bit may decide how a code is",
    ),
    {
        "qkv": Array("*T, 3, H, D", dense=True), "keys": _RING, "values": _RING,
        "exponents": Array("*T, 2, H, W", INT8, dense=True), **PLACE,
        "semaphores": Array("*T, H", INT32, dense=True), "eps": Number(()),
    },
    where=("len(T) < 2", "D % 2 == 0", "W > 0", "keys.dtype == values.dtype"),
    compared=_with_state, draw=_draw, needs_rows=False, timings=_timings,
)  # fmt: skip
