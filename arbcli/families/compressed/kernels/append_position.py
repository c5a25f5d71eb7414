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

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention import rotary_norm as rotary
from arbcli.kernels.attention.eight_bits import ROOM, quantise_entries, quantise_halves
from arbcli.kernels.matmul.quantise_rows import E4M3, has_e4m3
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.runtime.texts import text_by_text

SHARED = (4, 6, 7)
"""Arguments of `append_position_` that are the same for all texts."""


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
    rotated = rotary.rotate(normal, cos[place], sin[place])[None].to(recent.dtype)
    recent.index_copy_(0, place % len(recent), rotated)
    opened.index_copy_(1, place % m, new[1:].flatten(1)[:, None])
    filled = (torch.arange(m, device=new.device) <= place % m)[:, None]
    gates = (opened[1].float() + beta.T).masked_fill(~filled, -torch.inf)
    mixed = (gates.softmax(dim=0) * torch.where(filled, opened[0].float(), 0)).sum(dim=0)
    still = functional.rms_norm(mixed.view(new[0].shape), width, eps=eps).to(new.dtype)
    entry = rotary.rotate(still, cos[begin], sin[begin])[None].to(entries.dtype)
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
        quantised, power = quantise_entries(row, codes.dtype)
        # torch copies no e4m3 by index
        codes.view(torch.int8).index_copy_(0, slot, quantised.view(torch.int8))
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
    rotary.store_halves(ptr + at, x1, x2, mask, HALF)


@triton.jit
def _rotated(x1, x2, cos_ptr, sin_ptr, place, offs, mask, HALF: tl.constexpr):
    table = place.to(tl.int64) * HALF + offs
    cos, sin = rotary.load_angles(cos_ptr, sin_ptr, table, mask)
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
    still_ptr, recent_exponents_ptr, entry_exponents_ptr, W, E, M, KV, eps,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, EIGHT: tl.constexpr,
    FLOATS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 2 * HALF
    # base pointers of this text; a program has one key head
    kv, text = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(position_ptr + text)
    new_ptr, still_ptr = new_ptr + text * 3 * KV * WIDTH, still_ptr + text * KV * WIDTH
    rows, entry_rows = text * W * KV, text * E * KV
    recent_ptr, entries_ptr = recent_ptr + rows * WIDTH, entries_ptr + entry_rows * WIDTH
    opened_ptr += text * 2 * M * KV * WIDTH
    if EIGHT:
        recent_exponents_ptr, entry_exponents_ptr = (
            recent_exponents_ptr + rows,
            entry_exponents_ptr + entry_rows,
        )
    offs = tl.arange(0, BLOCK_H)
    mask = offs < HALF
    base = kv * WIDTH
    dtype = new_ptr.dtype.element_ty
    # recent byte: normalise, rotate, store in the ring
    r1, r2 = rotary.load_halves(new_ptr + base + offs, mask, HALF)
    r = tl.rsqrt(tl.sum(r1 * r1 + r2 * r2) / WIDTH + eps)
    r1, r2 = _rotated(r1 * r, r2 * r, cos_ptr, sin_ptr, position, offs, mask, HALF)
    r1, r2 = tl.where(mask, r1, 0), tl.where(mask, r2, 0)
    slot = (position % W * KV + kv).to(tl.int64)
    _store_vector(recent_ptr, recent_exponents_ptr, slot, r1, r2, offs, mask, dtype, HALF, EIGHT,
                  FLOATS, NATIVE)  # fmt: skip

    # append value and gate to the open block
    kept, number = position % M, position // M
    value_ptr, gate_ptr = new_ptr + KV * WIDTH + base, new_ptr + 2 * KV * WIDTH + base
    v1 = tl.load(value_ptr + offs, mask=mask, other=0)
    v2 = tl.load(value_ptr + HALF + offs, mask=mask, other=0)
    a1 = tl.load(gate_ptr + offs, mask=mask, other=0)
    a2 = tl.load(gate_ptr + HALF + offs, mask=mask, other=0)
    at = kept * (KV * WIDTH) + base + offs
    rotary.store_halves(opened_ptr + at, v1, v2, mask, HALF)
    rotary.store_halves(opened_ptr + M * KV * WIDTH + at, a1, a2, mask, HALF)
    # pool the open block, with the new byte from registers, and normalise
    c1 = _entry_half(opened_ptr, beta_ptr, kept, M, KV, base, offs, mask, v1.to(tl.float32),
                     a1.to(tl.float32), WIDTH, BLOCK_M)  # fmt: skip
    c2 = _entry_half(opened_ptr, beta_ptr, kept, M, KV, base + HALF, offs, mask,
                     v2.to(tl.float32), a2.to(tl.float32), WIDTH, BLOCK_M)  # fmt: skip
    c1, c2 = tl.where(mask, c1, 0), tl.where(mask, c2, 0)
    r = tl.rsqrt(tl.sum(c1 * c1 + c2 * c2) / WIDTH + eps)
    c1, c2 = (c1 * r).to(dtype), (c2 * r).to(dtype)
    rotary.store_halves(still_ptr + base + offs, c1, c2, mask, HALF)
    # entry: rotate by its first position, store
    c1, c2 = _rotated(
        c1.to(tl.float32), c2.to(tl.float32), cos_ptr, sin_ptr, number * M, offs, mask, HALF
    )
    c1, c2 = tl.where(mask, c1, 0), tl.where(mask, c2, 0)
    slot = (number % E * KV + kv).to(tl.int64)
    _store_vector(entries_ptr, entry_exponents_ptr, slot, c1, c2, offs, mask, dtype, HALF, EIGHT,
                  FLOATS, NATIVE)  # fmt: skip


