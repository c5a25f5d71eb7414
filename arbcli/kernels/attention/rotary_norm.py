"""Apply rotary embedding to queries and keys and normalise each head, in place.

Elements i and i + d / 2 of a head's vector x form a pair (a, b). At the angle t of pair and
position, rotated = (a cos t - b sin t, a sin t + b cos t), and y = rotated * r with r =
rsqrt(mean(x**2) + eps), as rotation preserves the norm. The backward needs only y and r: grad_x is
r * (gy - y * mean(y * gy)), rotated by -t. Source of the angles: J. Su et al., "RoFormer",
https://arxiv.org/abs/2104.09864, eq. 34.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.attention.rotation import normalise_reference, rotate_reference
from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, Array, Number
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing, cases_of
from arbcli.kernels.timed import Timed


def unpack_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View (B, T, 3, heads, d) as queries, keys and values, (B, heads, T, d) each."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def _rotary_norm_float64(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Rotate and normalise queries and keys, and copy values: (B, T, 3, heads, d) float64."""
    qkv = qkv.to(torch.float64)
    rotated = rotate_reference(qkv, cos[:, None, None], sin[:, None, None])
    normal = normalise_reference(rotated, eps)
    return torch.cat([normal[:, :, :2], qkv[:, :, 2:]], dim=2)


def rotary_norm_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the result of `rotary_norm_` and its `qkv`, in float64."""
    squares = qkv[:, :, :2].to(torch.float64).square().mean(dim=-1)
    return _rotary_norm_float64(qkv, cos, sin, eps), (squares + eps) ** -0.5


def rotary_norm_backward_reference(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Compute `rotary_norm_backward` in float64, rotating by -t."""
    grads = (part.transpose(1, 2).double() for part in (grad_q, grad_k, grad_v))
    grad = torch.stack((*grads,), dim=2)
    y, grad_y = qkv[:, :, :2].to(torch.float64), grad[:, :, :2]
    grad_y = (grad_y - y * (y * grad_y).mean(dim=-1, keepdim=True)) * r.double()[..., None]
    rotated = rotate_reference(grad_y, cos[:, None, None], -sin[:, None, None])
    return torch.cat([rotated, grad[:, :, 2:]], dim=2)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
    for some in row_chunks(qkv.flatten(1)):
        x = qkv[some, :, :2].float()
        norm = torch.linalg.vector_norm(x, dim=-1, out=r[some])
        norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        qkv[some, :, :2] = _turn(x, cos, sin).mul_(norm[..., None])
    return r


