"""Mix the streams of each position: y[i] = sum over j of w[i, j] x[j] + c[i] f.

With one row of weights and no f it reads the streams, and with n rows it writes f, the output of a
branch, to all of them. Backward, with g the gradient of y:

    grad_x[j] = sum over i of w[i, j] g[i],   grad_f = sum over i of c[i] g[i]
    grad_w[i, j] = g[i] . x[j],               grad_c[i] = g[i] . f
"""

import torch
from torch import Tensor

from arbcli.families.streams.kernels.stream_weights import STREAMS
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.operation import Operation, tl, triton


def mix_streams_torch(
    x: Tensor, weights: Tensor, added: Tensor | None = None, gains: Tensor | None = None
) -> Tensor:
    """Compute `mix_streams` with differentiable torch operations."""
    rows = []
    for row in weights.unbind(1):
        y = row[:, :1] * x[:, 0].float()
        for j in range(1, x.shape[1]):
            y = y + row[:, j : j + 1] * x[:, j].float()
        rows.append(y)
    if added is not None and gains is not None:
        f = added.float()
        rows = [y + gains[:, i : i + 1] * f for i, y in enumerate(rows)]
    return torch.stack(rows, dim=1).to(x.dtype)


def _mix_streams_backward_torch(
    grad_y: Tensor, x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None
) -> tuple[Tensor, ...]:
    grad, inputs = grad_y.float(), x.float()
    grad_x = torch.einsum("mij,mid->mjd", weights, grad).to(x.dtype)
    grad_weights = torch.einsum("mid,mjd->mij", grad, inputs)
    if added is None:
        return grad_x, grad_weights
    grad_added = torch.einsum("mi,mid->md", gains, grad).to(x.dtype)
    return grad_x, grad_weights, grad_added, torch.einsum("mid,md->mi", grad, added.float())


@triton.jit
def _mix_streams_kernel(
    x_ptr, weights_ptr, added_ptr, gains_ptr, y_ptr,
    D, stride_xm, stride_xj, stride_xd, stride_wm, stride_wi, stride_wj, stride_fm, stride_fd,
    stride_cm, stride_ci,
    ROWS: tl.constexpr, N: tl.constexpr, HAS_ADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    y = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    for j in tl.static_range(N):
        x_ptrs = x_ptr + m * stride_xm + j * stride_xj + d * stride_xd
        x = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32)
        w = tl.load(weights_ptr + m * stride_wm + i * stride_wi + j * stride_wj)
        y += w[:, None] * x[None, :]
    if HAS_ADDED:
        f = tl.load(added_ptr + m * stride_fm + d * stride_fd, mask=mask, other=0).to(tl.float32)
        y += tl.load(gains_ptr + m * stride_cm + i * stride_ci)[:, None] * f[None, :]
    y_ptrs = y_ptr + (m * ROWS + i[:, None]) * D + d[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask[None, :])


