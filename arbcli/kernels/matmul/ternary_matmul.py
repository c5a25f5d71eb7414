"""Products with a packed matrix: y = x @ w.T, and its gradient grad_x = grad_y @ w.

For up to `FUSED_ROWS` rows of x, packed bytes are decoded in registers: by `few_rows` if it
applies, otherwise by a general kernel for every dtype, stride and group size. With more rows, and
for gradients, the weights are decoded once to a temporary buffer and torch multiplies: decoding
them again for every tile of x would cost more. Weights that are all digits are always decoded
first.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import (
    decode_digits,
    decode_digits_reference,
    decode_large,
    with_remainders,
)
from arbcli.kernels.codec.decode_weight import decode_weight, decode_weight_triton
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.codec.packed import Packed, random_packed
from arbcli.kernels.codec.packing import digit_of, in_planes, plane_offsets
from arbcli.kernels.codec.scales import load_scale
from arbcli.kernels.matmul.few_rows import few_rows, fits_few_rows
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import Array, Matrix, Number
from arbcli.kernels.runtime.inputs import dtype_name, real_dtypes
from arbcli.kernels.runtime.operation import Case, Gate, Operation, Timing

FUSED_ROWS = 64
"""Largest M for which the matrix is not decoded first."""


def ternary_matmul_reference(
    x: Tensor, packed: Packed, dtype: torch.dtype | None = None, *,
    decode: Callable = decode_digits_reference,
) -> Tensor:  # fmt: skip
    """Compute the reference result of `ternary_matmul`, in float64."""
    return x.double() @ decode(packed).double().T


def ternary_matmul_grad_x_reference(
    grad_y: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute the reference result of `ternary_matmul_grad_x`, in float64."""
    return grad_y.double() @ decode(packed).double()


def _ternary_matmul_torch(x: Tensor, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, dtype or x.dtype))
    return (x @ decode_digits(packed, x.dtype).T).to(dtype or x.dtype)


def _ternary_matmul_grad_x_torch(grad_y: Tensor, packed: Packed) -> Tensor:
    return grad_y @ decode_digits(packed, grad_y.dtype)


@triton.jit
def _ternary_matmul_kernel(
    x_ptr, packed_ptr, exponent_ptr, fraction_ptr, y_ptr,
    M, N, K, row_bytes,
    stride_xm, stride_xk, stride_pn, stride_pb,
    stride_en, stride_eg, stride_fn, stride_fg, stride_ym, stride_yn,
    GROUP: tl.constexpr, HAS_FRACTION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask_m, mask_n = offs_m < M, offs_n < N

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, row_bytes, 32):
        offs_b = start + tl.arange(0, 32)
        byte = tl.load(  # [32, BLOCK_N] uint8
            packed_ptr + offs_n * stride_pn + offs_b[:, None] * stride_pb,
            mask=mask_n & (offs_b < row_bytes)[:, None], other=0,
        )  # fmt: skip
        for digit in tl.static_range(5):
            k = plane_offsets(offs_b, K, digit)
            x = tl.load(  # [BLOCK_M, 32], 0 in the padding, so its weights do not matter
                x_ptr + offs_m * stride_xm + k[None, :] * stride_xk,
                mask=mask_m & (k < K)[None, :], other=0.0,
            )  # fmt: skip
            scale = load_scale(
                exponent_ptr, fraction_ptr, offs_n, k[:, None] // GROUP,
                mask_n & (k < K)[:, None], stride_en, stride_eg, stride_fn, stride_fg, HAS_FRACTION,
            )  # fmt: skip
            weight = (digit_of(byte, digit).to(tl.float32) * scale).to(x.dtype)  # [32, BLOCK_N]
            acc = tl.dot(x, weight, acc, input_precision="ieee")

    y_ptrs = y_ptr + offs_m * stride_ym + offs_n * stride_yn
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m & mask_n)


