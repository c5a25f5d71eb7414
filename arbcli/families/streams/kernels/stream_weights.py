"""The weights that hyper-connections mix n streams by, from n (n + 2) numbers of each position.

With z = raw + bias, of which the first n are z_a, the next n z_c, and the others the rows of z_B:

    a = sigmoid(z_a),   c = 2 sigmoid(z_c - 2),   B = exp(z_B) after some rounds

A round divides every row by its sum, then every column by its sum (Sinkhorn and Knopp). Where z_B
is far from even, they leave rows of other sums than 1. So rows above 1 are divided by their sums
once more, and the deficits e of rows and f of columns are filled up by e f.T / (sum(e) + SLACK). No
weight is negative then, and all sums are 1 within SLACK, for any z_B; those beyond LIMIT are cut.

Source: Z. Xie et al., "mHC: Manifold-Constrained Hyper-Connections",
https://arxiv.org/abs/2512.24880; J. Altschuler et al., "Near-linear time approximation algorithms
for optimal transport via Sinkhorn iteration", https://arxiv.org/abs/1705.09634, algorithm 2.
"""

import math

import torch
from torch import Tensor

from arbcli.kernels.norm.gated_rms_norm import sigmoid
from arbcli.kernels.runtime.operation import Operation, tl, triton

ROUNDS = 20
SHIFT = 2.0
"""Value of z_c at which c is 1."""
LIMIT = 16.0
STREAMS = (1, 2, 4, 8)
SLACK = 2.0**-21
"""Bound above the rounding errors of sums, whose quotients are meaningless."""

_SHIFT, _LIMIT, _SLACK = tl.constexpr(SHIFT), tl.constexpr(LIMIT), tl.constexpr(SLACK)


def count_streams(numbers: int) -> int:
    """Compute n from the length n (n + 2)."""
    return math.isqrt(numbers + 1) - 1