def _append_position_triton(
    new: Tensor, recent: Tensor, entries: Tensor, opened: Tensor, beta: Tensor, position: Tensor,
    cos: Tensor, sin: Tensor, eps: float, exponents: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    floats, (recent_exponents, entry_exponents) = recent.dtype == E4M3, exponents or (None, None)
    if floats:
        recent, entries = recent.view(torch.uint8), entries.view(torch.uint8)
    kv, width = new.shape[-2:]
    still = new.new_empty(*position.shape, kv, width)
    m = opened.shape[-2]
    _append_position_kernel[(kv, position.numel())](
        new, recent, entries, opened, beta, position, cos, sin, still, recent_exponents,
        entry_exponents, recent.shape[-3], entries.shape[-3], m, kv, eps,
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


CODES = tuple(ROOM)
_WHERE = ("len(T) < 2", "D % 2 == 0", "M > 0 and W > 0 and E > 0")

APPEND_POSITION = Operation(
    "append_position", _append_position_triton, _append_position_torch,
    "new: real[*T, 3, G, D] dense; recent: real[*T, W, G, D] dense; entries: real[*T, E, G, D] "
    "dense; opened: real[*T, 2, M, G * D] dense; beta: float32[G * D, M] dense; position: "
    "int32[*T] dense; cos, sin: float32[P, D // 2] dense; eps",
    where=_WHERE,
)  # fmt: skip
APPEND_POSITION_8BIT = Operation(
    "append_position_8bit", _append_position_triton, _append_position_torch,
    "new: real[*T, 3, G, D] dense; recent: float8_e4m3fn|int8[*T, W, G, D] dense; "
    "entries: float8_e4m3fn|int8[*T, E, G, D] dense; opened: real[*T, 2, M, G * D] dense; "
    "beta: float32[G * D, M] dense; position: int32[*T] dense; cos, sin: float32[P, D // 2] dense; "
    "eps; recent_exponents: int8[*T, W, G] dense; entry_exponents: int8[*T, E, G] dense",
    where=(*_WHERE, "recent.dtype == entries.dtype"),
)  # fmt: skip
