"""Attention of one new byte over a ring of keys: y = softmax(q . k / sqrt(d)) @ v, for each head.

The byte at position p is stored in slot p mod W of W slots, so the ring holds the last W bytes and
the oldest is overwritten first. Query and key are rotated by row p of the tables and normalised, as
`rotary_norm_` does; key and value are stored before any attention. Only differences of positions
matter to q . k, and a sum over keys does not depend on their order, so the ring is never reordered.

    slots     | block 0 | block 1 | block 2 | ... | not filled |       W of a head
    program       0         1         2       ...                     sums and total to memory, then
    semaphores 0 -> 1 -> 2 -> ... -> n: the last program adds all up, and sets it to 0 again

Why so: one head's ring in one program would leave most processors idle, and a second launch to add
up costs as much as the attention of a short ring. The count of those that have finished is in the
buffer that is 0 between launches, so that a captured graph needs nothing set.

The filled slots of a head are divided among programs: a block to each, or several where programs
are too few, the next loaded while one is multiplied. Each computes, over its slots, the sum of
exp(score) and the sum of the values weighted by that. Queries and keys are normalised, so no score
exceeds sqrt(d), and no maximum has to be subtracted. The last program to finish adds up the sums of
all, in the order of the slots, so the result is the same bits whichever program is last.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.rotation import rotate, rotate_reference
from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, INT32, Arguments, Array, Number
from arbcli.kernels.runtime.backend import uses_native
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing
from arbcli.kernels.runtime.overlap import overlap_options, wait_for_last

TILE = 8192
"""The most elements of keys of a block."""
SLOTS = 32
"""The most slots of a block."""
PROGRAMS = 1024
"""How many programs suffice to read as fast as memory allows: then each has several blocks."""
MAX_PARTS = 32
"""How many programs' sums are added up at a time."""


def decode_attention_reference(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    semaphores: Tensor,
    eps: float,
    alone: bool = False,
) -> tuple[Tensor, ...]:
    """Compute the results of `decode_attention`, its ring and its `semaphores` in float64."""
    p, window = int(position), keys.shape[1]
    qkv, keys, values = (part.to(torch.float64) for part in (qkv, keys, values))
    q, k = rotated_reference(qkv, cos[p], sin[p], eps)
    keys[:, p % window], values[:, p % window] = k, qkv[2]
    return attend_reference(q, keys, values, p), keys, values, torch.zeros_like(semaphores)


