"""Cross-entropy of logits, a row at a time: loss[m] = logsumexp(x[m]) - x[m, target[m]], in nats.

The backward is (softmax(x[m]) - onehot(target[m])) times the gradient of the row's loss. It is
recomputed from the logits, so probabilities are not saved.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton


def _cross_entropy_torch(logits: Tensor, targets: Tensor) -> Tensor:
    loss = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for rows in row_chunks(logits):
        loss[rows] = functional.cross_entropy(logits[rows].float(), targets[rows], reduction="none")
    return loss


def _cross_entropy_backward_torch(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    scale = scale / max(len(logits), 1)
    for rows in row_chunks(logits):
        shares = torch.softmax(logits[rows].float(), dim=1)
        less = torch.full_like(shares[:, :1], -1.0)
        grad[rows] = shares.scatter_add_(1, targets[rows, None], less).mul_(scale)
    return grad


@triton.jit
def _softmax_parts(
    logits_ptr, targets_ptr, M, V, stride_m, stride_v, stride_t,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Load rows of logits, subtract each row's maximum, and sum the exponentials.

    Returns:
        Indices of rows, which of them there are, and columns; differences, their sums, and targets.
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_v = tl.arange(0, BLOCK_V)
    inside = offs_m < M
    row = tl.minimum(offs_m, M - 1)[:, None]  # beyond the end, the last row, which is not stored
    mask = (offs_v < V)[None, :]
    ptrs = logits_ptr + row * stride_m + offs_v[None, :] * stride_v
    x = tl.load(ptrs, mask=mask, other=float("-inf")).to(tl.float32)
    x -= tl.max(x, axis=1)[:, None]
    total = tl.sum(tl.exp(x), axis=1)
    target = tl.load(targets_ptr + offs_m * stride_t, mask=inside, other=0)
    return offs_m, inside, offs_v, x, total, target


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, targets_ptr, loss_ptr,
    M, V,
    stride_m, stride_v, stride_t,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_m, inside, offs_v, x, total, target = _softmax_parts(
        logits_ptr, targets_ptr, M, V, stride_m, stride_v, stride_t, BLOCK_M, BLOCK_V
    )
    target_logit = tl.sum(tl.where(offs_v[None, :] == target[:, None], x, 0.0), axis=1)
    tl.store(loss_ptr + offs_m, tl.log(total) - target_logit, mask=inside)


@triton.jit
def _cross_entropy_backward_kernel(
    logits_ptr, targets_ptr, scale_ptr, grad_ptr,
    share, M, V,
    stride_m, stride_v, stride_t,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_m, inside, offs_v, x, total, target = _softmax_parts(
        logits_ptr, targets_ptr, M, V, stride_m, stride_v, stride_t, BLOCK_M, BLOCK_V
    )
    is_target = (offs_v[None, :] == target[:, None]).to(tl.float32)
    grad = (tl.exp(x) / total[:, None] - is_target) * (tl.load(scale_ptr) * share)
    grad_ptrs = grad_ptr + offs_m[:, None] * V + offs_v[None, :]
    mask = inside[:, None] & (offs_v < V)[None, :]
    tl.store(grad_ptrs, grad.to(grad_ptr.dtype.element_ty), mask=mask)


def _tile(rows: int, classes: int) -> tuple[tuple[int], dict[str, int]]:
    block_v = triton.next_power_of_2(classes)
    block_m = max(1, 2048 // block_v)
    return (triton.cdiv(rows, block_m),), {"BLOCK_M": block_m, "BLOCK_V": block_v}


def _cross_entropy_triton(logits: Tensor, targets: Tensor) -> Tensor:
    loss = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        grid, tile = _tile(*logits.shape)
        _cross_entropy_kernel[grid](
            logits, targets, loss, *logits.shape, *logits.stride(), *targets.stride(), **tile
        )
    return loss


def _cross_entropy_backward_triton(logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if len(logits):
        grid, tile = _tile(*logits.shape)
        _cross_entropy_backward_kernel[grid](
            logits, targets, scale, grad, 1 / len(logits), *logits.shape, *logits.stride(),
            *targets.stride(), **tile,
        )  # fmt: skip
    return grad


_WHERE = ("0 < V <= 4096",)

cross_entropy = Operation(
    "cross_entropy", _cross_entropy_triton, _cross_entropy_torch,
    "logits: real[M, V]; targets: int64[M]",
    where=_WHERE,
)  # fmt: skip
"""Compute the cross-entropy of every row, in nats.

Args:
    logits: (M, V) float32 or bfloat16, V at most 4096, any strides.
    targets: (M,) int64 in 0..V-1.

Returns:
    (M,) float32.
"""
cross_entropy_backward = Operation(
    "cross_entropy_backward", _cross_entropy_backward_triton, _cross_entropy_backward_torch,
    "logits: real[M, V]; targets: int64[M]; scale: float32[]",
    where=_WHERE,
)  # fmt: skip
"""Compute the gradient of `scale` times the mean of `cross_entropy`.

Args:
    logits: as in `cross_entropy`.
    targets: likewise.
    scale: float32 scalar tensor.

Returns:
    (M, V) in the dtype of `logits`, contiguous.
"""
