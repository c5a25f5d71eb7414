"""Products with a packed matrix: y = x @ w.T, and its gradient grad_x = grad_y @ w.

Up to `FUSED_ROWS` rows of x the packed bytes are decoded in registers: by `few_rows` where it can,
else by a kernel for every type, stride and group size, five products of 32 weights a block. Above,
and for gradients, the weights are decoded once into a transient buffer and the matrix library
multiplies: reading them again for every tile of x would cost more than writing them once.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_weight import (
    _decode_weight_triton,
    check_scales,
    decode_weight,
    decode_weight_reference,
    decode_weight_torch,
    load_scale,
    random_packed,
)
from arbcli.kernels.codec.packing import PLANE, check_packed, digit_of, plane_offsets
from arbcli.kernels.matmul.few_rows import few_rows, takes
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.backend import uses_triton
from arbcli.kernels.runtime.spec import Case, Gate, KernelSpec, Timing

FUSED_ROWS = 64
"""Largest M that the fused kernel takes."""


def ternary_matmul_reference(
    x: Tensor,
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    group_size: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute what `ternary_matmul` must return, in float64."""
    weight = decode_weight_reference(packed, exponent, fraction, x.shape[1], group_size)
    return x.double() @ weight.double().T


def ternary_matmul_grad_x_reference(
    grad_y: Tensor,
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    in_features: int,
    group_size: int,
) -> Tensor:
    """Compute what `ternary_matmul_grad_x` must return, in float64."""
    weight = decode_weight_reference(packed, exponent, fraction, in_features, group_size)
    return grad_y.double() @ weight.double()


def _ternary_matmul_torch(x, packed, exponent, fraction, group_size, dtype=None):
    x = x.to(torch.promote_types(x.dtype, dtype or x.dtype))
    weight = decode_weight_torch(packed, exponent, fraction, x.shape[1], group_size, x.dtype)
    return (x @ weight.T).to(dtype or x.dtype)