def _rotary_norm_backward_torch(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    grad_qkv = torch.empty_like(qkv)
    for some in row_chunks(qkv.flatten(1)):
        for part, grad in enumerate((grad_q, grad_k)):
            y, grad_y = qkv[some, :, part].float(), grad[some].transpose(1, 2).float()
            mean = torch.linalg.vecdot(y, grad_y)[..., None] / y.shape[-1]
            grad_y = torch.addcmul(grad_y, y, mean, value=-1).mul_(r[some, :, part, :, None])
            grad_qkv[some, :, part] = _turn(grad_y, cos, -sin)
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
    grads = [
        grad if grad.stride(3) == 1 else grad.contiguous() for grad in (grad_q, grad_k, grad_v)
    ]
    strides = (grad.stride(axis) for grad in grads for axis in range(3))
    native.call(
        "rotary_norm_backward", *grads, *strides, qkv, grad_qkv, r.contiguous(),
        qkv.dtype == torch.bfloat16, cos.contiguous(), sin.contiguous(),
        batch, length, heads, width, native.threads_for(qkv.numel()),
    )  # fmt: skip
    return grad_qkv


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
    table = ((token % T) * HALF)[:, None] + offs_h
    cos = tl.load(cos_ptr + table, mask=mask, other=0)
    sin = tl.load(sin_ptr + table, mask=mask, other=0)

    first_ptrs = qkv_ptr + ((token * 3 * HEADS + head) * 2 * HALF)[:, None] + offs_h
    first = tl.load(first_ptrs, mask=mask, other=0).to(tl.float32)
    second = tl.load(first_ptrs + HALF, mask=mask, other=0).to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1)
    r = tl.rsqrt(squares / (2 * HALF) + eps)
    tl.store(r_ptr + row, r, mask=row < num_rows)
    dtype = qkv_ptr.dtype.element_ty
    tl.store(first_ptrs, ((first * cos - second * sin) * r[:, None]).to(dtype), mask=mask)
    tl.store(first_ptrs + HALF, ((first * sin + second * cos) * r[:, None]).to(dtype), mask=mask)


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
        first = tl.load(qkv_ptr + out, mask=mask, other=0).to(tl.float32)
        second = tl.load(qkv_ptr + out + HALF, mask=mask, other=0).to(tl.float32)
        grad_first = tl.load(grad_ptrs, mask=mask, other=0).to(tl.float32)
        grad_second = tl.load(grad_ptrs + HALF, mask=mask, other=0).to(tl.float32)
        r = tl.load(r_ptr + (token * 2 + part) * HEADS + head, mask=row < num_rows, other=0)
        products = tl.sum(first * grad_first + second * grad_second, axis=1)
        mean = (products / (2 * HALF))[:, None]
        grad_first = (grad_first - first * mean) * r[:, None]
        grad_second = (grad_second - second * mean) * r[:, None]

        table = (position * HALF)[:, None] + offs_h
        cos = tl.load(cos_ptr + table, mask=mask, other=0)
        sin = tl.load(sin_ptr + table, mask=mask, other=0)
        dtype = grad_qkv_ptr.dtype.element_ty
        rotated = grad_first * cos + grad_second * sin
        tl.store(grad_qkv_ptr + out, rotated.to(dtype), mask=mask)
        rotated = grad_second * cos - grad_first * sin
        tl.store(grad_qkv_ptr + out + HALF, rotated.to(dtype), mask=mask)


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
        grads = [
            grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (grad_q, grad_k, grad_v)
        ]
        strides = [stride for grad in grads for stride in grad.stride()[:3]]
        tile = rotary_tile(width // 2)
        _rotary_norm_backward_kernel[(triton.cdiv(rows, tile["BLOCK_R"]), 3)](
            *grads, qkv, r, cos, sin, grad_qkv, rows, length, heads, *strides, **tile
        )
    return grad_qkv


SHAPES = ((1, 1, 1, 2), (2, 3, 1, 10), (1, 5, 3, 66), (2, 7, 2, 64), (1, 2, 5, 128))
"""(B, T, heads, d)."""


def _inputs(device: torch.device) -> Iterator[tuple[str, torch.Generator, Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*shape, torch.float32) for shape in (*SHAPES, (0, 3, 2, 8))]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        shapes += [(3, 5, 2, 66, torch.bfloat16), (4, 256, 6, 64, torch.bfloat16)]
    for batch, length, heads, width, dtype in shapes:
        qkv = torch.randn(batch, length, 3, heads, width, generator=generator)
        angle = 7 * torch.randn(length, width // 2, generator=generator)
        label = f"{batch}x{length}x{heads}x{width}"
        label += " bf16" if dtype == torch.bfloat16 else ""
        yield (
            label,
            generator,
            qkv.to(device, dtype),
            angle.cos().to(device),
            angle.sin().to(device),
        )


def _backward_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    for label, generator, qkv, cos, sin in _inputs(device):
        r = _rotary_norm_torch(qkv, cos, sin, 0.1)
        batch, length, _, heads, width = qkv.shape
        grads = [
            torch.randn(batch, length, heads, width, generator=generator).to(qkv).transpose(1, 2)
            for _ in range(3)
        ]
        grads[1] = grads[1].contiguous()
        yield Case(label, (*grads, qkv, r, cos, sin))


def _backward_timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    (timing,) = rotary_norm_.draw_timings(device, group_size)
    qkv, *table, _ = timing.inputs
    r = torch.rand(*qkv.shape[:2], 2, qkv.shape[3], device=device)
    yield Timing(timing.label, (*unpack_qkv(torch.randn_like(qkv)), qkv, r, *table))


_GATE = Gate(
    relative=1e-5, peer_slack=0.1, rounded=True,
    reason="float32 sums of at most 128 squares; in bf16 no worse than one rounding",
)  # fmt: skip


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    batch, heads, half = 1 + dice.below(3), 1 + dice.below(4), 2 + min(k, 64)
    angle = dice.reals(m, half, dtype=torch.float32)
    qkv = dice.reals(batch * m * 3 * heads, 2 * half).contiguous()
    angle = angle.contiguous()
    return qkv.view(batch, m, 3, heads, 2 * half), angle.cos(), angle.sin(), 0.1


def _draw_backward(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    qkv, cos, sin, eps = _draw(dice, group_size, m, n, k)
    r = rotary_norm_.torch(qkv, cos, sin, eps)[1]
    batch, length, _, heads, width = qkv.shape
    rows = [dice.reals(batch * heads * length, width) for _ in range(3)]
    grads = [grad.reshape(batch, heads, length, width) for grad in rows]
    return *grads, qkv, r, cos, sin


_QKV, _TABLE = Array("B, T, 3, H, D", dense=True), Array("T, D // 2", FLOAT, dense=True)
_GRAD = Array("B, H, T, D")


def _with_qkv(inputs: tuple, r: Tensor) -> tuple[Tensor, Tensor]:
    return inputs[0], r


rotary_norm_ = Operation(
    "rotary_norm", _rotary_norm_triton, _rotary_norm_torch, rotary_norm_reference,
    cases_of(_inputs, lambda _, *inputs: (*inputs, 0.1)), _GATE,
    {"qkv": _QKV, "cos": _TABLE, "sin": _TABLE, "eps": Number(())},
    where=("D % 2 == 0",), compared=_with_qkv, draw=_draw, needs_rows=True,
    timed=[Timed("8x2048x16x128 bf16", B=8, T=2048, H=16, D=128, eps=1e-6)],
    native=_rotary_norm_native,
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
    rotary_norm_backward_reference, _backward_cases, _GATE,
    {
        "grad_q": _GRAD, "grad_k": _GRAD, "grad_v": _GRAD, "qkv": _QKV,
        "r": Array("B, T, 2, H", FLOAT, dense=True), "cos": _TABLE, "sin": _TABLE,
    },
    where=("D % 2 == 0",), draw=_draw_backward, needs_rows=True,
    timings=_backward_timings, native=_rotary_norm_backward_native,
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
