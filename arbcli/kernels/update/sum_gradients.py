"""Sum the quantised gradients of several processes, and invert the Hadamard mixing of columns.

    g[n, k] = 2**e[n] * s[k] / B * (sum over p of q[p] times H)[n, k]

with blocks, s and H as in `hadamard`. The sum is exact in int32, and is rounded once, to the dtype
of the gradient.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT8, UINT8, Array, Number
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.runtime.operation import Case, Operation
from arbcli.kernels.timed import OF_MATRIX, Timed
from arbcli.kernels.update.hadamard import (
    BLOCK_FITS,
    LARGEST_BLOCK,
    block_of,
    column_signs,
    hadamard_matrix,
    mix_blocks,
    mixed_back,
    signs_reference,
)
from arbcli.kernels.update.quantise_gradient import (
    NONE,
    NOT_FINITE,
    SUMS,
    together,
    together_reference,
)


def sum_gradients_reference(
    parts: Tensor, low: Tensor | None, exponent: Tensor, fitting: Tensor, block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Compute the reference result of `sum_gradients`, in int64 and float64."""
    total = together_reference(parts, low).sum(0)
    integer: TensorOptions = {"dtype": torch.int64, "device": parts.device}
    if block > 1:
        mixer = torch.tensor(hadamard_matrix(block), **integer)
        blocks = total.reshape(-1, block, 1) * mixer  # a product of integers, on a GPU too
        signs = torch.tensor(signs_reference(total.shape[1]), **integer)
        total = blocks.sum(1).reshape(total.shape) * signs
    found = total.double() / block * torch.exp2(exponent.double())[:, None]
    found = torch.where((exponent == -128)[:, None], 0, found)
    wrong = (fitting == 127).any(dim=0)[:, None]
    return torch.where(wrong, torch.inf, found).to(dtype)