def rotated_reference(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Rotate and normalise the query and the key of one byte, in float64."""
    root = (qkv[:2].square().mean(-1, True) + eps).sqrt()
    return rotate_reference(qkv[:2], cos, sin) / root


def attend_reference(q: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """Attend to what a ring has after the byte at `position`, in float64."""
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


def _decode_attention_torch(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, alone: bool = False,
) -> Tensor:  # fmt: skip
    window, slot = keys.shape[1], (position % keys.shape[1]).long()[None]
    q, k = rotated_torch(qkv, position, cos, sin, eps)
    keys.index_copy_(1, slot, k[:, None])
    values.index_copy_(1, slot, qkv[2][:, None])
    seen = torch.arange(window, device=qkv.device) <= position
    parts = (q[None, :, None], keys[None], values[None])
    return functional.scaled_dot_product_attention(*parts, attn_mask=seen[None])[0, :, 0]


def _decode_attention_native(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, alone: bool = False,
) -> Tensor:  # fmt: skip
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
    """Load a head's query, key and value, turn and normalise the first two: [BLOCK_D] each."""
    WIDTH: tl.constexpr = 2 * HALF
    # query and key, [BLOCK_D, 2]: each element is rotated with its partner in the other half
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
    """Count this program, and in the last add up the `splits` sums of a head, of any `PROGRAMS`."""
    tl.debug_barrier()  # all threads store their sums before one counts itself
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
    """Find how many slots a program has: the fewest whole blocks with which all are somebody's."""
    return BLOCK_S * tl.cdiv(tl.cdiv(seen, BLOCK_S), SPLITS)


@triton.jit
def _load_slots(
    keys_ptr, values_ptr, row, start, end, slot, offs_d, mask_d,
    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Load the keys and values of a block, [BLOCK_S, BLOCK_D], but for the slot of this byte."""
    offs_s = start + tl.arange(0, BLOCK_S)[:, None]
    mask = (offs_s < end) & (offs_s != slot) & mask_d[None, :]
    ring = (row + offs_s) * WIDTH + offs_d[None, :]
    return tl.load(keys_ptr + ring, mask=mask, other=0), tl.load(
        values_ptr + ring, mask=mask, other=0
    )


@triton.jit
def _decode_attention_kernel(
    qkv_ptr, keys_ptr, values_ptr, position_ptr, cos_ptr, sin_ptr, semaphores_ptr,
    totals_ptr, sums_ptr, y_ptr,
    W, HEADS, scale, eps,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr, SEVERAL: tl.constexpr, BLOCK_P: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    head, split = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr)
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
        mask_d = offs_d < WIDTH
        key, value = _load_slots(
            keys_ptr, values_ptr, row, first, end, slot, offs_d, mask_d, WIDTH, BLOCK_S
        )
        q, k, v = load_rotated(
            qkv_ptr, cos_ptr, sin_ptr, position, head, offs_d, mask_d, HEADS, eps, HALF, OVERLAP
        )
        q = q.to(tl.float32)
        if slot // span == split:
            new = (row + slot) * WIDTH + offs_d
            tl.store(keys_ptr + new, k, mask=mask_d)
            tl.store(values_ptr + new, v, mask=mask_d)

        weights = tl.zeros((BLOCK_S, 1), dtype=tl.float32)
        sums = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
        for start in range(first, end if SEVERAL else first + 1, BLOCK_S):
            next_key, next_value = key, value
            if SEVERAL:
                next_key, next_value = _load_slots(
                    keys_ptr, values_ptr, row, start + BLOCK_S, end, slot, offs_d, mask_d,
                    WIDTH, BLOCK_S,
                )  # fmt: skip
            offs_s = start + tl.arange(0, BLOCK_S)[:, None]
            products = key.to(tl.float32) * q[None, :]
            score = tl.sum(products, axis=1, keep_dims=True) * scale
            weight = tl.where((offs_s < end) & (offs_s != slot), tl.exp(score), 0)  # [BLOCK_S, 1]
            weights += weight
            sums += weight * value.to(tl.float32)
            key, value = next_key, next_value
        # the slot of this byte, which was not loaded
        of_new = tl.where(slot // span == split, tl.exp(tl.sum(k.to(tl.float32) * q) * scale), 0)

        part = head * SPLITS + split
        sums = tl.sum(sums, axis=0) + of_new * v.to(tl.float32)
        tl.store(totals_ptr + part, tl.sum(weights) + of_new)
        tl.store(sums_ptr + part * WIDTH + offs_d, sums, mask=mask_d)
        add_parts(
            totals_ptr, sums_ptr, semaphores_ptr, y_ptr, head, tl.cdiv(seen, span), offs_d, mask_d,
            WIDTH, SPLITS, BLOCK_P, SPLITS,
        )  # fmt: skip


class Tiling(NamedTuple):
    """How the slots of a ring are shared out."""

    slots: int
    """Of a block."""
    splits: int
    """The most programs of a head."""
    several: bool
    """Whether a program may have several blocks."""
    warps: int


def tiling(heads: int, window: int, width: int, dtype: torch.dtype, alone: bool = False) -> Tiling:
    """Choose by what was fastest on an H200; `alone` is as in `decode_attention`."""
    block_d = triton.next_power_of_2(width)
    if alone and block_d * triton.next_power_of_2(window) <= TILE:
        return Tiling(triton.next_power_of_2(window), 1, False, 8)
    slots = max(1, min(SLOTS, TILE // block_d))
    blocks, most = triton.cdiv(window, slots), max(1, PROGRAMS // heads)
    light = width == block_d and blocks <= most  # masks, and a second block, take registers
    warps = 8 if dtype == torch.float32 else 2 if light else 4
    return Tiling(slots, min(blocks, most), blocks > most, warps)


def _decode_attention_triton(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    semaphores: Tensor, eps: float, alone: bool = False,
) -> Tensor:  # fmt: skip
    heads, window, width = keys.shape
    block_s, splits, several, num_warps = tiling(heads, window, width, qkv.dtype, alone)
    parts = heads * splits
    found = torch.empty(parts * (width + 1), dtype=torch.float32, device=qkv.device)
    y = torch.empty(heads, width, dtype=qkv.dtype, device=qkv.device)
    _decode_attention_kernel[(heads, splits)](
        qkv, keys, values, position, cos, sin, semaphores,
        *found.split([parts, parts * width]), y, window, heads, width**-0.5, eps,
        HALF=width // 2, BLOCK_D=triton.next_power_of_2(width), BLOCK_S=block_s, SPLITS=splits,
        SEVERAL=several, BLOCK_P=min(triton.next_power_of_2(splits), MAX_PARTS),
        num_warps=num_warps, **overlap_options(qkv),
    )  # fmt: skip
    return y


def decode_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    semaphores: Tensor,
    eps: float,
    alone: bool = False,
) -> Tensor:
    """Store the key and value of one byte in a ring, and attend to all that are in it.

    Args:
        qkv: (3, heads, d) float32 or bfloat16, contiguous, d even: query, key and value.
        keys: (heads, W, d) in the dtype of `qkv`, contiguous; slot `position` mod W is written.
            Keys are such as are stored here, normalised: exp of no score overflows. What has never
            been written must be finite.
        values: like `keys`.
        position: int32 scalar tensor: how many bytes came before. It is read on the device, and
            must be below P.
        cos: (P, d / 2) float32, contiguous.
        sin: like `cos`.
        semaphores: (heads,) int32 zeros, and zeros again afterwards: how programs find out which of
            them is the last.
        eps: added to the mean square.
        alone: whether one program has all slots of a head, if they are as few as a block may have:
            for short rings, where nothing is gained by sharing them out.

    Returns:
        (heads, d) in the dtype of `qkv`: the mean of the last min(position + 1, W) values, weighted
        by softmax(q . k / sqrt(d)); computed in float32.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    return DECODE_ATTENTION(qkv, keys, values, position, cos, sin, semaphores, eps, alone)


def count_on_(position: Tensor, length: int) -> None:
    """Count `length` positions more, in an int32 scalar tensor."""
    if uses_native(position):
        native.call("count", position, length)
    else:
        position += length


SHAPES = ((1, 1, 2, 0), (1, 3, 10, 1), (2, 7, 66, 30), (3, 65, 16, 64), (2, 100, 64, 17),
          (1, 200, 128, 1000), (2, 130, 8, 128), (1, 2100, 4, 2099))  # fmt: skip
"""(heads, W, d, position): rings that are empty, filling, just full and overwritten."""
SHORT = ((1, 33, 10, 20), (3, 65, 16, 64), (2, 100, 6, 130))
"""Rings of which a program has all."""
LARGE = ((6, 256, 64, 300), (16, 2048, 128, 2047), (16, 2048, 128, 77), (4, 5000, 96, 4999))


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32, False) for shape in SHAPES]
    shapes += [(*shape, torch.float32, True) for shape in SHORT]
    if device.type == "cuda":  # the interpreter computes wrongly in bf16
        both = (torch.float32, torch.bfloat16)
        shapes += [(*shape, dtype, False) for shape in LARGE for dtype in both]
        shapes += [(8, 128, 64, 500, dtype, True) for dtype in both]
    for heads, window, width, position, dtype, alone in shapes:
        low = dtype == torch.bfloat16
        label = f"{heads}x{window}x{width} at {position}{' bf16' * low}{' alone' * alone}"
        sizes = ((3, heads, width), (heads, window, width), (heads, window, width))
        parts = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
        angle = 7 * torch.randn(position + 2, width // 2, generator=generator).to(device)
        place = torch.tensor(position, dtype=torch.int32, device=device)
        semaphores = torch.zeros(heads, dtype=torch.int32, device=device)
        inputs = (*parts, place, angle.cos(), angle.sin(), semaphores, 1e-6, alone)
        yield Case(label, inputs, DECODE_ATTENTION.torch if low else None)


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    heads, window, width = 16, 2048, 128
    real: TensorOptions = {"device": device, "dtype": torch.bfloat16}
    qkv = torch.randn(3, heads, width, **real)
    keys, values = torch.randn(2, heads, window, width, **real).unbind()
    position = torch.tensor(window - 1, dtype=torch.int32, device=device)
    table = torch.rand(2, window, width // 2, device=device).unbind()
    semaphores = torch.zeros(heads, dtype=torch.int32, device=device)
    attend = functional.scaled_dot_product_attention
    yield Timing(
        f"{heads}x{window}x{width} bf16",
        (qkv, keys, values, position, *table, semaphores, 1e-6),
        run=_decode_attention_triton,
        peer=partial(attend, qkv[0][None, :, None], keys[None], values[None]),
        peer_name="torch's attention alone",
    )


def draw_byte(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    """Draw the inputs of `decode_attention`."""
    heads, half, position = 1 + dice.below(4), 1 + min(k, 64), dice.below(3 * n)
    qkv = dice.reals(3 * heads, 2 * half).contiguous().view(3, heads, 2 * half)
    rings = (dice.reals(heads * n, 2 * half).contiguous() for _ in range(2))
    angle = dice.reals(position + 1, half, dtype=torch.float32).contiguous()
    semaphores = torch.zeros(heads, dtype=torch.int32, device=dice.device)
    return (
        qkv, *(ring.view(heads, n, 2 * half) for ring in rings), dice.scalar(position),
        angle.cos(), angle.sin(), semaphores, 1e-6,
    )  # fmt: skip


PLACE: Arguments = {
    "position": Array("*T", INT32, dense=True),
    "cos": Array("P, D // 2", FLOAT, dense=True),
    "sin": Array("P, D // 2", FLOAT, dense=True),
}
"""Where a byte of each text is, and what vectors of D turn by there."""
_RING = Array("H, W, D", dense=True)

DECODE_ATTENTION = Operation(
    "decode_attention", _decode_attention_triton, _decode_attention_torch,
    decode_attention_reference, _cases,
    Gate(
        exact=False,
        relative=1e-5,
        peer_slack=0.1,
        reason="float32 sums of up to 5000 values; in bf16 no worse than torch's attention by 10 %",
    ),
    {
        "qkv": Array("3, H, D", dense=True), "keys": _RING, "values": _RING,
        **PLACE, "position": Array("", INT32), "semaphores": Array("H", INT32, dense=True),
        "eps": Number(()), "alone": Number(()),
    },
    where=("D % 2 == 0", "W > 0"), compared=("keys", "values", "semaphores"), draw=draw_byte,
    needs_rows=False, torch_is_peer=True, timings=_timings, native=_decode_attention_native,
)  # fmt: skip
