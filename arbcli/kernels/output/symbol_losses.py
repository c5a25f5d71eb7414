"""Cross-entropy of a large vocabulary in chunks of symbols, with the logits of one chunk at a time.

Forward, each chunk updates the log-sum-exp of every row. Backward, the logits of a chunk are
recomputed and replaced by their gradient, in place.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton

MAX_SYMBOLS = 4096
"""Maximum number of symbols per chunk; one program holds a chunk of a row."""


def _add_symbols_torch(total: Tensor, target_sums: Tensor, logits: Tensor, targets: Tensor) -> None:
    for rows in row_chunks(logits):
        part, index = logits[rows].float(), targets[rows]
        inside = (index >= 0) & (index < part.shape[1])
        target_logits = part.gather(1, index.clamp(0, part.shape[1] - 1)[:, None])[:, 0]
        target_sums[rows] += torch.where(inside, target_logits, 0)
        highest = part.amax(dim=1)
        sums = (part - highest[:, None]).exp_().sum(dim=1)
        total[rows] = torch.logaddexp(total[rows], sums.log_().add_(highest))


def _grade_symbols_torch(logits: Tensor, targets: Tensor, total: Tensor, scale: Tensor) -> None:
    symbols = torch.arange(logits.shape[1], device=logits.device)
    for rows in row_chunks(logits):
        shares = (logits[rows].float() - total[rows, None]).exp_()
        shares -= (symbols == targets[rows, None]).float()
        logits[rows] = shares.mul_(scale[rows, None])


@triton.jit
def _load_logits(logits_ptr, N, stride_m, stride_n, BLOCK_N: tl.constexpr):
    """Load a program's row: its index, and indices, pointers and values of its logits."""
    m, offs_n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    ptrs = logits_ptr + m * stride_m + offs_n.to(tl.int64) * stride_n
    return m, offs_n, ptrs, tl.load(ptrs, mask=offs_n < N, other=float("-inf")).to(tl.float32)


@triton.jit
def _add_symbols_kernel(
    total_ptr, target_sums_ptr, logits_ptr, targets_ptr,
    N,
    stride_m, stride_n, stride_t,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    m, offs_n, _, x = _load_logits(logits_ptr, N, stride_m, stride_n, BLOCK_N)
    target = tl.load(targets_ptr + m * stride_t)
    before, so_far = tl.load(total_ptr + m), tl.load(target_sums_ptr + m)
    highest = tl.maximum(tl.max(x, axis=0), before)
    total = tl.sum(tl.exp(x - highest), axis=0) + tl.exp(before - highest)
    logit = tl.sum(tl.where((offs_n == target) & (offs_n < N), x, 0.0), axis=0)
    tl.debug_barrier()  # all threads read before any thread writes
    tl.store(total_ptr + m, tl.log(total) + highest)
    tl.store(target_sums_ptr + m, so_far + logit)


@triton.jit
def _grade_symbols_kernel(
    logits_ptr, targets_ptr, total_ptr, scale_ptr,
    N,
    stride_m, stride_n, stride_t,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    m, offs_n, ptrs, x = _load_logits(logits_ptr, N, stride_m, stride_n, BLOCK_N)
    is_target = (offs_n == tl.load(targets_ptr + m * stride_t)).to(tl.float32)
    grad = (tl.exp(x - tl.load(total_ptr + m)) - is_target) * tl.load(scale_ptr + m)
    tl.store(ptrs, grad.to(logits_ptr.dtype.element_ty), mask=offs_n < N)


def _add_symbols_triton(
    total: Tensor, target_sums: Tensor, logits: Tensor, targets: Tensor
) -> None:
    rows, symbols = logits.shape
    if rows:
        _add_symbols_kernel[(rows,)](
            total, target_sums, logits, targets, symbols, *logits.stride(), *targets.stride(),
            BLOCK_N=triton.next_power_of_2(symbols),
        )  # fmt: skip


def _grade_symbols_triton(logits: Tensor, targets: Tensor, total: Tensor, scale: Tensor) -> None:
    rows, symbols = logits.shape
    if rows:
        _grade_symbols_kernel[(rows,)](
            logits, targets, total, scale, symbols, *logits.stride(), *targets.stride(),
            BLOCK_N=triton.next_power_of_2(symbols),
        )  # fmt: skip


_WHERE = (f"0 < V <= {MAX_SYMBOLS}",)

add_symbols_ = Operation(
    "add_symbols", _add_symbols_triton, _add_symbols_torch,
    "total, target_sums: float32[M] dense; logits: real[M, V]; targets: int64[M]",
    where=_WHERE,
)  # fmt: skip
"""Update the log-sum-exp of rows with a chunk of symbols, in place.

Args:
    total: (M,) float32, contiguous: log-sum-exp so far, -inf before the first chunk.
    target_sums: (M,) float32, contiguous; the target's logit is added if it is in the chunk.
    logits: (M, N) float32 or bfloat16, N at most 4096, any strides; finite.
    targets: (M,) int64, relative to the first symbol of the chunk; others are out of range.
"""
grade_symbols_ = Operation(
    "grade_symbols", _grade_symbols_triton, _grade_symbols_torch,
    "logits: real[M, V]; targets: int64[M]; total, scale: float32[M] dense",
    where=_WHERE,
)  # fmt: skip
"""Replace the logits of a chunk by the gradient of the scaled losses, in place.

Args:
    logits: as in `add_symbols_`.
    targets: as in `add_symbols_`.
    total: (M,) float32, contiguous: log-sum-exp over all chunks.
    scale: (M,) float32, contiguous: factor of each row's loss.
"""
