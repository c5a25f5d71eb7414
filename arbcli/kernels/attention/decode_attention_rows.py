"""`decode_attention` for one new byte of each of several texts, which know nothing of each other.

Each text has rings and a position of its own. The slots of a head are split into spans of the same
length, and each has a program, which adds them up block by block. What is summed together, and in
which order, depends on nothing but the slots: a text has the same bits whatever the others are, how
many, and how long.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.attention.decode_attention import (
    DECODE_ATTENTION,
    MAX_PARTS,
    PLACE,
    add_parts,
    decode_attention_reference,
    load_rotated,
)
from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT32, Array, Number
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing
from arbcli.kernels.runtime.overlap import overlap_options

WARPS = 8
TILE, SLOTS = 8192, 64
"""The most elements of keys, and the most slots, of a block."""
SPAN = 512
"""Slots of a program: a multiple of those of a block."""


def decode_attention_rows_reference(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    semaphores: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute what `decode_attention_rows` must return and leave: one text after another."""
    texts = zip(qkv, keys, values, position, semaphores, strict=True)
    found = [
        decode_attention_reference(new, of_keys, of_values, place, cos, sin, free, eps)
        for new, of_keys, of_values, place, free in texts
    ]
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def _decode_attention_rows_torch(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    attend = DECODE_ATTENTION.torch
    texts = zip(qkv, keys, values, position, semaphores, strict=True)
    return torch.stack(
        [attend(*three, place, cos, sin, free, eps)[0] for *three, place, free in texts]
    )


@triton.jit
def _load_slots(ring_ptr, offs_s, offs_d, mask_d, slot, seen, WIDTH: tl.constexpr):
    """Load slots that were stored before this byte: [BLOCK_S, BLOCK_D]."""
    mask = (offs_s < seen) & (offs_s != slot) & mask_d[None, :]
    return tl.load(ring_ptr + (offs_s * WIDTH + offs_d[None, :]), mask=mask, other=0)


@triton.jit
def _decode_attention_rows_kernel(
    qkv_ptr, keys_ptr, values_ptr, position_ptr, cos_ptr, sin_ptr, semaphores_ptr,
    totals_ptr, sums_ptr, y_ptr,
    W, HEADS, scale, eps,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_P: tl.constexpr, PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    head, first, text = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(position_ptr + text)
    slot, seen = position % W, tl.minimum(position + 1, W)
    begin = first * SPAN
    if begin < seen:
        place = text * HEADS + head
        ring = place.to(tl.int64) * W * WIDTH
        keys_ptr, values_ptr = keys_ptr + ring, values_ptr + ring
        offs_d, offs_b = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)[:, None]
        mask_d, offs_s = offs_d < WIDTH, begin + offs_b
        # load from the ring first: it has the longest latency
        key = _load_slots(keys_ptr, offs_s, offs_d, mask_d, slot, seen, WIDTH)
        value = _load_slots(values_ptr, offs_s, offs_d, mask_d, slot, seen, WIDTH)
        end = tl.minimum(begin + SPAN, seen)
        q, k, v = load_rotated(
            qkv_ptr + text.to(tl.int64) * (3 * HEADS * WIDTH), cos_ptr, sin_ptr, position,
            head, offs_d, mask_d, HEADS, eps, HALF, OVERLAP,
        )  # fmt: skip
        q = q.to(tl.float32) * scale
        mine = slot // SPAN == first
        if mine:
            tl.store(keys_ptr + slot * WIDTH + offs_d, k, mask=mask_d)
            tl.store(values_ptr + slot * WIDTH + offs_d, v, mask=mask_d)
        # sums stay apart until the end: to add them up, warps wait for each other
        weights = tl.zeros((BLOCK_S, 1), dtype=tl.float32)
        sums = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
        for start in range(begin, end, BLOCK_S):
            offs_s = start + offs_b
            following = offs_s + BLOCK_S
            next_key = _load_slots(keys_ptr, following, offs_d, mask_d, slot, end, WIDTH)
            next_value = _load_slots(values_ptr, following, offs_d, mask_d, slot, end, WIDTH)
            score = tl.sum(key.to(tl.float32) * q[None, :], axis=1, keep_dims=True)
            weight = tl.where((offs_s < seen) & (offs_s != slot), tl.exp(score), 0)
            weights += weight  # [BLOCK_S, 1]
            sums += weight * value.to(tl.float32)
            key, value = next_key, next_value
        # the slot of this byte, which was not loaded
        of_new = tl.where(mine, tl.exp(tl.sum(k.to(tl.float32) * q)), 0)
        total = tl.sum(weights) + of_new
        found = tl.sum(sums, axis=0) + of_new * v.to(tl.float32)
        if PROGRAMS == 1:
            y = (found / total).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + place * WIDTH + offs_d, y, mask=mask_d)
        else:
            part = place * PROGRAMS + first
            tl.store(totals_ptr + part, total)
            tl.store(sums_ptr + part.to(tl.int64) * WIDTH + offs_d, found, mask=mask_d)
            add_parts(
                totals_ptr, sums_ptr, semaphores_ptr, y_ptr, place, tl.cdiv(seen, SPAN),
                offs_d, mask_d, WIDTH, PROGRAMS, BLOCK_P, PROGRAMS,
            )  # fmt: skip