def _ternary_matmul_grad_x_torch(grad_y, packed, exponent, fraction, in_features, group_size):
    dtype = grad_y.dtype
    return grad_y @ decode_weight_torch(packed, exponent, fraction, in_features, group_size, dtype)


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
            x = tl.load(  # [BLOCK_M, 32], 0 in the padding, whatever the weight there
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


def _ternary_matmul_triton(x, packed, exponent, fraction, group_size, dtype=None):
    dtype = dtype or x.dtype
    (rows, in_features), out_features = x.shape, packed.shape[0]
    if takes(x, packed, group_size):
        return few_rows(x, packed, exponent, fraction, group_size, dtype)
    if rows > FUSED_ROWS:
        x = x.to(torch.promote_types(x.dtype, dtype))
        state = (packed, exponent, fraction)
        weight = _decode_weight_triton(*state, in_features, group_size, x.dtype)
        return (x @ weight.T).to(dtype)
    y = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    digits = exponent if fraction is None else fraction
    _ternary_matmul_kernel[(triton.cdiv(rows, 16), triton.cdiv(out_features, 32))](
        x, packed, exponent, digits, y, rows, out_features, in_features, packed.shape[1],
        *x.stride(), *packed.stride(), *exponent.stride(), *digits.stride(), *y.stride(),
        GROUP=group_size, HAS_FRACTION=fraction is not None, BLOCK_M=16, BLOCK_N=32,
        # float32 products are unrolled one by one: with fewer warps the registers spill
        num_warps=8 if x.dtype == torch.float32 else 4,
    )  # fmt: skip
    return y


def _ternary_matmul_grad_x_triton(grad_y, packed, exponent, fraction, in_features, group_size):
    state = (packed, exponent, fraction, in_features, group_size)
    return grad_y @ _decode_weight_triton(*state, grad_y.dtype)


def ternary_matmul(
    x: Tensor,
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    group_size: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply activations by a packed matrix.

    y[m, n] = sum over k of x[m, k] * w[n, k], accumulated in float32

    Args:
        x: (M, K) bfloat16 or float32, any strides.
        packed: (N, row_bytes(K)) uint8.
        exponent: (N, ceil(K / G)) int8.
        fraction: like `exponent`; None stands for zeros.
        group_size: G.
        dtype: of the result, bfloat16 or float32; by default that of `x`.

    Returns:
        (M, N) in `dtype`.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    check_packed(packed, x.shape[1])
    check_scales(packed, exponent, fraction, x.shape[1], group_size)
    run = _ternary_matmul_triton if uses_triton(x) else _ternary_matmul_torch
    return run(x, packed, exponent, fraction, group_size, dtype)


def ternary_matmul_grad_x(
    grad_y: Tensor,
    packed: Tensor,
    exponent: Tensor,
    fraction: Tensor | None,
    in_features: int,
    group_size: int,
) -> Tensor:
    """Propagate a gradient back through `ternary_matmul`.

    grad_x[m, k] = sum over n of grad_y[m, n] * w[n, k], accumulated in float32

    Args:
        grad_y: (M, N) bfloat16 or float32, any strides.
        packed: (N, row_bytes(K)) uint8.
        exponent: (N, ceil(K / G)) int8.
        fraction: like `exponent`; None stands for zeros.
        in_features: K.
        group_size: G.

    Returns:
        (M, K) in the dtype of `grad_y`.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    check_packed(packed, in_features)
    check_scales(packed, exponent, fraction, in_features, group_size)
    if grad_y.shape[1] != packed.shape[0]:
        raise ValueError(f"grad_y {tuple(grad_y.shape)} does not fit {packed.shape[0]} outputs")
    state = (packed, exponent, fraction, in_features, group_size)
    if uses_triton(grad_y):
        return _ternary_matmul_grad_x_triton(grad_y, *state)
    return _ternary_matmul_grad_x_torch(grad_y, *state)


SHAPES = (
    (1, 1, 1), (3, 33, 123), (33, 17, 165), (5, 131, 33), (2, 5, 1311), (FUSED_ROWS + 1, 33, 96)
)  # fmt: skip
"""(M, N, K); the last is decoded once and multiplied by the matrix library."""


def _inputs(
    device: torch.device, group_size: int, columns: str
) -> Iterator[tuple[str, Tensor, list]]:
    """Draw (label, activations, state) with activations of N or K columns, as `columns` says."""
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    for rows, out_features, in_features in SHAPES:
        width = {"N": out_features, "K": in_features}[columns]
        source = torch.randn(rows, 2 * width, generator=generator).to(device)
        state = random_packed(out_features, in_features, group_size, generator, spread=8)
        state = [digits.to(device) for digits in state]
        for dtype in dtypes:
            label = f"{rows}x{out_features}x{in_features} {str(dtype).removeprefix('torch.')}"
            yield label, source[:, :width].to(dtype), [*state, in_features]
    yield label + " strided", source.to(dtype)[:, ::2], [*state, in_features]
    yield label + " whole octaves", source[:3, ::2].to(dtype), [*state[:2], None, in_features]
    yield label + " empty", source[:0, ::2].to(dtype), [*state, in_features]
    few = source[:3, ::2].to(dtype)
    zeros = torch.full_like(state[0], 121)
    yield label + " zeros", few, [zeros, *state[1:], in_features]
    for end in (-96, 31):
        exponent = torch.full_like(state[1], end)
        yield f"{label} E = {end}", few, [state[0], exponent, state[2], in_features]


FEW_ROWS_SHAPES = ((1, 1, 1), (3, 33, 123), (8, 16, 640), (9, 17, 805), (3, 2, 5280), (2, 3, 5480))
"""(M, N, K) for `few_rows`: ragged, one tile and one more, twice what its warps take in a round."""


def _forward_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    def peer(x, packed, exponent, fraction, group_size, dtype):
        return (
            x @ decode_weight_torch(packed, exponent, fraction, x.shape[1], group_size, x.dtype).T
        )

    for label, x, (packed, exponent, fraction, _) in _inputs(device, group_size, "K"):
        yield Case(
            label,
            (x, packed, exponent, fraction, group_size, x.dtype),
            peer=peer if x.dtype == torch.bfloat16 else None,
        )
    if group_size % PLANE == 0:
        yield from _few_rows_cases(device, group_size)


def _few_rows_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    """Draw bf16 activations for float32 results, by a finer gate than that of bf16 results."""
    generator = torch.Generator().manual_seed(1)
    for rows, out_features, in_features in FEW_ROWS_SHAPES:
        x = torch.randn(rows, in_features, generator=generator)
        x *= 2.0 ** torch.randint(-12, 13, x.shape, generator=generator)
        state = random_packed(out_features, in_features, group_size, generator, spread=8)
        x, *state = (values.to(device) for values in (x.to(torch.bfloat16), *state))
        label = f"{rows}x{out_features}x{in_features} bfloat16 to float32"
        yield Case(label, (x, *state, group_size, torch.float32))
    # rows of w that begin on any byte of a view, and digits that cannot be loaded as words
    packed, exponent, fraction = (torch.cat([digits, digits], dim=1) for digits in state)
    packed, exponent = packed[:, 3 : 3 + state[0].shape[1]], exponent[:, : state[1].shape[1]]
    fraction = fraction[:, 1 : 1 + state[1].shape[1]]
    yield Case(label + " views", (x, packed, exponent, fraction, group_size, torch.float32))
    zeros = torch.full_like(state[0], 121)
    yield Case(label + " zeros", (x, zeros, exponent, None, group_size, torch.float32))


def _grad_x_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    def peer(grad_y, packed, exponent, fraction, in_features, group_size):
        dtype = grad_y.dtype
        return grad_y @ decode_weight_torch(
            packed, exponent, fraction, in_features, group_size, dtype
        )

    for label, grad_y, state in _inputs(device, group_size, "N"):
        yield Case(
            label,
            (grad_y, *state, group_size),
            peer=peer if grad_y.dtype == torch.bfloat16 else None,
        )


TIMED = (*((m, size) for size in (8192, 16384) for m in (1, 8, 64)), (4096, 8192), (8192, 8192))
"""(M, N = K): few rows, which memory binds, and many, which products bind."""


def _timings(grad_x: bool, device: torch.device, group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    for rows, size in TIMED:
        state = random_packed(size, size, group_size, generator, spread=8)
        source = torch.randn(rows, size, generator=generator, device=device, dtype=torch.bfloat16)
        # the same values: their many zeros cost a GPU less power, and so make it faster
        dense = decode_weight(*state, size, group_size)
        yield Timing(
            f"{rows}x{size}x{size}",
            (source, *state, *((size, group_size) if grad_x else (group_size, source.dtype))),
            peer=partial(torch.matmul, source, dense if grad_x else dense.T),
            peer_name="cuBLAS bf16",
            flops=2 * rows * size * size,
        )


GATE = Gate(
    exact=False,
    relative=1e-5,
    peer_slack=0.1,
    reason="float32 sums of up to 1311 products; in bf16 no worse than torch's product by 10 %",
)

TERNARY_MATMUL = KernelSpec(
    "ternary_matmul",
    _ternary_matmul_triton,
    _ternary_matmul_torch,
    ternary_matmul_reference,
    _forward_cases,
    GATE,
    uses_scales=True,
    timings=partial(_timings, False),
)
TERNARY_MATMUL_GRAD_X = KernelSpec(
    "ternary_matmul_grad_x",
    _ternary_matmul_grad_x_triton,
    _ternary_matmul_grad_x_torch,
    ternary_matmul_grad_x_reference,
    _grad_x_cases,
    GATE,
    uses_scales=True,
    timings=partial(_timings, True),
)
