"""Apply rotary embedding to queries and keys and normalise each head, in place.

Elements i and i + d / 2 of a head's vector x form a pair (a, b). At the angle t of pair and
position, rotated = (a cos t - b sin t, a sin t + b cos t), and y = rotated * r with r =
rsqrt(mean(x**2) + eps), as rotation preserves the norm. The backward needs only y and r: grad_x is
r * (gy - y * mean(y * gy)), rotated by -t. Source of the angles: J. Su et al., "RoFormer",
https://arxiv.org/abs/2104.09864, eq. 34.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (..., d) by broadcastable (..., d / 2) angles; differentiable, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def unpack_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View (B, T, 3, heads, d) as queries, keys and values, (B, heads, T, d) each."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def dense_heads(*parts: Tensor) -> list[Tensor]:
    """Make the last dimension of each part contiguous; copies only those where it is not."""
    return [part if part.stride(-1) == 1 else part.contiguous() for part in parts]


def _rotate_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, T, ..., d) float32 by (T, d / 2) angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = (table.view(-1, *(1,) * (x.dim() - 3), cos.shape[-1]) for table in (cos, sin))
    rotated = torch.empty_like(x)
    half = x.shape[-1] // 2
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(first, sin, out=rotated[..., half:]).addcmul_(second, cos)
    return rotated


def _rotary_norm_torch(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    r = torch.empty(*qkv.shape[:2], 2, qkv.shape[3], dtype=torch.float32, device=qkv.device)
    for rows in row_chunks(qkv.flatten(1)):
        x = qkv[rows, :, :2].float()
        norm = torch.linalg.vector_norm(x, dim=-1, out=r[rows])
        norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        qkv[rows, :, :2] = _rotate_float32(x, cos, sin).mul_(norm[..., None])
    return r


def _rotary_norm_backward_torch(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    grad_qkv = torch.empty_like(qkv)
    for rows in row_chunks(qkv.flatten(1)):
        for part, grad in enumerate((grad_q, grad_k)):
            y, grad_y = qkv[rows, :, part].float(), grad[rows].transpose(1, 2).float()
            mean = torch.linalg.vecdot(y, grad_y)[..., None] / y.shape[-1]
            grad_y = torch.addcmul(grad_y, y, mean, value=-1).mul_(r[rows, :, part, :, None])
            grad_qkv[rows, :, part] = _rotate_float32(grad_y, cos, -sin)
    grad_qkv[:, :, 2] = grad_v.transpose(1, 2)
    return grad_qkv


def _rotary_norm_native(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    batch, length, _, heads, width = qkv.shape
    r = torch.empty(batch, length, 2, heads, dtype=torch.float32, device=qkv.device)
    native.call(
        "rotary_norm", qkv, qkv.dtype == torch.bfloat16, cos.contiguous(), sin.contiguous(), eps, r,
        batch, length, heads, width, native.threads_for(qkv.numel()),
    )  # fmt: skip
    return r


def _rotary_norm_backward_native(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    batch, length, _, heads, width = qkv.shape
    grad_qkv = torch.empty_like(qkv)
    grads = dense_heads(grad_q, grad_k, grad_v)
    strides = (grad.stride(axis) for grad in grads for axis in range(3))
    native.call(
        "rotary_norm_backward", *grads, *strides, qkv, grad_qkv, r.contiguous(),
        qkv.dtype == torch.bfloat16, cos.contiguous(), sin.contiguous(),
        batch, length, heads, width, native.threads_for(qkv.numel()),
    )  # fmt: skip
    return grad_qkv


@triton.jit
def load_halves(ptrs, mask, HALF: tl.constexpr):
    """Load both halves of heads as float32, zeros where masked."""
    first = tl.load(ptrs, mask=mask, other=0).to(tl.float32)
    return first, tl.load(ptrs + HALF, mask=mask, other=0).to(tl.float32)


@triton.jit
def store_halves(ptrs, first, second, mask, HALF: tl.constexpr):
    """Store both halves of heads, rounded to the dtype of the memory."""
    tl.store(ptrs, first.to(ptrs.dtype.element_ty), mask=mask)
    tl.store(ptrs + HALF, second.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def load_angles(cos_ptr, sin_ptr, offsets, mask):
    """Load cosines and sines at offsets of their tables."""
    cos = tl.load(cos_ptr + offsets, mask=mask, other=0)
    return cos, tl.load(sin_ptr + offsets, mask=mask, other=0)


@triton.jit
def store_rotated(ptrs, first, second, cos, sin, r, mask, HALF: tl.constexpr):
    """Rotate both halves of heads, multiply them by r, and store them."""
    tl.store(ptrs, ((first * cos - second * sin) * r).to(ptrs.dtype.element_ty), mask=mask)
    second = (first * sin + second * cos) * r
    tl.store(ptrs + HALF, second.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def store_rotated_back(ptrs, first, second, cos, sin, mask, HALF: tl.constexpr):
    """Rotate both halves of heads by the negative angles, and store them."""
    tl.store(ptrs, (first * cos + second * sin).to(ptrs.dtype.element_ty), mask=mask)
    second = second * cos - first * sin
    tl.store(ptrs + HALF, second.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def rotate_back(first, second, cos, sin):
    """Rotate both halves of heads by the negative angles."""
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def inverse_rms(first, second, eps, HALF: tl.constexpr):
    """Compute r of heads, [ROWS], from both halves."""
    return tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)


@triton.jit
def norm_backward(grad_first, grad_second, y_first, y_second, r, HALF: tl.constexpr):
    """Compute the gradient r * (gy - y * mean(y * gy)) of both halves of heads."""
    products = tl.sum(y_first * grad_first + y_second * grad_second, axis=1)
    mean = (products / (2 * HALF))[:, None]
    return (grad_first - y_first * mean) * r[:, None], (grad_second - y_second * mean) * r[:, None]


@triton.jit
def _rotary_norm_kernel(
    qkv_ptr, cos_ptr, sin_ptr, r_ptr,
    num_rows, T, HEADS, eps,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # a query or key head
    token, head = row // (2 * HEADS), row % (2 * HEADS)
    offs_h = tl.arange(0, BLOCK_H)[None, :]
    mask = (row < num_rows)[:, None] & (offs_h < HALF)
    cos, sin = load_angles(cos_ptr, sin_ptr, ((token % T) * HALF)[:, None] + offs_h, mask)

    ptrs = qkv_ptr + ((token * 3 * HEADS + head) * 2 * HALF)[:, None] + offs_h
    first, second = load_halves(ptrs, mask, HALF)
    r = inverse_rms(first, second, eps, HALF)
    tl.store(r_ptr + row, r, mask=row < num_rows)
    store_rotated(ptrs, first, second, cos, sin, r[:, None], mask, HALF)


@triton.jit
def _rotary_norm_backward_kernel(
    grad_q_ptr, grad_k_ptr, grad_v_ptr, qkv_ptr, r_ptr, cos_ptr, sin_ptr, grad_qkv_ptr,
    num_rows, T, HEADS,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # a head of a token
    token, head = row // HEADS, row % HEADS
    batch, position = token // T, token % T
    offs_h = tl.arange(0, BLOCK_H)[None, :]
    mask = (row < num_rows)[:, None] & (offs_h < HALF)
    out = ((token * 3 * HEADS + head) * 2 * HALF)[:, None] + offs_h
    part = tl.program_id(1)
    # values are copied
    if part == 2:
        grad_ptrs = grad_v_ptr + batch * stride_vb + head * stride_vh + position * stride_vt
        grad_ptrs = grad_ptrs[:, None] + offs_h
        out += 4 * HEADS * HALF
        tl.store(grad_qkv_ptr + out, tl.load(grad_ptrs, mask=mask), mask=mask)
        tl.store(grad_qkv_ptr + out + HALF, tl.load(grad_ptrs + HALF, mask=mask), mask=mask)
    else:
        if part == 0:
            grad_ptrs = grad_q_ptr + batch * stride_qb + head * stride_qh + position * stride_qt
        else:
            grad_ptrs = grad_k_ptr + batch * stride_kb + head * stride_kh + position * stride_kt
        grad_ptrs = grad_ptrs[:, None] + offs_h
        out += part * 2 * HEADS * HALF
        # backward of the norm, from y and r; then rotate by the negative angle
        first, second = load_halves(qkv_ptr + out, mask, HALF)
        grads = load_halves(grad_ptrs, mask, HALF)
        r = tl.load(r_ptr + (token * 2 + part) * HEADS + head, mask=row < num_rows, other=0)
        first, second = norm_backward(*grads, first, second, r, HALF)

        cos, sin = load_angles(cos_ptr, sin_ptr, (position * HALF)[:, None] + offs_h, mask)
        store_rotated_back(grad_qkv_ptr + out, first, second, cos, sin, mask, HALF)


def rotary_tile(half: int) -> dict[str, int]:
    """Choose the number of heads per program."""
    block_h = triton.next_power_of_2(half)
    return {"HALF": half, "BLOCK_R": max(1, 1024 // block_h), "BLOCK_H": block_h}


def _rotary_norm_triton(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    batch, length, _, heads, width = qkv.shape
    r = torch.empty(batch, length, 2, heads, dtype=torch.float32, device=qkv.device)
    if r.numel():
        tile = rotary_tile(width // 2)
        _rotary_norm_kernel[(triton.cdiv(r.numel(), tile["BLOCK_R"]),)](
            qkv, cos, sin, r, r.numel(), length, heads, eps, **tile
        )
    return r


def _rotary_norm_backward_triton(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    batch, length, _, heads, width = qkv.shape
    grad_qkv = torch.empty_like(qkv)
    rows = batch * length * heads
    if rows:
        grads = dense_heads(grad_q, grad_k, grad_v)
        strides = [stride for grad in grads for stride in grad.stride()[:3]]
        tile = rotary_tile(width // 2)
        _rotary_norm_backward_kernel[(triton.cdiv(rows, tile["BLOCK_R"]), 3)](
            *grads, qkv, r, cos, sin, grad_qkv, rows, length, heads, *strides, **tile
        )
    return grad_qkv


rotary_norm_ = Operation(
    "rotary_norm", _rotary_norm_triton, _rotary_norm_torch,
    "qkv: real[B, T, 3, H, D] dense; cos, sin: float32[T, D // 2] dense; eps",
    native=_rotary_norm_native, where=("D % 2 == 0",),
)  # fmt: skip
"""Rotate and normalise the queries and keys of `qkv` in place; values do not change.