@triton.jit
def _mix_streams_backward_kernel(
    grad_y_ptr, x_ptr, weights_ptr, added_ptr, gains_ptr,
    grad_x_ptr, grad_weights_ptr, grad_added_ptr, grad_gains_ptr,
    D, stride_ym, stride_yi, stride_yd, stride_xm, stride_xj, stride_xd,
    stride_wm, stride_wi, stride_wj, stride_fm, stride_fd, stride_cm, stride_ci,
    ROWS: tl.constexpr, N: tl.constexpr, HAS_ADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    i, every = tl.arange(0, ROWS), tl.arange(0, N)
    grad_weights = tl.zeros((ROWS, N), dtype=tl.float32)
    grad_gains = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        mask = d < D
        y_ptrs = grad_y_ptr + m * stride_ym + i[:, None] * stride_yi + d[None, :] * stride_yd
        g = tl.load(y_ptrs, mask=mask[None, :], other=0).to(tl.float32)  # [ROWS, BLOCK_D]
        # one stream at a time: its row of grad_w, and its gradient
        for j in tl.static_range(N):
            x_ptrs = x_ptr + m * stride_xm + j * stride_xj + d * stride_xd
            x = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32)
            products = tl.sum(g * x[None, :], axis=1)
            grad_weights += tl.where(every == j, 1.0, 0.0)[None, :] * products[:, None]
            w = tl.load(weights_ptr + m * stride_wm + i * stride_wi + j * stride_wj)
            grad_x = tl.sum(w[:, None] * g, axis=0)
            grad_ptrs = grad_x_ptr + (m * N + j) * D + d
            tl.store(grad_ptrs, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        # gradients of the branch and of its gains
        if HAS_ADDED:
            f_ptrs = added_ptr + m * stride_fm + d * stride_fd
            f = tl.load(f_ptrs, mask=mask, other=0).to(tl.float32)
            grad_gains += tl.sum(g * f[None, :], axis=1)
            c = tl.load(gains_ptr + m * stride_cm + i * stride_ci)
            grad_f = tl.sum(c[:, None] * g, axis=0).to(grad_added_ptr.dtype.element_ty)
            tl.store(grad_added_ptr + m * D + d, grad_f, mask=mask)
    tl.store(grad_weights_ptr + (m * ROWS + i[:, None]) * N + every[None, :], grad_weights)
    if HAS_ADDED:
        tl.store(grad_gains_ptr + m * ROWS + i, grad_gains)


def _added(
    x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the added tensors, or placeholders that the kernels do not read."""
    return (x[:, 0], weights[:, :, 0]) if added is None or gains is None else (added, gains)


def _mix_streams_triton(
    x: Tensor, weights: Tensor, added: Tensor | None = None, gains: Tensor | None = None
) -> Tensor:
    (length, n, width), rows = x.shape, weights.shape[1]
    y = torch.empty(length, rows, width, dtype=x.dtype, device=x.device)
    if y.numel():
        block = min(512, triton.next_power_of_2(width))
        f, c = _added(x, weights, added, gains)
        _mix_streams_kernel[(length, triton.cdiv(width, block))](
            x, weights, f, c, y,
            width, *x.stride(), *weights.stride(), *f.stride(), *c.stride(),
            ROWS=rows, N=n, HAS_ADDED=added is not None, BLOCK_D=block,
        )  # fmt: skip
    return y


def _mix_streams_backward_triton(
    grad_y: Tensor, x: Tensor, weights: Tensor, added: Tensor | None, gains: Tensor | None
) -> tuple[Tensor, ...]:
    (length, n, width), rows = x.shape, weights.shape[1]
    like: TensorOptions = {"dtype": x.dtype, "device": x.device}
    grads = [torch.empty(x.shape, **like), torch.empty(weights.shape, device=x.device)]
    if added is not None and gains is not None:
        grads += [torch.empty(added.shape, **like), torch.empty(gains.shape, device=x.device)]
    if length:
        f, c = _added(x, weights, added, gains)
        _mix_streams_backward_kernel[(length,)](
            grad_y, x, weights, f, c, *(grads if len(grads) == 4 else grads * 2),
            width, *grad_y.stride(), *x.stride(), *weights.stride(), *f.stride(), *c.stride(),
            ROWS=rows, N=n, HAS_ADDED=added is not None,
            BLOCK_D=min(512, triton.next_power_of_2(max(width, 1))),
        )  # fmt: skip
    return tuple(grads)


_WHERE = (f"S in {STREAMS}", f"R in {STREAMS}", "(added is None) == (gains is None)")

mix_streams = Operation(
    "mix_streams", _mix_streams_triton, mix_streams_torch,
    "x: real[M, S, D]; weights: float32[M, R, S]; added: real[M, D]?; gains: float32[M, R]?",
    where=_WHERE,
)  # fmt: skip
"""Mix streams, and add to each of them a share of one more vector.

Args:
    x: (M, n, D) float32 or bfloat16, any strides, as all others; n is one of `STREAMS`.
    weights: (M, R, n) float32; R is one of `STREAMS`.
    added: (M, D) in the dtype of x; None is nothing.
    gains: (M, R) float32, the factor of `added` in each stream.

Returns:
    (M, R, D) in the dtype of x, contiguous; computed in float32 and rounded once.
"""
mix_streams_backward = Operation(
    "mix_streams_backward", _mix_streams_backward_triton, _mix_streams_backward_torch,
    "grad_y: real[M, R, D]; x: real[M, S, D]; weights: float32[M, R, S]; added: real[M, D]?; "
    "gains: float32[M, R]?",
    where=_WHERE,
)  # fmt: skip
"""Propagate a gradient back through `mix_streams`, in one pass.

Args:
    grad_y: (M, R, D) in the dtype of x, any strides.
    x: as in `mix_streams`.
    weights: likewise.
    added: likewise.
    gains: likewise.

Returns:
    Gradients of x, like it, and of weights, float32; and of `added`, like it, and of `gains`,
    float32, where there are any.
"""
