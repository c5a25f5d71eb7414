"""Normalise, scale and rotate queries and keys, with grouped-query attention.

For a head's vector x of d elements, r = rsqrt(mean(x**2) + eps) and z = x * r * g, with one vector
of gains g for queries and one for keys. Without gains g is 1, and without an eps r is 1. For a pair
(a, b) of elements i and i + d / 2 of z, at the angle t of pair and position:
y = (a cos t - b sin t, a sin t + b cos t).

The backward rotates the gradient by -t, which gives gz, and recomputes r from x:
grad_x = r * (gz * g - x * r * mean(x * r * gz * g)); grad_g is the sum of gz * x * r over all query
heads, or key heads. A program sums over its rows, and torch over programs, in a fixed order.

`rotary_norm` does this in place for equal numbers of query and key heads, without gains.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from arbcli.kernels.attention import rotary_norm as rotary
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton

TILES = 4
"""Tiles of rows per program when gradients of gains are summed."""


def no_gains(qkv: Tensor) -> Tensor:
    """Return (0, d) float32, the gradients of gains that there are not."""
    return torch.empty(0, qkv.shape[3], device=qkv.device)


def _parts(x: Tensor, kv: int) -> tuple[Tensor, Tensor]:
    """Split (..., heads of queries, keys and optionally values, d) into queries and keys."""
    heads = x.shape[2] - 2 * kv
    return x[:, :, :heads], x[:, :, heads : heads + kv]


def _rotary_heads_torch(
    qkv: Tensor, gains: Tensor | None, cos: Tensor, sin: Tensor, kv: int, eps: float | None
) -> Tensor:
    batch, length, heads, width = qkv.shape
    y = qkv.new_empty(batch, length, heads - kv, width)
    for rows in row_chunks(qkv.flatten(1)):
        place = 0
        for part, x in enumerate(_parts(qkv[rows], kv)):
            z = x.float()
            if eps is not None:
                z = rms_norm(z, (width,), None if gains is None else gains[part], eps)
            y[rows, :, place : place + x.shape[2]] = rotary.rotate(z, cos[:, None], sin[:, None])
            place += x.shape[2]
    return y


def _rotary_heads_backward_torch(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, gains: Tensor | None,
    cos: Tensor, sin: Tensor, eps: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    grad_qkv, kv = torch.empty_like(qkv), grad_k.shape[1]
    grad_gains = no_gains(qkv) if gains is None else torch.zeros_like(gains)
    for rows in row_chunks(qkv.flatten(1)):
        xs, results = _parts(qkv[rows], kv), _parts(grad_qkv[rows], kv)
        for part, grad in enumerate((grad_q, grad_k)):
            grad_z = rotary.rotate(grad[rows].transpose(1, 2), cos[:, None], -sin[:, None])
            if eps is not None:
                x = xs[part].float()
                r = x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
                normal = x.mul_(r)
                if gains is not None:
                    grad_gains[part] += (grad_z * normal).sum(dim=(0, 1, 2))
                    grad_z.mul_(gains[part])
                mean = (normal * grad_z).mean(dim=-1, keepdim=True)
                grad_z.addcmul_(normal, mean, value=-1).mul_(r)
            results[part].copy_(grad_z)
    grad_qkv[:, :, qkv.shape[2] - kv :] = grad_v.transpose(1, 2)
    return grad_qkv, grad_gains


@triton.jit
def _rotary_heads_kernel(
    qkv_ptr, gains_ptr, cos_ptr, sin_ptr, y_ptr,
    num_rows, T, HEADS, KV, eps,
    NORMAL: tl.constexpr, GAINS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # a query or key head
    token, head = row // (HEADS + KV), row % (HEADS + KV)
    offs_h = tl.arange(0, BLOCK_H)[None, :]
    mask = (row < num_rows)[:, None] & (offs_h < HALF)
    x_ptrs = qkv_ptr + ((token * (HEADS + 2 * KV) + head) * 2 * HALF)[:, None] + offs_h
    first, second = rotary.load_halves(x_ptrs, mask, HALF)
    if NORMAL:
        r = rotary.inverse_rms(first, second, eps, HALF)[:, None]
        first *= r
        second *= r
    if GAINS:
        gain_ptrs = gains_ptr + ((head >= HEADS).to(tl.int32) * 2 * HALF)[:, None] + offs_h
        first *= tl.load(gain_ptrs, mask=mask, other=0)
        second *= tl.load(gain_ptrs + HALF, mask=mask, other=0)

    cos, sin = rotary.load_angles(cos_ptr, sin_ptr, ((token % T) * HALF)[:, None] + offs_h, mask)
    y_ptrs = y_ptr + (row * 2 * HALF)[:, None] + offs_h
    rotary.store_rotated(y_ptrs, first, second, cos, sin, 1.0, mask, HALF)


@triton.jit
def _rotary_heads_backward_kernel(
    grad_q_ptr, grad_k_ptr, grad_v_ptr, qkv_ptr, gains_ptr, cos_ptr, sin_ptr,
    grad_qkv_ptr, sums_ptr,
    tokens, T, HEADS, KV, eps,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    NORMAL: tl.constexpr, GAINS: tl.constexpr, TILES: tl.constexpr,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)  # queries, keys, values
    # gradient of queries, keys or values, and the first of their heads in a row of qkv
    heads = KV
    grad_ptr, begin = grad_k_ptr, HEADS
    stride_b, stride_h, stride_t = stride_kb, stride_kh, stride_kt
    if part == 0:
        heads = HEADS
        grad_ptr, begin = grad_q_ptr, 0
        stride_b, stride_h, stride_t = stride_qb, stride_qh, stride_qt
    if part == 2:
        grad_ptr, begin = grad_v_ptr, HEADS + KV
        stride_b, stride_h, stride_t = stride_vb, stride_vh, stride_vt
    offs_h = tl.arange(0, BLOCK_H)[None, :]
    first_sums = tl.zeros((BLOCK_R, BLOCK_H), dtype=tl.float32)
    second_sums = tl.zeros((BLOCK_R, BLOCK_H), dtype=tl.float32)
    # scalars are divided in 64 bits, and rows of the program, counted from these, in 32
    first_row = program * TILES * BLOCK_R
    first_token, first_head = first_row // heads, (first_row % heads).to(tl.int32)
    first_batch, first_position = first_token // T, (first_token % T).to(tl.int32)
    for tile in range(TILES):
        row = first_head + tile * BLOCK_R + tl.arange(0, BLOCK_R)  # a head of a token
        further, head = row // heads, (row % heads).to(tl.int64)
        token, place = first_token + further, first_position + further
        batch, position = first_batch + place // T, (place % T).to(tl.int64)
        mask = (token < tokens)[:, None] & (offs_h < HALF)
        # gradient of a tile of heads, as halves
        grad_ptrs = grad_ptr + batch * stride_b + head * stride_h + position * stride_t
        grad_ptrs = grad_ptrs[:, None] + offs_h
        first, second = rotary.load_halves(grad_ptrs, mask, HALF)
        out = ((token * (HEADS + 2 * KV) + begin + head) * 2 * HALF)[:, None] + offs_h
        # queries and keys: rotate back, then backward of gains and norm; values are copied
        if part < 2:
            table = (position * HALF)[:, None] + offs_h
            cos, sin = rotary.load_angles(cos_ptr, sin_ptr, table, mask)
            first, second = rotary.rotate_back(first, second, cos, sin)
            if NORMAL:
                x_first, x_second = rotary.load_halves(qkv_ptr + out, mask, HALF)
                r = rotary.inverse_rms(x_first, x_second, eps, HALF)
                x_first *= r[:, None]
                x_second *= r[:, None]
                if GAINS:
                    first_sums += first * x_first
                    second_sums += second * x_second
                    gain_ptrs = gains_ptr + part * 2 * HALF + offs_h
                    first *= tl.load(gain_ptrs, mask=offs_h < HALF, other=0)
                    second *= tl.load(gain_ptrs + HALF, mask=offs_h < HALF, other=0)
                first, second = rotary.norm_backward(first, second, x_first, x_second, r, HALF)
        rotary.store_halves(grad_qkv_ptr + out, first, second, mask, HALF)
    # partial sums of the gradient of gains
    if GAINS and part < 2:
        offs = tl.arange(0, BLOCK_H)
        sums_ptrs = sums_ptr + (part * tl.num_programs(0) + program) * 2 * HALF + offs
        tl.store(sums_ptrs, tl.sum(first_sums, axis=0), mask=offs < HALF)
        tl.store(sums_ptrs + HALF, tl.sum(second_sums, axis=0), mask=offs < HALF)


def _rotary_heads_triton(
    qkv: Tensor, gains: Tensor | None, cos: Tensor, sin: Tensor, kv: int, eps: float | None
) -> Tensor:
    batch, length, heads, width = qkv.shape
    y = qkv.new_empty(batch, length, heads - kv, width)
    rows = batch * length * (heads - kv)
    if rows:
        tile = rotary.rotary_tile(width // 2)
        _rotary_heads_kernel[(triton.cdiv(rows, tile["BLOCK_R"]),)](
            qkv, cos if gains is None else gains, cos, sin, y, rows, length, heads - 2 * kv, kv,
            eps or 0.0, NORMAL=eps is not None, GAINS=gains is not None, **tile,
        )  # fmt: skip
    return y


def _rotary_heads_backward_triton(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, gains: Tensor | None,
    cos: Tensor, sin: Tensor, eps: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, _, width = qkv.shape
    heads, kv = grad_q.shape[1], grad_k.shape[1]
    tile, tiles = rotary.rotary_tile(width // 2), 1 if gains is None else TILES
    programs = triton.cdiv(batch * length * max(heads, kv), tiles * tile["BLOCK_R"])
    grad_qkv = torch.empty_like(qkv)
    sums = None if gains is None else gains.new_empty(2, programs, width)
    if programs:
        grads = rotary.dense_heads(grad_q, grad_k, grad_v)
        strides = [stride for grad in grads for stride in grad.stride()[:3]]
        _rotary_heads_backward_kernel[(programs, 3)](
            *grads, qkv, cos if gains is None else gains, cos, sin, grad_qkv,
            cos if sums is None else sums, batch * length, length, heads, kv, eps or 0.0, *strides,
            NORMAL=eps is not None, GAINS=gains is not None, TILES=tiles, **tile,
        )  # fmt: skip
    return grad_qkv, no_gains(qkv) if sums is None else sums.sum(dim=1)


rotary_heads = Operation(
    "rotary_heads", _rotary_heads_triton, _rotary_heads_torch,
    "qkv: real[B, T, H, D] dense; gains: float32[2, D]? dense; cos, sin: float32[T, D // 2] dense; "
    "kv; eps",
    where=("D % 2 == 0", "0 < 2 * kv < H", "gains is None or eps is not None"),
)  # fmt: skip
"""Normalise, scale and rotate queries and keys.