def _sum_gradients_torch(
    parts: Tensor, low: Tensor | None, exponent: Tensor, fitting: Tensor, block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    grad = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    scale = ((127 + exponent.int()) << 23).view(torch.float32)
    scale = torch.where(exponent == NONE, 0.0, scale / block)
    wrong = (fitting == NOT_FINITE).any(dim=0)[:, None]
    for rows in row_chunks(grad):
        pairs = None if low is None else low[:, rows.start // 2 : (rows.stop + 1) // 2]
        total = together(parts[:, rows], pairs).sum(dim=0, dtype=torch.int32)
        total = mixed_back(total, block).float() * scale[rows, None]
        grad[rows] = total.masked_fill_(wrong[rows], torch.inf)
    return grad


@triton.jit
def _sum_gradients_kernel(
    parts_ptr, low_ptr, exponent_ptr, fitting_ptr, grad_ptr,
    N, K, stride_pp, stride_lp, stride_fp,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, BLOCK_K)
    n = tl.program_id(0).to(tl.int64) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (n < N)[:, None] & (k < K)
    e = tl.load(exponent_ptr + n, mask=n < N, other=-128).to(tl.int32)
    scale = ((127 + e) << 23).to(tl.float32, bitcast=True) * (1.0 / BLOCK)
    scale = tl.where(e == -128, 0.0, scale)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.int32)
    worst = tl.full((BLOCK_N,), -128, dtype=tl.int32)
    for _ in range(PARTS):
        part = tl.load(parts_ptr + n[:, None] * K + k, mask=mask, other=0).to(tl.int32)
        if low_ptr is not None:
            bits = tl.load(low_ptr + n[:, None] // 2 * K + k, mask=mask, other=0).to(tl.int32)
            part = part * 16 + ((bits >> (4 * (n[:, None] % 2)).to(tl.int32)) & 15)
            low_ptr += stride_lp
        total += part
        fits = tl.load(fitting_ptr + n, mask=n < N, other=0)
        parts_ptr += stride_pp
        fitting_ptr += stride_fp
        worst = tl.maximum(worst, fits.to(tl.int32))
    if STAGES > 0:
        total = mix_blocks(total, BLOCK, STAGES) * column_signs(k)
    grad = total.to(tl.float32) * scale[:, None]
    grad = tl.where((worst == 127)[:, None], float("inf"), grad)
    tl.store(grad_ptr + n[:, None] * K + k, grad.to(grad_ptr.dtype.element_ty), mask=mask)


def _sum_gradients_triton(
    parts: Tensor, low: Tensor | None, exponent: Tensor, fitting: Tensor, block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    number, rows, columns = parts.shape
    grad = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if grad.numel():
        block_k = min(512, triton.next_power_of_2(columns))
        block_n = max(1, 1024 // block_k)
        _sum_gradients_kernel[(triton.cdiv(rows, block_n) * triton.cdiv(columns, block_k),)](
            parts, low, exponent, fitting, grad, rows, columns,
            parts.stride(0), 0 if low is None else low.stride(0), fitting.stride(0),
            PARTS=number, BLOCK=block, STAGES=block.bit_length() - 1,
            BLOCK_N=block_n, BLOCK_K=block_k,
        )  # fmt: skip
    return grad


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device, dtype)

    for number, rows, columns, limit, dtype in (
        (1, 1, 1, 127, torch.int8), (2, 3, 33, 63, torch.int8), (4, 17, 523, 31, torch.int8),
        (3, 33, 1, 127, torch.int8), (2, 9, 40, 3000, torch.int16), (2, 5, 640, 2, torch.int8),
        (2, 5, 7, 2**20, torch.int32),
    ):  # fmt: skip
        parts = integers(-limit, limit + 1, number, rows, columns, dtype=dtype)
        exponent, fitting = integers(-100, 100, rows), integers(-9, 0, number, rows)
        inputs, block = (parts, None, exponent, fitting), block_of(columns)
        yield Case(f"{number}x{rows}x{columns} {dtype}", (*inputs, block, torch.float32))
        if limit * number * block <= 256:  # exact in bfloat16
            yield Case(f"{number}x{rows}x{columns} {dtype} bf16", (*inputs, block, torch.bfloat16))
    exponent, fitting = exponent.clone(), fitting.clone()
    exponent[1], fitting[1, 2], fitting[0, 3] = NONE, NOT_FINITE, NOT_FINITE
    yield Case("2x5x7 none and not finite", (parts, None, exponent, fitting, 1, torch.float32))
    for number, rows, columns in ((1, 1, 2), (4, 9, 48), (2, 4, 192)):
        parts = integers(-128, 128, number, rows, columns)
        bits = integers(0, 256, number, (rows + 1) // 2, columns, dtype=torch.uint8)
        scales, fit = integers(-9, 9, rows), integers(-9, 0, number, rows)
        twelve = (parts, bits, scales, fit, block_of(columns), torch.float32)
        yield Case(f"{number}x{rows}x{columns} twelve bits", twelve)
    wide, halves = integers(-31, 32, 4, 8 * 40 + 16), integers(0, 256, 4, 176, dtype=torch.uint8)
    apart = integers(-9, 9, 8), integers(-9, 0, 4, 24)[:, :8]
    wide = wide[:, :320].unflatten(1, (8, 40))
    yield Case("4x8x40 with gaps", (wide, None, *apart, 8, torch.float32))
    halves = halves[:, :160].unflatten(1, (4, 40))
    yield Case("4x8x40 twelve bits with gaps", (wide, halves, *apart, 8, torch.float32))
    yield Case("4x8x40 not mixed", (wide, None, *apart, 1, torch.float32))


def _draw(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    number, dtype = 1 + dice.below(4), dice.pick((torch.int8, torch.int16, torch.int32))
    low = None
    if dtype == torch.int8 and dice.chance(0.5):
        halves = dice.integers(-128, 127, number, (n + 1) // 2 * k + dice.below(3))
        low = halves.contiguous().view(torch.uint8)[:, : (n + 1) // 2 * k]
        low = low.unflatten(1, ((n + 1) // 2, k))
    room = torch.zeros(number, n * k + dice.below(3), dtype=dtype, device=dice.device)
    parts = room[:, : n * k].unflatten(1, (n, k))
    parts.copy_(dice.integers(-127, 127, number, n, k))
    one, each = (dice.integers(-9, 9, *shape).contiguous() for shape in ((n,), (number, n)))
    return parts, low, one, each, block_of(k) if dice.chance(0.9) else 1


sum_gradients = Operation(
    "sum_gradients", _sum_gradients_triton, _sum_gradients_torch, sum_gradients_reference, _cases,
    arguments={
        "parts": Array("P, N, K", SUMS, dense="parts"),
        "low": Array("P, (N + 1) // 2, K", UINT8, dense="parts", optional=True),
        "exponent": Array("N", INT8, dense=True), "fitting": Array("P, N", INT8, dense="parts"),
        "block": Number(()), "dtype": Number(()),
    },
    where=("P > 0", "low is None or parts.dtype == torch.int8", BLOCK_FITS), draw=_draw,
    needs_rows=False,
    timed=[
        Timed(f"{parts} parts of 11264x2048{', 12 bits' * bool(low)}", P=parts, **OF_MATRIX,
              parts=1, low=low, exponent=-4, fitting=-4, block=LARGEST_BLOCK, dtype=torch.bfloat16)
        for parts, low in ((1, None), (4, None), (4, 1))
    ],
)  # fmt: skip
"""Sum the parts of a quantised gradient.

Args:
    parts: (P, N, K) int8, int16 or int32, each part contiguous. B times the largest sum is
        below 2**31.
    low: (P, (N + 1) // 2, K) uint8, each part contiguous, or None: as of `quantise_gradient`.
    exponent: (N,) int8, contiguous: the `exponent` argument of `quantise_gradient`.
    fitting: (P, N) int8, each part contiguous: the `fitting` result of each part.
    block: B, as in `quantise_gradient`.
    dtype: float32 or bfloat16.

Returns:
    (N, K) of `dtype`. A row without an exponent is 0, one that was not finite is infinite.
"""
