"""Quantise a gradient to small integers that can be added in any order: q <- q + SR(y / 2**e[n]).

y is the gradient with its columns mixed by Hadamard matrices: see `hadamard`. Each row has a power
of two, which the caller chooses before the gradient is computed. With x = |y| / 2**e[n], clipped to
`limit`,

    q = sign(y) * floor(x + r / 2**16),  r uniform in 0..65535

which is unbiased unless x is clipped. Integers add up to the same sum in every order, so a
gradient of many parts does not depend on the order of adding.

Sums of twelve bits are in two planes: 16 * sums + low, with the `low` of two rows in a byte, that
of the even row in its low half.

Next to the sums stands for each row the power of two that would have fitted: of the largest y,
e = floor(log2 |y|) + 1 - bits, so that |y| / 2**e is below 2**bits, where `limit` has so many bits.
A row of zeros has `NONE`, and one that is not finite `NOT_FINITE`.
"""

import torch
from torch import Tensor

from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.operation import Operation, tl, triton
from arbcli.kernels.update.hadamard import BLOCK_FITS, column_signs, mix_blocks, mixed
from arbcli.kernels.update.random_bits import random_halves, random_words

NONE = -128
"""The exponent of a row that has had no gradient; its quotients are 0."""
NOT_FINITE = 127
"""Stands for the exponent of a row that is not finite; its elements that are not count as 0."""
LOWEST, HIGHEST = -100, 100
"""Range of exponents of rows."""
MAX_PLANE_SUM = 2047
"""Largest magnitude of twelve-bit sums."""


def fitting_exponents(largest: Tensor, limit: int) -> Tensor:
    """Compute the exponents of rows from their largest magnitudes.

    Args:
        largest: float32 of any shape, infinite or NaN where a row is not finite.
        limit: maximum of the quotients.

    Returns:
        int8 of the shape of `largest`, within `LOWEST` and `HIGHEST`, or `NONE` or `NOT_FINITE`.
    """
    field = largest.view(torch.int32) >> 23
    e = (field - 126 - limit.bit_length()).clamp(LOWEST, HIGHEST)
    e = torch.where(field == 0, NONE, e)
    return torch.where(field == 255, NOT_FINITE, e).to(torch.int8)