Args:
    qkv: (B, T, H, d) float32 or bfloat16, contiguous, d even: query heads, then `kv` key heads
        and `kv` value heads.
    gains: (2, d) float32, contiguous: gains of queries and of keys; None is ones.
    cos: (T, d / 2) float32, contiguous.
    sin: like `cos`.
    kv: number of key heads.
    eps: added to the mean square; None omits the norm, and requires no gains.

Returns:
    (B, T, H - kv, d) in the dtype of `qkv`, contiguous: queries, then keys; computed in float32
    and rounded once.
"""
rotary_heads_backward = Operation(
    "rotary_heads_backward", _rotary_heads_backward_triton, _rotary_heads_backward_torch,
    "grad_q: real[B, Q, T, D]; grad_k, grad_v: real[B, KV, T, D]; qkv: real[B, T, Q + 2 * KV, D] "
    "dense; gains: float32[2, D]? dense; cos, sin: float32[T, D // 2] dense; eps",
    where=("D % 2 == 0", "gains is None or eps is not None"),
)  # fmt: skip
"""Compute the gradients of the inputs of `rotary_heads`.

Args:
    grad_q: (B, heads, T, d) in the dtype of `qkv`, any strides: gradient of queries.
    grad_k: (B, kv, T, d), likewise, of keys.
    grad_v: (B, kv, T, d), likewise, of values.
    qkv: as in `rotary_heads`.
    gains: likewise.
    cos: likewise.
    sin: likewise.
    eps: likewise.

Returns:
    Gradient of `qkv`, (B, T, H, d) contiguous, in its dtype; and of `gains`, (2, d) float32, or
    (0, d) without gains.
"""