def _decode_attention_rows_triton(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    texts, heads, window, width = keys.shape
    block_d = triton.next_power_of_2(width)
    block_s = max(1, min(SLOTS, TILE // block_d))
    programs = triton.cdiv(window, SPAN)
    parts = texts * heads * programs if programs > 1 else 0
    found = torch.empty(parts * (width + 1), dtype=torch.float32, device=qkv.device)
    y = torch.empty(texts, heads, width, dtype=qkv.dtype, device=qkv.device)
    _decode_attention_rows_kernel[(heads, programs, texts)](
        qkv, keys, values, position, cos, sin, semaphores,
        *found.split([parts, parts * width]), y, window, heads, width**-0.5, eps,
        HALF=width // 2, BLOCK_D=block_d, BLOCK_S=block_s, SPAN=SPAN, BLOCK_P=MAX_PARTS,
        PROGRAMS=programs,
        num_warps=WARPS, maxnreg=128, **overlap_options(qkv),
    )  # fmt: skip
    return y


def decode_attention_rows(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    semaphores: Tensor,
    eps: float,
) -> Tensor:
    """Do as `decode_attention` does for one new byte of each of several texts.

    Args:
        qkv: (B, 3, heads, d) float32 or bfloat16, contiguous.
        keys: (B, heads, W, d) in the dtype of `qkv`, contiguous.
        values: like `keys`.
        position: (B,) int32: how many bytes of each text came before; below P.
        cos: (P, d / 2) float32, contiguous.
        sin: like `cos`.
        semaphores: (B, heads) int32 zeros, and zeros again afterwards.
        eps: added to the mean square.

    Returns:
        (B, heads, d) in the dtype of `qkv`. What a text has does not depend on the others, nor on
        B.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    return DECODE_ATTENTION_ROWS(qkv, keys, values, position, cos, sin, semaphores, eps)


SHAPES = ((1, 1, 1, 2, (0,)), (3, 2, 70, 10, (0, 69, 200)), (2, 3, 100, 64, (199, 5)),
          (4, 1, 40, 16, (31, 32, 40, 79)), (3, 1, 1100, 2, (5, 1090, 1400)))  # fmt: skip
"""(B, heads, W, d, positions): rings that are empty, filling, just full and overwritten."""
LARGE = ((16, 16, 2048, 128, tuple(range(0, 2400, 150))), (2, 6, 256, 64, (300, 7)))


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32) for shape in SHAPES]
    if device.type == "cuda":  # the interpreter computes wrongly in bf16
        shapes += [(*shape, dtype) for shape in LARGE for dtype in (torch.float32, torch.bfloat16)]
    for texts, heads, window, width, positions, dtype in shapes:
        low = dtype == torch.bfloat16
        label = f"{texts}x{heads}x{window}x{width}{' bf16' if low else ''}"
        ring = (texts, heads, window, width)
        sizes = ((texts, 3, heads, width), ring, ring)
        parts = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
        angle = 7 * torch.randn(max(positions) + 1, width // 2, generator=generator).to(device)
        position = torch.tensor(positions, dtype=torch.int32, device=device)
        semaphores = torch.zeros(texts, heads, dtype=torch.int32, device=device)
        inputs = (*parts, position, angle.cos(), angle.sin(), semaphores, 1e-6)
        yield Case(label, inputs, DECODE_ATTENTION_ROWS.torch if low else None)


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    texts, heads, window, width = 16, 16, 2048, 128
    real: TensorOptions = {"device": device, "dtype": torch.bfloat16}
    qkv = torch.randn(texts, 3, heads, width, **real)
    keys, values = torch.randn(2, texts, heads, window, width, **real).unbind()
    position = torch.full((texts,), window - 1, dtype=torch.int32, device=device)
    table = torch.rand(2, window, width // 2, device=device).unbind()
    semaphores = torch.zeros(texts, heads, dtype=torch.int32, device=device)
    attend = torch.nn.functional.scaled_dot_product_attention
    yield Timing(
        f"{texts}x{heads}x{window}x{width} bf16",
        (qkv, keys, values, position, *table, semaphores, 1e-6),
        run=_decode_attention_rows_triton,
        peer=lambda: attend(qkv[:, 0, :, None], keys, values),
        peer_name="torch's attention alone",
    )


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    texts, heads, half = 1 + m % 4, 1 + dice.below(3), 1 + min(k, 64)
    qkv = dice.reals(texts * 3 * heads, 2 * half).contiguous().view(texts, 3, heads, 2 * half)
    rings = (dice.reals(texts * heads * n, 2 * half).contiguous() for _ in range(2))
    position = dice.integers(0, 3 * n - 1, texts, dtype=torch.int32).contiguous()
    angle = dice.reals(3 * n, half, dtype=torch.float32).contiguous()
    semaphores = torch.zeros(texts, heads, dtype=torch.int32, device=dice.device)
    return (
        qkv, *(ring.view(texts, heads, n, 2 * half) for ring in rings), position,
        angle.cos(), angle.sin(), semaphores, 1e-6,
    )  # fmt: skip


_RING = Array("B, H, W, D", dense=True)

DECODE_ATTENTION_ROWS = Operation(
    "decode_attention_rows", _decode_attention_rows_triton, _decode_attention_rows_torch,
    decode_attention_rows_reference, _cases,
    Gate(
        exact=False,
        relative=1e-5,
        peer_slack=0.1,
        reason="float32 sums of up to 2048 values; in bf16 no worse than torch's attention by 10 %",
    ),
    {
        "qkv": Array("B, 3, H, D", dense=True), "keys": _RING, "values": _RING, **PLACE,
        "position": Array("B", INT32, dense=True), "semaphores": Array("B, H", INT32, dense=True),
        "eps": Number(()),
    },
    where=("B > 0", "D % 2 == 0", "W > 0"), compared=("keys", "values", "semaphores"), draw=_draw,
    needs_rows=False, torch_is_peer=True, timings=_timings,
)  # fmt: skip
