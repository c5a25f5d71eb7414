"""Nearest-neighbour search in a codebook: argmin over v of |q[m] - codes[v]|**2, lowest v of ties.

Vectors and codes are int8, so products and distances are integers below 2**31, and the result is
the same on every device. |q|**2 is the same for all codes, so a program maximises 2 q.c - |c|**2, a
block of codes at a time. No M x V tensor is stored: each program keeps its best code, and a final
step reduces over the programs of a row. The native loop reads the codes once, 16 at a time for all
vectors, and multiplies bytes; the torch backend converts all codes to floats. On one core of a CPU
with VNNI the loop takes 17 ms for one vector and 131,072 codes of width 1,024, and torch 256 ms.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import num_processors
from arbcli.kernels.runtime.operation import Operation, tl, triton

MAX_WIDTH = 2**15
"""Maximum width of vectors; 3 * 128**2 * width is below 2**31."""
EXACT_IN_FLOAT32 = 1024
"""Maximum width at which sums of products are exact in float32, at most 2**24."""
CHUNK_ELEMENTS = 2**22
"""Number of products that the torch backend computes at a time."""
INDEX_BITS = 32


def _best(scores: Tensor, indices: Tensor) -> Tensor:
    """Return the index of the largest score of each row, (M,); ties go to the lowest index.

    Args:
        scores: (M, n) int32 or int64.
        indices: (M, n) int32 or int64, below 2**31; or (n,).
    """
    keys = (scores.long() << INDEX_BITS) - indices
    return -keys.amax(dim=1) & ((1 << INDEX_BITS) - 1)


def _nearest_codes_torch(q: Tensor, codes: Tensor) -> Tensor:
    if not len(q):
        return torch.empty(0, dtype=torch.int64, device=q.device)
    is_exact = q.device.type == "cpu" and q.shape[1] <= EXACT_IN_FLOAT32
    dtype = torch.float32 if is_exact else torch.float64
    vectors, scores, indices = q.to(dtype), [], []
    size = max(1, CHUNK_ELEMENTS // max(len(q), q.shape[1]))
    for first in range(0, len(codes), size):
        chunk = codes[first : first + size].to(dtype)
        norms = chunk.square().sum(dim=1).to(torch.int64)
        score = 2 * (vectors @ chunk.T).to(torch.int64) - norms
        chunk_indices = torch.arange(first, first + len(chunk), device=q.device)
        indices.append(_best(score, chunk_indices))
        scores.append(score.gather(1, (indices[-1] - first)[:, None])[:, 0])
    return _best(torch.stack(scores, dim=1), torch.stack(indices, dim=1))


def _nearest_codes_native(q: Tensor, codes: Tensor) -> Tensor:
    (rows, width), number = q.shape, len(codes)
    threads = native.threads_for(len(codes) * width * rows)
    best = torch.empty(threads, rows, dtype=torch.int32, device=q.device)
    indices = torch.empty(threads, rows, dtype=torch.int64, device=q.device)
    native.call("nearest_codes", q ^ -128, codes, best, indices, rows, number, width, threads)
    return indices[0]


@triton.jit
def _norms_kernel(codes_ptr, norms_ptr, V, D, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr):
    v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_V,), tl.int32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        c_ptrs = codes_ptr + v[:, None] * D + d[None, :]
        c = tl.load(c_ptrs, mask=(v < V)[:, None] & (d < D)[None, :], other=0).to(tl.int32)
        total += tl.sum(c * c, axis=1)
    tl.store(norms_ptr + v, total, mask=v < V)


@triton.jit
def _nearest_codes_kernel(
    q_ptr, codes_ptr, norms_ptr, score_ptr, index_ptr,
    M, V, D, TILES, SHARE,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0) % TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(0) // TILES
    begin = part * SHARE
    best = tl.full((BLOCK_M,), -(2**31), tl.int32)
    index = tl.full((BLOCK_M,), 0, tl.int32) + begin
    for first in range(begin, tl.minimum(begin + SHARE, V), BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        products = tl.zeros((BLOCK_M, BLOCK_V), tl.int32)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            q_ptrs = q_ptr + m[:, None] * D + d[None, :]
            q = tl.load(q_ptrs, mask=(m < M)[:, None] & (d < D)[None, :], other=0)
            c_ptrs = codes_ptr + v.to(tl.int64)[:, None] * D + d[None, :]
            c = tl.load(c_ptrs, mask=(v < V)[:, None] & (d < D)[None, :], other=0)
            products = tl.dot(q, c.T, products, out_dtype=tl.int32)
        norms = tl.load(norms_ptr + v, mask=v < V, other=0)
        scores = tl.where((v < V)[None, :], 2 * products - norms[None, :], -(2**31))
        block_best = tl.max(scores, axis=1)
        block_index = tl.argmax(scores, axis=1, tie_break_left=True)
        index = tl.where(block_best > best, first + block_index, index)  # ties go to the first
        best = tl.maximum(best, block_best)
    row = part.to(tl.int64) * M + m
    tl.store(score_ptr + row, best, mask=m < M)
    tl.store(index_ptr + row, index, mask=m < M)


def _nearest_codes_triton(q: Tensor, codes: Tensor) -> Tensor:
    (rows, width), number = q.shape, len(codes)
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=q.device)
    norms = torch.empty(number, dtype=torch.int32, device=q.device)
    _norms_kernel[(triton.cdiv(number, 32),)](codes, norms, number, width, BLOCK_V=32, BLOCK_D=64)
    block_m = 128 if rows > 64 else max(16, triton.next_power_of_2(rows))
    block_v = 128 if number > 64 else max(16, triton.next_power_of_2(number))
    tiles = triton.cdiv(rows, block_m)
    shares = min(triton.cdiv(number, block_v), max(1, 4 * num_processors(q) // tiles))
    share = block_v * triton.cdiv(triton.cdiv(number, shares), block_v)
    shares = triton.cdiv(number, share)
    scores, indices = torch.empty(2, shares, rows, dtype=torch.int32, device=q.device)
    _nearest_codes_kernel[(tiles * shares,)](
        q, codes, norms, scores, indices, rows, number, width, tiles, share,
        BLOCK_M=block_m, BLOCK_V=block_v, BLOCK_D=64, num_warps=8 if block_m == 128 else 4,
        num_stages=3,
    )  # fmt: skip
    return _best(scores.T, indices.T)


nearest_codes = Operation(
    "nearest_codes", _nearest_codes_triton, _nearest_codes_torch,
    "q: int8[M, D] dense; codes: int8[V, D] dense",
    native=_nearest_codes_native, where=("V > 0", f"0 < D <= {MAX_WIDTH}", "V < 2**31"),
)  # fmt: skip
"""Return the nearest code of each vector by the sum of squared differences.

Args:
    q: (M, D) int8, contiguous; D is at most 2**15.
    codes: (V, D) int8, contiguous; V is above 0.

Returns:
    (M,) int64 in 0..V-1; the first of several codes at the same distance.
"""