def stream_weights_torch(
    raw: Tensor, bias: Tensor, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `stream_weights` with differentiable torch operations in float32."""
    n = count_streams(raw.shape[1])
    a, c, square = (raw.float() + bias.float()).split((n, n, n * n), dim=1)
    square = square.clamp(-LIMIT, LIMIT)
    p = torch.exp(square - square.amax(dim=1, keepdim=True)).unflatten(1, (n, n))
    for _ in range(rounds):
        p = p / p.sum(dim=2, keepdim=True)
        p = p / p.sum(dim=1, keepdim=True)
    p = p / p.sum(dim=2, keepdim=True).clamp(min=1)
    row_lacks, column_lacks = ((1 - p.sum(dim, keepdim=True)).clamp(min=0) for dim in (2, 1))
    b = p + row_lacks * column_lacks / (row_lacks.sum(dim=1, keepdim=True) + SLACK)
    return torch.sigmoid(a), b, 2 * torch.sigmoid(c - SHIFT)


def _stream_weights_backward_torch(
    grad_a: Tensor, grad_b: Tensor, grad_c: Tensor, raw: Tensor, bias: Tensor, rounds: int = ROUNDS
) -> Tensor:
    with torch.enable_grad():
        z = (raw.float() + bias).detach().requires_grad_()
        weights = stream_weights_torch(z, torch.zeros_like(bias), rounds)
    return torch.autograd.grad(weights, z, (grad_a, grad_b, grad_c))[0]


@triton.jit
def _load_square(raw_ptr, bias_ptr, offs_m, M, stride_rm, N: tl.constexpr):
    """Load z_B of some positions, [BLOCK_M, N, N], and where it is within the limit."""
    i = tl.arange(0, N)
    offsets = 2 * N + i[None, :, None] * N + i[None, None, :]
    mask = (offs_m < M)[:, None, None]
    z = tl.load(raw_ptr + offs_m[:, None, None] * stride_rm + offsets, mask=mask, other=0)
    z = z.to(tl.float32) + tl.load(bias_ptr + offsets)
    # NaN stays NaN
    bounded = tl.where(z > _LIMIT, _LIMIT, tl.where(z < -_LIMIT, -_LIMIT, z))
    return bounded, z == bounded


@triton.jit
def _begin(z):
    return tl.exp(z - tl.max(tl.max(z, axis=2), axis=1)[:, None, None])


@triton.jit
def _several_rounds(p, rounds):
    for _ in range(rounds):
        p = p / tl.sum(p, axis=2)[:, :, None]
        p = p / tl.sum(p, axis=1)[:, None, :]
    return p


@triton.jit
def _back_through(g, first, rounds):
    """Propagate the gradient of the result of `rounds` rounds to `first`, last round first."""
    for done in range(rounds):
        p = _several_rounds(first, rounds - 1 - done)
        row_sums = tl.sum(p, axis=2)[:, :, None]
        p = p / row_sums
        column_sums = tl.sum(p, axis=1)[:, None, :]
        g = (g - tl.sum(g * p / column_sums, axis=1)[:, None, :]) / column_sums
        g = (g - tl.sum(g * p, axis=2)[:, :, None]) / row_sums
    return g


@triton.jit
def _lacking(p):
    """Compute the deficits of rows and columns, [BLOCK_M, N] each, and the divisor."""
    row_lacks = tl.maximum(1 - tl.sum(p, axis=2), 0)
    column_lacks = tl.maximum(1 - tl.sum(p, axis=1), 0)
    return row_lacks, column_lacks, tl.sum(row_lacks, axis=1) + _SLACK


@triton.jit
def _stream_weights_kernel(
    raw_ptr, bias_ptr, a_ptr, b_ptr, c_ptr,
    M, rounds, stride_rm,
    N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, N)[None, :]
    rows, mask = offs_m[:, None], (offs_m < M)[:, None]
    raw_ptrs = raw_ptr + rows * stride_rm + i
    a = tl.load(raw_ptrs, mask=mask, other=0).to(tl.float32) + tl.load(bias_ptr + i)
    tl.store(a_ptr + rows * N + i, sigmoid(a), mask=mask)
    c = tl.load(raw_ptrs + N, mask=mask, other=0).to(tl.float32) + tl.load(bias_ptr + N + i)
    tl.store(c_ptr + rows * N + i, 2 * sigmoid(c - _SHIFT), mask=mask)
    z, _ = _load_square(raw_ptr, bias_ptr, offs_m, M, stride_rm, N)
    p = _several_rounds(_begin(z), rounds)
    p = p / tl.maximum(tl.sum(p, axis=2), 1)[:, :, None]
    row_lacks, column_lacks, lacking = _lacking(p)
    b = p + row_lacks[:, :, None] * (column_lacks / lacking[:, None])[:, None, :]
    i = tl.arange(0, N)
    offsets = offs_m[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
    tl.store(b_ptr + offsets, b, mask=(offs_m < M)[:, None, None])


@triton.jit
def _stream_weights_backward_kernel(
    grad_a_ptr, grad_b_ptr, grad_c_ptr, raw_ptr, bias_ptr, grad_ptr,
    M, rounds, stride_rm,
    N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    # a and c: backward of the sigmoids
    i = tl.arange(0, N)[None, :]
    rows, mask = offs_m[:, None], (offs_m < M)[:, None]
    raw_ptrs, grad_ptrs = raw_ptr + rows * stride_rm + i, grad_ptr + rows * (N * N + 2 * N) + i
    a = sigmoid(tl.load(raw_ptrs, mask=mask, other=0).to(tl.float32) + tl.load(bias_ptr + i))
    grad = tl.load(grad_a_ptr + rows * N + i, mask=mask, other=0)
    tl.store(grad_ptrs, grad * a * (1 - a), mask=mask)
    c = tl.load(raw_ptrs + N, mask=mask, other=0).to(tl.float32) + tl.load(bias_ptr + N + i)
    c = sigmoid(c - _SHIFT)
    grad = tl.load(grad_c_ptr + rows * N + i, mask=mask, other=0)
    tl.store(grad_ptrs + N, grad * 2 * c * (1 - c), mask=mask)
    # B: gradient of the result, and the matrix before any round
    i = tl.arange(0, N)
    offsets, mask3 = i[None, :, None] * N + i[None, None, :], (offs_m < M)[:, None, None]
    g = tl.load(grad_b_ptr + offs_m[:, None, None] * (N * N) + offsets, mask=mask3, other=0)
    z, inside = _load_square(raw_ptr, bias_ptr, offs_m, M, stride_rm, N)
    first = _begin(z)
    # what rounds make is made again, from the nearest of these on: to keep all takes more room
    quarter = rounds // 4
    second = _several_rounds(first, quarter)
    third = _several_rounds(second, quarter)
    fourth = _several_rounds(third, quarter)
    p = _several_rounds(fourth, rounds - 3 * quarter)
    # forward of the last two stages: rows above 1, and deficits
    sums = tl.maximum(tl.sum(p, axis=2), 1)[:, :, None]
    above = tl.sum(p, axis=2)[:, :, None] > 1
    p = p / sums
    row_lacks, column_lacks, lacking = _lacking(p)
    share = column_lacks / lacking[:, None]
    # backward of filling up the deficits, by row and by column
    grad_rows = tl.sum(g * share[:, None, :], axis=2)  # [BLOCK_M, N], of what rows lack
    grad_total = tl.sum(grad_rows * row_lacks, axis=1) / lacking
    grad_rows = tl.where(row_lacks > 0, grad_rows - grad_total[:, None], 0)
    grad_columns = tl.sum(g * (row_lacks / lacking[:, None])[:, :, None], axis=1)
    grad_columns = tl.where(column_lacks > 0, grad_columns, 0)
    g = g - grad_rows[:, :, None] - grad_columns[:, None, :]
    # backward of dividing rows above 1
    g = tl.where(above, (g - tl.sum(g * p, axis=2)[:, :, None]) / sums, g)
    # backward of the rounds, then of exp and the limit
    g = _back_through(g, fourth, rounds - 3 * quarter)
    g = _back_through(g, third, quarter)
    g = _back_through(g, second, quarter)
    g = _back_through(g, first, quarter)
    g = tl.where(inside, g * first, 0)
    grad_ptrs = grad_ptr + offs_m[:, None, None] * (N * N + 2 * N) + 2 * N + offsets
    tl.store(grad_ptrs, g, mask=mask3)


def _stream_weights_triton(
    raw: Tensor, bias: Tensor, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor]:
    length, n = len(raw), count_streams(raw.shape[1])
    a, b, c = (
        torch.empty(length, *size, dtype=torch.float32, device=raw.device)
        for size in ((n,), (n, n), (n,))
    )
    if length:
        raw, grid, tile = _launch(raw, n)
        _stream_weights_kernel[grid](raw, bias, a, b, c, length, rounds, raw.stride(0), **tile)
    return a, b, c


def _stream_weights_backward_triton(
    grad_a: Tensor, grad_b: Tensor, grad_c: Tensor, raw: Tensor, bias: Tensor, rounds: int = ROUNDS
) -> Tensor:
    grad = torch.empty(raw.shape, dtype=torch.float32, device=raw.device)
    if len(raw):
        raw, grid, tile = _launch(raw, count_streams(raw.shape[1]))
        grads = (part.contiguous() for part in (grad_a, grad_b, grad_c))
        _stream_weights_backward_kernel[grid](
            *grads, raw, bias, grad, len(raw), rounds, raw.stride(0), **tile
        )
    return grad


def _launch(raw: Tensor, n: int) -> tuple[Tensor, tuple[int], dict[str, int]]:
    """Lay rows out densely, and choose programs of 128 weights of B a warp."""
    block = max(1, min(256 // (n * n), triton.next_power_of_2(len(raw))))
    raw = raw if raw.stride(1) == 1 else raw.contiguous()
    return raw, (triton.cdiv(len(raw), block),), {"N": n, "BLOCK_M": block, "num_warps": 2}


stream_weights = Operation(
    "stream_weights", _stream_weights_triton, stream_weights_torch,
    "raw: real[M, W]; bias: float32[W] dense; rounds",
    where=(f"W in {tuple(n * (n + 2) for n in STREAMS)}", "rounds > 0"),
)  # fmt: skip
"""Compute the weights with which streams are read, mixed and written.

Args:
    raw: (M, n (n + 2)) float32 or bfloat16, any strides; n is one of `STREAMS`.
    bias: (n (n + 2),) float32, contiguous.
    rounds: 1 or more, of dividing rows and columns by their sums.

Returns:
    float32, contiguous: a, (M, n) in 0..1; B, (M, n, n) in 0..1, whose rows and columns sum to
    1; and c, (M, n) in 0..2.
"""
stream_weights_backward = Operation(
    "stream_weights_backward", _stream_weights_backward_triton, _stream_weights_backward_torch,
    "grad_a: float32[M, S]; grad_b: float32[M, S, S]; grad_c: float32[M, S]; "
    "raw: real[M, S * (S + 2)]; bias: float32[S * (S + 2)] dense; rounds",
    where=(f"S in {STREAMS}", "rounds > 0"),
)  # fmt: skip
"""Propagate gradients back through `stream_weights`, through all rounds.

Args:
    grad_a: (M, n) float32.
    grad_b: (M, n, n) float32.
    grad_c: (M, n) float32.
    raw: as in `stream_weights`.
    bias: likewise.
    rounds: likewise.

Returns:
    (M, n (n + 2)) float32: the gradient of raw, whose sum over positions is that of bias.
"""