def _quantise_gradient_torch(
    grad: Tensor, exponent: Tensor, key: Tensor, sums: Tensor, low: Tensor | None, fitting: Tensor,
    limit: int, block: int, add: bool,
) -> None:  # fmt: skip
    columns = torch.arange(grad.shape[1], dtype=torch.int32, device=grad.device)
    inverse = ((127 - exponent.int()) << 23).view(torch.float32)
    inverse = torch.where(exponent == NONE, 0.0, inverse)[:, None]
    for rows in row_chunks(grad):
        values = mixed(grad[rows].float(), block)
        size = values.abs()
        largest = size.view(torch.int32).amax(dim=1).view(torch.float32)
        exponents = fitting_exponents(largest, limit)
        fitting[rows] = torch.maximum(fitting[rows], exponents) if add else exponents
        size = torch.where(size < torch.inf, size * inverse[rows], 0).clamp_(max=limit)
        whole = size.floor()
        part = (size - whole).mul_(65536).to(torch.int32)
        part += random_halves(key, rows, columns)
        q = whole.to(torch.int32).add_(part.bitwise_right_shift_(16)).clamp_(max=limit)
        q *= torch.sign(values).nan_to_num_(0).to(torch.int32)
        pairs = None if low is None else low[rows.start // 2 : (rows.stop + 1) // 2]
        if add:
            q += together(sums[rows], pairs)
        if pairs is not None:
            bits = q.bitwise_and(15).to(torch.uint8)
            pairs.copy_(bits[::2])
            pairs[: len(bits) // 2].bitwise_or_(bits[1::2] << 4)
            q.bitwise_right_shift_(4)
        sums[rows] = q.to(sums.dtype)


def together(sums: Tensor, low: Tensor | None) -> Tensor:
    """Combine the planes of sums.

    Args:
        sums: (..., N, K) integers.
        low: (..., (N + 1) // 2, K) uint8, or None.

    Returns:
        (..., N, K) int32.
    """
    if low is None:
        return sums.to(torch.int32)
    bits = torch.stack([low & 15, low >> 4], dim=-2).flatten(-3, -2)
    return sums.to(torch.int32).mul_(16).add_(bits[..., : sums.shape[-2], :])


@triton.jit
def _quantised(
    n, mask, e, random, grad_ptr, k, signs, stride_gn, stride_gk,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Quantise a tile whose rows have the exponents `e`; find also the largest of each row."""
    grad = tl.load(grad_ptr + n * stride_gn + k * stride_gk, mask=mask, other=0).to(tl.float32)
    if STAGES > 0:
        grad = mix_blocks(grad * signs, BLOCK, STAGES)
    bits = tl.abs(grad).to(tl.int32, bitcast=True)  # compare like the numbers
    inverse = ((127 - e) << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(e == -128, 0.0, inverse)[:, None]
    size = tl.where(bits < 0x7F800000, tl.abs(grad) * inverse, 0.0)
    size = tl.minimum(size, LIMIT * 1.0)
    whole = size.to(tl.int32)
    part = ((size - whole.to(tl.float32)) * 65536.0).to(tl.int32)
    part += (random & 0xFFFF).to(tl.int32)
    q = tl.minimum(whole + (part >> 16), LIMIT)
    return tl.where(grad < 0, -q, q), tl.max(bits, axis=1)


@triton.jit
def _store_fitting(fitting_ptr, n, N, largest, BITS: tl.constexpr, ADD: tl.constexpr):
    """Store what exponents would have fitted rows with these largest values."""
    field = largest >> 23
    fits = tl.minimum(tl.maximum(field - 126 - BITS, -100), 100)
    fits = tl.where(field == 0, -128, tl.where(field == 255, 127, fits))
    if ADD:
        before = tl.load(fitting_ptr + n, mask=n < N, other=-128).to(tl.int32)
        fits = tl.maximum(fits, before)
    tl.store(fitting_ptr + n, fits.to(tl.int8), mask=n < N)


@triton.jit
def _quantise_gradient_kernel(
    grad_ptr, exponent_ptr, key_ptr, sums_ptr, low_ptr, fitting_ptr,
    N, K, stride_gn, stride_gk, stride_sn, stride_ln,
    LIMIT: tl.constexpr, BITS: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantise whole rows, `BLOCK_P` pairs of them."""
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    key = tl.load(key_ptr)
    n0, n1 = 2 * pair, 2 * pair + 1
    # exponents of both rows of a pair; one word of random bits serves both
    e0 = tl.load(exponent_ptr + n0, mask=n0 < N, other=-128).to(tl.int32)
    e1 = tl.load(exponent_ptr + n1, mask=n1 < N, other=-128).to(tl.int32)
    largest0 = tl.zeros((BLOCK_P,), dtype=tl.int32)
    largest1 = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        words = random_words(key, pair[:, None], k)
        mask0, mask1 = (n0 < N)[:, None] & (k < K), (n1 < N)[:, None] & (k < K)
        signs = column_signs(k).to(tl.float32)
        shared = (grad_ptr, k, signs, stride_gn, stride_gk)
        # mix the columns, scale, round stochastically; largest magnitude of each row
        q0, found0 = _quantised(n0[:, None], mask0, e0, words, *shared, LIMIT, BLOCK, STAGES)
        q1, found1 = _quantised(n1[:, None], mask1, e1, words >> 16, *shared, LIMIT, BLOCK, STAGES)
        largest0, largest1 = tl.maximum(largest0, found0), tl.maximum(largest1, found1)
        sums0 = sums_ptr + n0[:, None] * stride_sn + k
        sums1 = sums_ptr + n1[:, None] * stride_sn + k
        # add the sums so far, of eight bits or, with `low_ptr`, of twelve
        if ADD:
            before0 = tl.load(sums0, mask=mask0, other=0).to(tl.int32)
            before1 = tl.load(sums1, mask=mask1, other=0).to(tl.int32)
            if low_ptr is None:
                q0, q1 = q0 + before0, q1 + before1
            else:
                bits = tl.load(low_ptr + pair[:, None] * stride_ln + k, mask=mask0, other=0)
                q0 += before0 * 16 + (bits.to(tl.int32) & 15)
                q1 += before1 * 16 + (bits.to(tl.int32) >> 4)
        # split sums of twelve bits: lower four of both rows to a byte
        if low_ptr is not None:
            bits = (q0 & 15) | ((q1 & 15) << 4)
            tl.store(low_ptr + pair[:, None] * stride_ln + k, bits.to(tl.uint8), mask=mask0)
            q0, q1 = q0 >> 4, q1 >> 4
        tl.store(sums0, q0.to(sums_ptr.dtype.element_ty), mask=mask0)
        tl.store(sums1, q1.to(sums_ptr.dtype.element_ty), mask=mask1)
    _store_fitting(fitting_ptr, n0, N, largest0, BITS, ADD)
    _store_fitting(fitting_ptr, n1, N, largest1, BITS, ADD)


def _quantise_gradient_triton(
    grad: Tensor, exponent: Tensor, key: Tensor, sums: Tensor, low: Tensor | None, fitting: Tensor,
    limit: int, block: int, add: bool,
) -> None:  # fmt: skip
    rows, columns = grad.shape
    if grad.numel():
        block_k = min(512, triton.next_power_of_2(columns))
        block_p = max(1, 256 // block_k)
        _quantise_gradient_kernel[(triton.cdiv(rows, 2 * block_p),)](
            grad, exponent, key, sums, low, fitting,
            rows, columns, *grad.stride(), sums.stride(0), 0 if low is None else low.stride(0),
            LIMIT=limit, BITS=limit.bit_length(), ADD=add,
            BLOCK=block, STAGES=block.bit_length() - 1, BLOCK_P=block_p, BLOCK_K=block_k,
            enable_fp_fusion=False, num_warps=4 if block_k > 128 else 2,
        )  # fmt: skip


SUMS = (torch.int8, torch.int16, torch.int32)
_MOST = f"torch.iinfo(sums.dtype).max if low is None else {MAX_PLANE_SUM}"

quantise_gradient = Operation(
    "quantise_gradient", _quantise_gradient_triton, _quantise_gradient_torch,
    "grad: real[N, K]; exponent: int8[N] dense; key: int32[]; sums: int8|int16|int32[N, K] rows; "
    "low: uint8[(N + 1) // 2, K]? rows; fitting: int8[N] dense; limit; block; add",
    where=(
        "low is None or sums.dtype == torch.int8", f"0 < limit <= min(32767, {_MOST})", BLOCK_FITS
    ),
)  # fmt: skip
"""Quantise a gradient, and add it to integers or write it over them, in place.

Args:
    grad: (N, K) float32 or bfloat16, any strides.
    exponent: (N,) int8, e of each row, within `LOWEST` and `HIGHEST`, or `NONE`; contiguous.
    key: int32 scalar tensor, from `stream_keys`.
    sums: (N, K) int8, int16 or int32, with rows that are contiguous. The caller knows that the
        sums cannot wrap: each part is within -limit..limit.
    low: ((N + 1) // 2, K) uint8, with rows that are contiguous, the last four bits of sums of
        twelve, whose others are in int8 `sums`; None where `sums` have all.
    fitting: (N,) int8, contiguous; set to the exponents that would have fitted, or with `add`
        to the larger of these and its values.
    limit: 1..32767, no more than `sums` and `low` hold.
    block: columns that are mixed, a power of two up to `MAX_BLOCK` that divides K; 1 is
        none.
    add: whether to add to the values in `sums`, `low` and `fitting`.
"""