Args:
    qkv: (B, T, 3, heads, d) float32 or bfloat16, contiguous, d even; modified in place.
    cos: (T, d / 2) float32, contiguous.
    sin: like `cos`.
    eps: added to the mean square.

Returns:
    (B, T, 2, heads) float32: r of every query and key.
"""
rotary_norm_backward = Operation(
    "rotary_norm_backward", _rotary_norm_backward_triton, _rotary_norm_backward_torch,
    "grad_q, grad_k, grad_v: real[B, H, T, D]; qkv: real[B, T, 3, H, D] dense; "
    "r: float32[B, T, 2, H] dense; cos, sin: float32[T, D // 2] dense",
    native=_rotary_norm_backward_native, where=("D % 2 == 0",),
)  # fmt: skip
"""Compute the gradient of the input of `rotary_norm_`.

Args:
    grad_q: (B, heads, T, d) in the dtype of `qkv`, any strides: gradient of queries.
    grad_k: likewise, of keys.
    grad_v: likewise, of values.
    qkv: (B, T, 3, heads, d) contiguous, the output of `rotary_norm_`.
    r: the result of `rotary_norm_`.
    cos: as in `rotary_norm_`.
    sin: likewise.

Returns:
    (B, T, 3, heads, d) contiguous, in the dtype of `qkv`.
"""