def _ternary_matmul_triton(x: Tensor, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    dtype, (rows, in_features) = dtype or x.dtype, x.shape
    if fits_few_rows(x, packed):
        return few_rows(x, packed, dtype)
    if rows > FUSED_ROWS or packed.remainder is not None:
        x = x.to(torch.promote_types(x.dtype, dtype))
        return (x @ decode_weight_triton(packed, x.dtype).T).to(dtype)
    out_features, num_bytes = packed.trits.shape
    y = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    _ternary_matmul_kernel[(triton.cdiv(rows, 16), triton.cdiv(out_features, 32))](
        x, *packed.pointers, y, rows, out_features, in_features, num_bytes,
        *x.stride(), *packed.strides, *y.stride(),
        **packed.constants, BLOCK_M=16, BLOCK_N=32,
        # float32 products are unrolled: with fewer warps, registers spill
        num_warps=8 if x.dtype == torch.float32 else 4,
    )  # fmt: skip
    return y


def _ternary_matmul_grad_x_triton(grad_y: Tensor, packed: Packed) -> Tensor:
    return grad_y @ decode_weight_triton(packed, grad_y.dtype)


SHAPES = (
    (1, 1, 1), (3, 33, 123), (33, 17, 165), (5, 131, 33), (2, 5, 1311), (FUSED_ROWS + 1, 33, 96)
)  # fmt: skip
"""(M, N, K); for the last one the matrix is decoded first."""


def _inputs(
    device: torch.device, group_size: int, columns: str
) -> Iterator[tuple[str, Tensor, Packed]]:
    """Draw (label, activations, matrix); `columns` selects N or K columns of activations."""
    generator = torch.Generator().manual_seed(0)
    for rows, out_features, in_features in SHAPES:
        width = {"N": out_features, "K": in_features}[columns]
        source = torch.randn(rows, 2 * width, generator=generator).to(device)
        packed = random_packed(out_features, in_features, group_size, generator, spread=8)
        packed = packed.to(device)
        for dtype in real_dtypes(device):
            label = f"{rows}x{out_features}x{in_features} {dtype_name(dtype)}"
            yield label, source[:, :width].to(dtype), packed
    for name, all_digits in with_remainders(packed, generator):
        yield f"{label} {name}", source[:, :width].to(dtype), all_digits
    yield label + " strided", source.to(dtype)[:, ::2], packed
    few = source[:3, ::2].to(dtype)
    yield label + " whole octaves", few, packed._replace(fraction=None)
    yield label + " empty", source[:0, ::2].to(dtype), packed
    yield label + " zeros", few, packed._replace(trits=torch.full_like(packed.trits, 121))
    for end in (-96, 31):
        exponent = torch.full_like(packed.exponent, end)
        yield f"{label} E = {end}", few, packed._replace(exponent=exponent)


FEW_ROWS_SHAPES = ((1, 1, 1), (3, 33, 123), (8, 16, 640), (9, 17, 805), (3, 2, 5280), (2, 3, 5480))
"""(M, N, K) for `few_rows`: ragged sizes, one tile, one more, two rounds of its warps."""


def _forward_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    for label, x, packed in _inputs(device, group_size, "K"):
        yield Case(label, (x, packed, x.dtype))
    if in_planes(group_size):
        yield from _few_rows_cases(device, group_size)


def _few_rows_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    """Draw bf16 activations for float32 results, whose tolerance is finer than for bf16."""
    generator = torch.Generator().manual_seed(1)
    for rows, out_features, in_features in FEW_ROWS_SHAPES:
        x = torch.randn(rows, in_features, generator=generator)
        x *= 2.0 ** torch.randint(-12, 13, x.shape, generator=generator)
        packed = random_packed(out_features, in_features, group_size, generator, spread=8)
        x, packed = x.to(device, torch.bfloat16), packed.to(device)
        label = f"{rows}x{out_features}x{in_features} bfloat16 to float32"
        yield Case(label, (x, packed, torch.float32))
    # views with unaligned rows of w, and digits that cannot be loaded as words
    assert packed.fraction is not None
    views = packed._replace(
        trits=packed.trits.repeat(1, 2)[:, 3 : 3 + packed.trits.shape[1]],
        exponent=packed.exponent.repeat(1, 2)[:, : packed.num_groups],
        fraction=packed.fraction.repeat(1, 2)[:, 1 : 1 + packed.num_groups],
    )
    yield Case(label + " views", (x, views, torch.float32))
    zeros = views._replace(trits=torch.full_like(packed.trits, 121), fraction=None)
    yield Case(label + " zeros", (x, zeros, torch.float32))


def _grad_x_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    for label, grad_y, packed in _inputs(device, group_size, "N"):
        yield Case(label, (grad_y, packed))


TIMED = (*((m, size) for size in (8192, 16384) for m in (1, 8, 64)), (4096, 8192), (8192, 8192))
"""(M, N = K): few rows, bound by memory, and many rows, bound by compute."""


def _timings(grad_x: bool, device: torch.device, group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    for rows, size in TIMED:
        packed = random_packed(size, size, group_size, generator, spread=8)
        source = torch.randn(rows, size, generator=generator, device=device, dtype=torch.bfloat16)
        # the same values, as their many zeros save power and so speed up the GPU
        dense = decode_weight(packed)
        yield Timing(
            f"{rows}x{size}x{size}",
            (source, packed) if grad_x else (source, packed, source.dtype),
            peer=partial(torch.matmul, source, dense if grad_x else dense.T),
            peer_name="cuBLAS bf16",
            flops=2 * rows * size * size,
        )


GATE = Gate(
    relative=1e-5, peer_slack=0.1,
    reason="float32 sums of up to 1311 products; in bf16 no worse than torch's product by 10 %",
)  # fmt: skip


ternary_matmul = Operation(
    "ternary_matmul", _ternary_matmul_triton, _ternary_matmul_torch, ternary_matmul_reference,
    _forward_cases, GATE,
    {"x": Array("M, K"), "packed": Matrix(), "dtype": Number(())},
    large_reference=partial(ternary_matmul_reference, decode=decode_large), torch_is_peer=True,
    scale_path=lambda group_size: (in_planes(group_size), group_size == PLANE),
    timings=partial(_timings, False),
)  # fmt: skip
"""Multiply activations by a packed matrix.

y[m, n] = sum over k of x[m, k] * w[n, k], accumulated in float32

Args:
    x: (M, K) bfloat16 or float32, any strides.
    packed: w, N rows by K weights.
    dtype: of the result, bfloat16 or float32; by default that of `x`.

Returns:
    (M, N) in `dtype`.
"""
ternary_matmul_grad_x = Operation(
    "ternary_matmul_grad_x", _ternary_matmul_grad_x_triton, _ternary_matmul_grad_x_torch,
    ternary_matmul_grad_x_reference, _grad_x_cases, GATE,
    {"grad_y": Array("M, N"), "packed": Matrix()},
    large_reference=partial(ternary_matmul_grad_x_reference, decode=decode_large),
    torch_is_peer=True, scale_path=in_planes,
    timings=partial(_timings, True),
)  # fmt: skip
"""Compute the gradient of x of `ternary_matmul`.

grad_x[m, k] = sum over n of grad_y[m, n] * w[n, k], accumulated in float32

Args:
    grad_y: (M, N) bfloat16 or float32, any strides.
    packed: w, N rows by K weights.

Returns:
    (M, K) in the dtype of `grad_y`.
"""
