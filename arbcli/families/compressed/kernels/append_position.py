"""Append one byte of a text to the ring of recent bytes and to the open compressed entry.

With the equations of `arbcli.families.compressed.attention`, for the byte at position p, which
is in place i = p mod m of entry j = p // m:

    ring[p mod W] = R_p n(r),  values[i] = v,  gates[i] = a
    still = n(sum over u <= i of softmax over u (gates[u] + beta[u]) * values[u])
    entries[j mod E] = R_(j m) still

E slots have one entry more than a byte sees: each byte of the open entry computes it again.
Ring and entries may be stored in eight bits, as codes with an exponent each: see `eight_bits`. With
several texts, each text has its own programs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.decode_attention import PLACE
from arbcli.kernels.attention.eight_bits import (
    FORMATS,
    ROOM,
    decode_entries,
    decode_entries_reference,
    quantise_entries,
    quantise_halves,
    round_entries_reference,
)
from arbcli.kernels.attention.rotation import normalise_reference, rotate, rotate_reference
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, INT8, Arguments, Array, Number
from arbcli.kernels.runtime.inputs import normals
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing
from arbcli.kernels.runtime.texts import stacked_texts, text_by_text
from arbcli.kernels.timed import Timed

SHARED = (4, 6, 7)
"""Arguments of `append_position_` that are the same for all texts."""


@text_by_text(5, *SHARED)
def append_position_reference(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the result and the buffers of `append_position_`, in float64."""
    p, m = int(position), opened.shape[1]
    new, recent, entries, opened = (part.double() for part in (new, recent, entries, opened))
    begin = p // m * m
    normal = normalise_reference(new[0], eps)
    recent[p % len(recent)] = rotate_reference(normal, cos[p], sin[p])
    opened[:, p % m] = new[1:].flatten(1)
    share = torch.exp(opened[1] + beta.double().T)[: p % m + 1]
    mixed = (share * opened[0, : p % m + 1]).sum(dim=0) / share.sum(dim=0)
    still = normalise_reference(mixed.view(new[0].shape), eps)
    entries[p // m % len(entries)] = rotate_reference(still, cos[begin], sin[begin])
    return still, recent, entries, opened


@text_by_text(5, *SHARED)
def append_position_8bit_reference(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float, exponents: tuple[Tensor, Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the values that `append_position_` stores in eight bits, in float64."""
    numbers = [
        decode_entries_reference(*part) for part in zip((recent, entries), exponents, strict=True)
    ]
    before = [part.clone() for part in numbers]
    still, *after, opened = append_position_reference(
        new, numbers[0], numbers[1], opened, beta, position, cos, sin, eps
    )
    for old, found in zip(before, after, strict=True):
        changed = (old != found).any(dim=-1)
        x = found[changed].to(new.dtype).double()
        found[changed] = round_entries_reference(x, recent.dtype)
    return still, *after, opened


@text_by_text(5, *SHARED)
def _append_position_torch(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float, exponents: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    if exponents:
        return _append_in_eight_bits(
            new, recent, entries, opened, beta, position, cos, sin, eps, exponents
        )
    m, width = opened.shape[1], new.shape[2:]
    place = position.long()[None]
    number = place // m
    begin = number * m
    normal = functional.rms_norm(new[0].float(), width, eps=eps)
    rotated = rotate(normal, cos[place], sin[place])[None].to(recent.dtype)
    recent.index_copy_(0, place % len(recent), rotated)
    opened.index_copy_(1, place % m, new[1:].flatten(1)[:, None])
    filled = (torch.arange(m, device=new.device) <= place % m)[:, None]
    gates = (opened[1].float() + beta.T).masked_fill(~filled, -torch.inf)
    mixed = (gates.softmax(dim=0) * torch.where(filled, opened[0].float(), 0)).sum(dim=0)
    still = functional.rms_norm(mixed.view(new[0].shape), width, eps=eps).to(new.dtype)
    entry = rotate(still, cos[begin], sin[begin])[None].to(entries.dtype)
    entries.index_copy_(0, number % len(entries), entry)
    return still


def _append_in_eight_bits(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float, exponents: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    rows = torch.empty(2, 1, *new.shape[1:], dtype=new.dtype, device=new.device)
    still = _append_position_torch(new, rows[0], rows[1], opened, beta, position, cos, sin, eps)
    place, m = position.long()[None], opened.shape[1]
    for slot, row, codes, exponent in zip(
        (place % len(recent), place // m % len(entries)), rows, (recent, entries), exponents,
        strict=True,
    ):  # fmt: skip
        found, power = quantise_entries(row, codes.dtype)
        # torch copies no e4m3 by index
        codes.view(torch.int8).index_copy_(0, slot, found.view(torch.int8))
        exponent.index_copy_(0, slot, power)
    return still


@triton.jit
def _store_vector(ptr, exponents_ptr, slot, x1, x2, offs, mask, dtype: tl.constexpr,
                  HALF: tl.constexpr, EIGHT: tl.constexpr, FLOATS: tl.constexpr,
                  NATIVE: tl.constexpr):  # fmt: skip
    """Store both halves of a vector in a slot, in the dtype of the buffer or in eight bits."""
    x1, x2 = x1.to(dtype), x2.to(dtype)
    if EIGHT:
        x1, x2, exponent = quantise_halves(x1.to(tl.float32), x2.to(tl.float32), FLOATS, NATIVE)
        tl.store(exponents_ptr + slot, exponent)
    at = slot * (2 * HALF) + offs
    tl.store(ptr + at, x1, mask=mask)
    tl.store(ptr + at + HALF, x2, mask=mask)


@triton.jit
def _rotated(x1, x2, cos_ptr, sin_ptr, place, offs, mask, HALF: tl.constexpr):
    table = place.to(tl.int64) * HALF + offs
    cos = tl.load(cos_ptr + table, mask=mask, other=0)
    sin = tl.load(sin_ptr + table, mask=mask, other=0)
    return x1 * cos - x2 * sin, x1 * sin + x2 * cos


@triton.jit
def _entry_half(opened_ptr, beta_ptr, kept, M, KV, base, offs, mask, value, gate,
                WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Average one half of a head's values over the open block: [BLOCK_H] float32."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    at = rows * (KV * WIDTH) + base + offs[None, :]
    old = (rows < kept) & mask[None, :]  # the new byte's are in registers
    values = tl.load(opened_ptr + at, mask=old, other=0).to(tl.float32)
    gates = tl.load(opened_ptr + M * KV * WIDTH + at, mask=old, other=0).to(tl.float32)
    values = tl.where(rows == kept, value[None, :], values)
    gates = tl.where(rows == kept, gate[None, :], gates)
    beta_at = (base + offs)[None, :] * M + rows
    gates += tl.load(beta_ptr + beta_at, mask=(rows <= kept) & mask[None, :], other=0)
    gates = tl.where(rows <= kept, gates, -float("inf"))
    share = tl.exp(gates - tl.max(gates, axis=0)[None, :])
    return tl.sum(share * values, axis=0) / tl.sum(share, axis=0)


@triton.jit
def _append_position_kernel(
    new_ptr, recent_ptr, entries_ptr, opened_ptr, beta_ptr, position_ptr, cos_ptr, sin_ptr,
    still_ptr, of_recent_ptr, of_entries_ptr, W, E, M, KV, eps,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, EIGHT: tl.constexpr,
    FLOATS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    kv, text = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(position_ptr + text)
    new_ptr, still_ptr = new_ptr + text * 3 * KV * WIDTH, still_ptr + text * KV * WIDTH
    rows, entry_rows = text * W * KV, text * E * KV
    recent_ptr, entries_ptr = recent_ptr + rows * WIDTH, entries_ptr + entry_rows * WIDTH
    opened_ptr += text * 2 * M * KV * WIDTH
    if EIGHT:
        of_recent_ptr, of_entries_ptr = of_recent_ptr + rows, of_entries_ptr + entry_rows
    offs = tl.arange(0, BLOCK_H)
    mask = offs < HALF
    base = kv * WIDTH
    dtype = new_ptr.dtype.element_ty
    r1 = tl.load(new_ptr + base + offs, mask=mask, other=0).to(tl.float32)
    r2 = tl.load(new_ptr + base + HALF + offs, mask=mask, other=0).to(tl.float32)
    r = tl.rsqrt(tl.sum(r1 * r1 + r2 * r2) / WIDTH + eps)
    r1, r2 = _rotated(r1 * r, r2 * r, cos_ptr, sin_ptr, position, offs, mask, HALF)
    r1, r2 = tl.where(mask, r1, 0), tl.where(mask, r2, 0)
    slot = (position % W * KV + kv).to(tl.int64)
    _store_vector(recent_ptr, of_recent_ptr, slot, r1, r2, offs, mask, dtype, HALF, EIGHT, FLOATS,
                  NATIVE)  # fmt: skip

    kept, number = position % M, position // M
    value_ptr, gate_ptr = new_ptr + KV * WIDTH + base, new_ptr + 2 * KV * WIDTH + base
    v1 = tl.load(value_ptr + offs, mask=mask, other=0)
    v2 = tl.load(value_ptr + HALF + offs, mask=mask, other=0)
    a1 = tl.load(gate_ptr + offs, mask=mask, other=0)
    a2 = tl.load(gate_ptr + HALF + offs, mask=mask, other=0)
    at = kept * (KV * WIDTH) + base + offs
    tl.store(opened_ptr + at, v1, mask=mask)
    tl.store(opened_ptr + at + HALF, v2, mask=mask)
    tl.store(opened_ptr + M * KV * WIDTH + at, a1, mask=mask)
    tl.store(opened_ptr + M * KV * WIDTH + at + HALF, a2, mask=mask)
    c1 = _entry_half(opened_ptr, beta_ptr, kept, M, KV, base, offs, mask, v1.to(tl.float32),
                     a1.to(tl.float32), WIDTH, BLOCK_M)  # fmt: skip
    c2 = _entry_half(opened_ptr, beta_ptr, kept, M, KV, base + HALF, offs, mask,
                     v2.to(tl.float32), a2.to(tl.float32), WIDTH, BLOCK_M)  # fmt: skip
    c1, c2 = tl.where(mask, c1, 0), tl.where(mask, c2, 0)
    r = tl.rsqrt(tl.sum(c1 * c1 + c2 * c2) / WIDTH + eps)
    c1, c2 = (c1 * r).to(dtype), (c2 * r).to(dtype)
    tl.store(still_ptr + base + offs, c1, mask=mask)
    tl.store(still_ptr + base + HALF + offs, c2, mask=mask)
    c1, c2 = _rotated(
        c1.to(tl.float32), c2.to(tl.float32), cos_ptr, sin_ptr, number * M, offs, mask, HALF
    )
    c1, c2 = tl.where(mask, c1, 0), tl.where(mask, c2, 0)
    slot = (number % E * KV + kv).to(tl.int64)
    _store_vector(entries_ptr, of_entries_ptr, slot, c1, c2, offs, mask, dtype, HALF, EIGHT, FLOATS,
                  NATIVE)  # fmt: skip


def _append_position_triton(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float, exponents: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    floats, (of_recent, of_entries) = recent.dtype == E4M3, exponents or (None, None)
    if floats:
        recent, entries = recent.view(torch.uint8), entries.view(torch.uint8)
    kv, width = new.shape[-2:]
    still = new.new_empty(*position.shape, kv, width)
    m = opened.shape[-2]
    _append_position_kernel[(kv, position.numel())](
        new, recent, entries, opened, beta, position, cos, sin, still, of_recent, of_entries,
        recent.shape[-3], entries.shape[-3], m, kv, eps,
        HALF=width // 2, BLOCK_H=triton.next_power_of_2(width // 2),
        BLOCK_M=triton.next_power_of_2(m), EIGHT=exponents is not None, FLOATS=floats,
        NATIVE=has_e4m3(new), num_warps=8 if m * width > 4096 else 4,
    )  # fmt: skip
    return still


def append_position_(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float, exponents: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Store one byte, and recompute the open entry.

    With several texts, all arguments but `beta`, `cos` and `sin`, and the result, have a leading
    batch dimension.

    Args:
        new: (3, G, d) float32 or bfloat16, contiguous, d even: the byte's vector, value and gate.
        recent: (W, G, d) like `new`, contiguous: the ring; modified in place.
        entries: (E, G, d) like `new`, contiguous; modified in place.
        opened: (2, m, G d) like `new`, contiguous: values and gates of the open block; modified in
            place.
        beta: (G d, m) float32, contiguous.
        position: int32 scalar tensor, below P.
        cos: (P, d / 2) float32, contiguous.
        sin: like `cos`.
        eps: added to mean squares.
        exponents: int8, (W, G) and (E, G), contiguous, modified in place, if `recent` and `entries`
            are codes in float8_e4m3fn or int8.

    Returns:
        (G, d) like `new`: the open entry, normalised and not rotated.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    inputs = new, recent, entries, opened, beta, position, cos, sin, eps
    if exponents is None:
        APPEND_POSITION.check(*inputs)
    else:
        APPEND_POSITION_8BIT.check(*inputs, *exponents)
    return APPEND_POSITION.chosen(new)(*inputs, exponents)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 3, 2, 4, 0), (2, 6, 5, 3, 3, 7), (1, 10, 4, 9, 7, 41), (3, 2, 2, 4, 4, 19)]
    dtypes = [torch.float32]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        shapes += [(1, 128, 128, 4097, 4, 16383), (1, 128, 128, 129, 128, 1000)]
        shapes += [(2, 512, 128, 33, 128, 4095)]
        dtypes += [torch.bfloat16]
    for kv, width, window, slots, m, position in shapes:
        normal = normals(generator)
        buffers = normal(3, kv, width), normal(window, kv, width), normal(slots, kv, width)
        parts = (*buffers, normal(2, m, kv * width))
        angle = (7 * normal(position + 1, width // 2)).to(device)
        place = torch.tensor(position, dtype=torch.int32, device=device)
        beta = normal(kv * width, m).to(device)
        for dtype in dtypes:
            label = f"{kv}x{width} at {position}, {m} of an entry, {slots} slots"
            label += " bf16" if dtype == torch.bfloat16 else ""
            given = tuple(part.to(device, dtype) for part in parts)
            rest = (beta, place, angle.cos(), angle.sin(), 0.1)
            inputs = (*given, *rest)
            yield Case(label, inputs)
            if kv == 2:  # one text of the batch is at its first position
                begins = (-given[0], *inputs[1:5], torch.zeros_like(place), *inputs[6:])
                texts = stacked_texts([inputs, begins, inputs], *SHARED)
                yield Case(f"3 texts of {label}", texts)


def _with_numbers(inputs: tuple, still: Tensor) -> tuple[Tensor, ...]:
    """Return the result and the contents of the buffers, decoded to floats."""
    _, recent, entries, opened, *_, exponents = inputs
    rows = zip((recent, entries), exponents, strict=True)
    return still, *(decode_entries(*row, torch.float32) for row in rows), opened


def in_eight_bits(inputs: tuple, stored: torch.dtype) -> tuple:
    """Quantise the inputs of `append_position_` to codes and exponents."""
    quantised = [quantise_entries(part, stored) for part in inputs[1:3]]
    codes, exponents = zip(*quantised, strict=True)
    return inputs[0], *codes, *inputs[3:], exponents


def _cases_8bit(device: torch.device, group_size: int) -> Iterator[Case]:
    for case in _cases(device, group_size):
        for name, stored in FORMATS.items():
            yield Case(f"{case.label} {name}", in_eight_bits(case.inputs, stored))


def _timings_8bit(device: torch.device, group_size: int) -> Iterator[Timing]:
    for timing in APPEND_POSITION.draw_timings(device, group_size):
        for name, stored in FORMATS.items():
            inputs = in_eight_bits(timing.inputs, stored)
            yield Timing(f"{timing.label} {name}", inputs, run=_append_position_triton)


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    kv, half, ratio = dice.pick((1, 2)), 1 + min(k, 64), 2 + dice.below(9)
    position, slots = dice.below(60), 1 + dice.below(8)
    sizes = (3, kv, 2 * half), (1 + dice.below(7), kv, 2 * half), (slots, kv, 2 * half)
    buffers = (dice.reals(*size).contiguous() for size in (*sizes, (2, ratio, kv * 2 * half)))
    angle = dice.reals(position + 1, half, dtype=torch.float32).contiguous()
    beta = dice.reals(kv * 2 * half, ratio, dtype=torch.float32).contiguous()
    return *buffers, beta, dice.scalar(position), angle.cos(), angle.sin(), 0.1


_ARGUMENTS: Arguments = {
    "new": Array("*T, 3, G, D", dense=True),
    "recent": Array("*T, W, G, D", dense=True),
    "entries": Array("*T, E, G, D", dense=True),
    "opened": Array("*T, 2, M, G * D", dense=True),
    "beta": Array("G * D, M", FLOAT, dense=True),
    **PLACE,
    "eps": Number(()),
}
_CODES = tuple(ROOM)
_WHERE = ("len(T) < 2", "D % 2 == 0", "M > 0 and W > 0 and E > 0")

APPEND_POSITION = Operation(
    "append_position", _append_position_triton, _append_position_torch, append_position_reference,
    _cases,
    Gate(
        relative=1e-5, peer_slack=0.1,
        reason="float32 sums over a block; in bf16 no worse than torch by 10 %",
    ),
    _ARGUMENTS, where=_WHERE, compared=("recent", "entries", "opened"), draw=_draw,
    needs_rows=False, torch_is_peer=True,
    timed=[
        Timed(f"{'16 texts of ' * len(texts)}128 wide, {m} of an entry", T=texts, G=1, D=128, W=128,
              E=slots, M=m, P=16384, position=16000, eps=1e-6)
        for slots, m in ((4097, 4), (129, 128)) for texts in ((), (16,))
    ],
)  # fmt: skip
APPEND_POSITION_8BIT = Operation(
    "append_position_8bit", _append_position_triton, _append_position_torch,
    append_position_8bit_reference, _cases_8bit,
    Gate(
        relative=1e-2,
        reason="a result in bf16 is rounded, and a sum's last bit may decide how a code is",
    ),
    {
        **_ARGUMENTS, "recent": Array("*T, W, G, D", _CODES, dense=True),
        "entries": Array("*T, E, G, D", _CODES, dense=True),
        "of_recent": Array("*T, W, G", INT8, dense=True),
        "of_entries": Array("*T, E, G", INT8, dense=True),
    },
    where=(*_WHERE, "recent.dtype == entries.dtype"), compared=_with_numbers,
    draw=lambda dice, *sizes: in_eight_bits(_draw(dice, *sizes), dice.pick(_CODES)),
    needs_rows=False, timings=_timings_8bit,
)  # fmt: skip
