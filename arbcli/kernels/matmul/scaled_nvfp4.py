"""Products of matrices in NVFP4 as they are: codes of four bits, and scales that hardware applies.

    x ~ g * s * q,   y = g_a g_b * sum over k of (s_a q_a) (s_b q_b)

with g, s and q as in `round_nvfp4`. Two codes make a byte, the one of the even column in its lower
half; a code is the place of |q| in 0, 0.5, 1, 1.5, 2, 3, 4, 6, plus 8 if q is negative. From
compute capability 10 on the product is one of the hardware's. Elsewhere the kernel multiplies the
numbers themselves: not every version of the compiler makes that of it.
Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_weight import decode_weight_triton
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.dice import Dice
from arbcli.kernels.matmul.nvfp4_matmul import nvfp4_matmul
from arbcli.kernels.matmul.quantise_rows import (
    ACTIVATIONS,
    E4M3,
    has_e4m3,
    round_e4m3_reference,
    to_e4m3,
)
from arbcli.kernels.matmul.round_nvfp4 import (
    BLOCK,
    LARGEST_SCALE,
    SIXTH,
    global_scale,
    number_of_scale,
    round_nvfp4,
)
from arbcli.kernels.runtime._triton import INTERPRETED, tl, triton
from arbcli.kernels.runtime.arguments import FLOAT, UINT8, Array, Number
from arbcli.kernels.runtime.backend import capability, uses_triton
from arbcli.kernels.runtime.operation import EXACT, Case, Gate, Operation, Timing

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1, by code."""
FIRST_CAPABILITY = (10, 0)
"""Whose hardware multiplies them."""

_BLOCK, _SIXTH, _LARGEST = map(tl.constexpr, (BLOCK, SIXTH, LARGEST_SCALE))


def encode_nvfp4_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `encode_nvfp4` must return, 16 columns at a time in float64."""
    largest = x.double().abs().max() if x.numel() else x.new_zeros((), dtype=torch.float64)
    octave = max(int(torch.frexp(largest).exponent) - 1, -116) if largest > 0 else -116
    values, blocks = x.double() / 2.0 ** (octave - 10), -(-x.shape[1] // 16)
    codes = torch.zeros(len(x), 16 * blocks, dtype=torch.int64, device=x.device)
    scales = torch.zeros(len(x), blocks, dtype=torch.uint8, device=x.device)
    numbers = torch.tensor(NUMBERS, dtype=torch.float64, device=x.device)
    for block in range(blocks):
        part = values[:, 16 * block : 16 * block + 16]
        sixth = (part.abs().amax(dim=1, keepdim=True).float() * (1 / 6)).clamp(max=448)
        s = round_e4m3_reference(sixth.double()).double()
        distance = (part.abs()[..., None] - s[..., None] * numbers).abs()
        nearest = distance.amin(dim=-1, keepdim=True)
        even = torch.arange(8, device=x.device) % 2 == 0
        code = (2 * (distance == nearest) + even).argmax(dim=-1) * (s > 0)
        code += 8 * ((part < 0) & (code > 0))
        codes[:, 16 * block : 16 * block + part.shape[1]] = code
        scales[:, block] = s[:, 0].to(E4M3).view(torch.uint8)
    both = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return both, scales, torch.tensor([2.0 ** (octave - 10)], device=x.device)


def _encode_nvfp4_torch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, inverse = global_scale(x)
    padding = (0, -x.shape[1] % BLOCK)
    t = torch.nn.functional.pad(x.float() * inverse, padding).unflatten(1, (-1, BLOCK))
    size = t.abs()
    s8 = (size.amax(dim=2, keepdim=True) * SIXTH).clamp(max=LARGEST_SCALE).to(E4M3)
    s = s8.float()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for index, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)):
        edge = middle * s
        code += (size >= edge) if index % 2 else (size > edge)
    code = torch.where(s > 0, code, 0)
    code += 8 * ((t < 0) & (code > 0)).to(torch.uint8)
    code = code.flatten(1)
    return code[:, ::2] | (code[:, 1::2] << 4), s8.view(torch.uint8)[..., 0].contiguous(), scale


@triton.jit
def _encode_nvfp4_kernel(
    x_ptr, largest_ptr, codes_ptr, scales_ptr,
    M, K, B, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    k = b[None, :, None] * _BLOCK + tl.arange(0, _BLOCK)[None, None, :]
    mask = (m < M)[:, None, None] & (k < K)
    x_ptrs = x_ptr + m[:, None, None] * stride_xm + k * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0).to(tl.float32)
    field = tl.maximum(tl.load(largest_ptr).to(tl.int32, bitcast=True) >> 23, 11)
    t = x * ((264 - field) << 23).to(tl.float32, bitcast=True)
    size = tl.abs(t)
    bits = to_e4m3(tl.minimum(tl.max(size, axis=2) * _SIXTH, _LARGEST), NATIVE)
    s = number_of_scale(bits, NATIVE)[:, :, None]
    code = (size > 0.25 * s).to(tl.int32) + (size >= 0.75 * s).to(tl.int32)
    code += (size > 1.25 * s).to(tl.int32) + (size >= 1.75 * s).to(tl.int32)
    code += (size > 2.5 * s).to(tl.int32) + (size >= 3.5 * s).to(tl.int32)
    code += (size > 5.0 * s).to(tl.int32)
    code = tl.where(s > 0, code, 0)
    code = tl.where((t < 0) & (code > 0), code + 8, code)
    low, high = tl.split(tl.reshape(code, [BLOCK_M, BLOCKS, _BLOCK // 2, 2]))
    place = m[:, None] * B + b[None, :]
    there = (m < M)[:, None] & (b < B)[None, :]
    tl.store(scales_ptr + place, bits, mask=there)
    at = place[:, :, None] * (_BLOCK // 2) + tl.arange(0, _BLOCK // 2)[None, None, :]
    tl.store(codes_ptr + at, (low | (high << 4)).to(tl.uint8), mask=there[:, :, None])


def _encode_nvfp4_triton(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest, scale, _ = global_scale(x)
    rows, number = len(x), triton.cdiv(x.shape[1], BLOCK)
    codes = torch.empty(rows, number * BLOCK // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, number, dtype=torch.uint8, device=x.device)
    if x.numel():
        blocks = min(16, triton.next_power_of_2(number))
        block_m = min(128 // blocks, triton.next_power_of_2(rows))
        grid = (triton.cdiv(rows, block_m), triton.cdiv(number, blocks))
        _encode_nvfp4_kernel[grid](
            x, largest, codes, scales, *x.shape, number, *x.stride(),
            BLOCK_M=block_m, BLOCKS=blocks, NATIVE=has_e4m3(x),
        )  # fmt: skip
    return codes, scales, scale


def _numbers(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Read codes and scales as numbers (M, K)."""
    found = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).long()
    numbers = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], dtype=dtype)
    scales = scales.view(E4M3).to(dtype).repeat_interleave(BLOCK, dim=1)
    return numbers.to(codes.device)[found] * scales


def scaled_nvfp4_matmul_reference(
    a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute what `scaled_nvfp4_matmul` must return, in float64."""
    rows, columns = (
        _numbers(*part, torch.float64) for part in ((a, of_a), (b, of_b))
    )  # (M, K), (N, K)
    return rows @ columns.T * scale.double()


def _scaled_nvfp4_matmul_torch(
    a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    rows, columns = (_numbers(*part, torch.float32) for part in ((a, of_a), (b, of_b)))
    return (rows @ columns.T * scale).to(dtype)


@triton.jit
def _number_of_code(code):
    """Read the float32 numbers of codes of e2m1."""
    size, exponent = code & 7, (code & 7) >> 1
    large = ((1 << exponent) * (2 + (size & 1))).to(tl.float32) * 0.25
    number = tl.where(size < 2, size.to(tl.float32) * 0.5, large)
    return tl.where(code > 7, -number, number)


@triton.jit
def _decoded(codes, bits, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Read codes and the bits of scales as float32 numbers, [BLOCK_M, BLOCK_K]."""
    codes = codes.to(tl.int32)
    numbers = tl.join(_number_of_code(codes & 15), _number_of_code(codes >> 4))
    numbers = tl.reshape(numbers, [BLOCK_M, BLOCK_K // _BLOCK, _BLOCK])
    return tl.reshape(numbers * number_of_scale(bits, False)[:, :, None], [BLOCK_M, BLOCK_K])


@triton.jit
def _scaled_nvfp4_kernel(
    a_ptr, of_a_ptr, b_ptr, of_b_ptr, scale_ptr, y_ptr,
    M, N, K, B,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k, offs_b = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // _BLOCK)
    in_m, in_n = (m < M)[:, None], (n < N)[:, None]
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K // 2):  # K bytes of a row, two codes each
        k = start + offs_k
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=in_m & (k < K)[None, :], other=0)
        b = tl.load(b_ptr + n[:, None] * K + k[None, :], mask=in_n & (k < K)[None, :], other=0)
        at = start // (_BLOCK // 2) + offs_b
        there = (at < B)[None, :]
        s = tl.load(of_a_ptr + m[:, None] * B + at[None, :], mask=in_m & there, other=0)
        t = tl.load(of_b_ptr + n[:, None] * B + at[None, :], mask=in_n & there, other=0)
        if SCALED:
            s, t = s.to(tl.float8e4nv, bitcast=True), t.to(tl.float8e4nv, bitcast=True)
            y = tl.dot_scaled(a, s, "e2m1", tl.trans(b), t, "e2m1", y)
        else:
            rows = _decoded(a, s, BLOCK_M, BLOCK_K)
            columns = _decoded(b, t, BLOCK_N, BLOCK_K)
            y = tl.dot(rows, tl.trans(columns), y, input_precision=PRECISION)
    y = y * tl.load(scale_ptr)
    out = y_ptr + m[:, None] * N + n[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=in_m & (n < N)[None, :])


def _scaled_nvfp4_matmul_triton(
    a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    (rows, half), outputs = a.shape, len(b)
    y = torch.empty(rows, outputs, dtype=dtype, device=a.device)
    if y.numel():
        scaled = capability(a) >= FIRST_CAPABILITY
        tile = (128, 64, 64) if scaled else (16, 16, 128)  # larger ones spill
        grid = triton.cdiv(rows, tile[0]), triton.cdiv(outputs, tile[1])
        _scaled_nvfp4_kernel[grid](
            a, of_a, b, of_b, scale, y, rows, outputs, half, of_a.shape[1],
            BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=tile[2], SCALED=scaled,
            PRECISION="ieee" if INTERPRETED else "tf32",  # numbers of six bits, which both have
            num_warps=8 if scaled else 4,
        )  # fmt: skip
    return y


def nvfp4_product(x: Tensor, packed: Packed, *, transposed: bool = False) -> Tensor:
    """Multiply activations by a packed matrix, or a gradient by its transpose, in four bits.

    Hardware that multiplies them is taken; elsewhere the same numbers are multiplied as bfloat16:
    see `nvfp4_matmul`.

    Args:
        x: (M, K) float32 or bfloat16; (M, N) if `transposed`.
        packed: N rows by K weights, both multiples of `MULTIPLE`.
        transposed: whether the product is that of a gradient.

    Returns:
        (M, N) in the dtype of x; (M, K) if `transposed`.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    if not (uses_triton(x) and capability(x) >= FIRST_CAPABILITY):
        return nvfp4_matmul(*round_nvfp4(x), packed, transposed, x.dtype)
    weight = decode_weight_triton(packed, x.dtype)
    a, of_a, first = encode_nvfp4(x)
    b, of_b, second = encode_nvfp4(weight.T if transposed else weight)
    return scaled_nvfp4_matmul(a, of_a, b, of_b, first * second, x.dtype)


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    yield from round_nvfp4.cases(device, group_size)


def _product_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1, 16), (3, 33, 48), (17, 5, 1311)]
    if device.type == "cuda":
        shapes += [(300, 260, 4096), (129, 1311, 776)]
    for rows, outputs, inputs in shapes:
        parts = []
        for length in (rows, outputs):
            x = torch.randn(length, inputs, generator=generator)
            x *= torch.exp2(torch.randint(-6, 7, (length, 1), generator=generator))
            parts.append(_encode_nvfp4_torch(x.to(device)))
        (a, of_a, first), (b, of_b, second) = parts
        for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
            label = f"{rows}x{outputs}x{inputs} {str(dtype).removeprefix('torch.')}"
            yield Case(label, (a, of_a, b, of_b, first * second, dtype))


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    size = 4096
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    codes, scales, scale = _encode_nvfp4_torch(x)
    yield Timing(
        f"{size}x{size}x{size}",
        (codes, scales, codes, scales, scale * scale, torch.bfloat16),
        peer=lambda: x @ x.T,
        peer_name="cuBLAS bf16",
        flops=2 * size**3,
    )


encode_nvfp4 = Operation(
    "encode_nvfp4", _encode_nvfp4_triton, _encode_nvfp4_torch, encode_nvfp4_reference, _cases,
    EXACT, {"x": ACTIVATIONS}, torch_is_peer=True, timings=round_nvfp4.timings,
)  # fmt: skip
"""Turn a matrix into codes of four bits with their scales.

Args:
    x: (M, K) float32 or bfloat16, any strides.

Returns:
    (M, 8 ceil(K / 16)) uint8 codes, 0 beyond K; (M, ceil(K / 16)) uint8, the bits of scales of
    e4m3; and g, (1,) float32, which is NaN if an element is not finite.
"""


def _draw_product(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    sides = [_encode_nvfp4_torch(dice.reals(rows, k)) for rows in (m, n)]
    (a, of_a, first), (b, of_b, second) = sides
    return a, of_a, b, of_b, first * second, dice.dtype


scaled_nvfp4_matmul = Operation(
    "scaled_nvfp4_matmul", _scaled_nvfp4_matmul_triton, _scaled_nvfp4_matmul_torch,
    scaled_nvfp4_matmul_reference, _product_cases,
    Gate(exact=False, relative=4e-3, reason="float32 sums, rounded to bf16"),
    {
        "a": Array("M, 8 * B", UINT8, dense=True), "of_a": Array("M, B", UINT8, dense=True),
        "b": Array("N, 8 * B", UINT8, dense=True), "of_b": Array("N, B", UINT8, dense=True),
        "scale": Array("1", FLOAT, dense=True), "dtype": Number((torch.bfloat16, torch.float32)),
    },
    draw=_draw_product, needs_rows=True, timings=_timings,
    not_verified=("products of hardware of compute capability 10 and more, which was not there",),
)  # fmt: skip
"""Multiply two matrices of codes, the second one transposed, summed in float32.

Args:
    a: (M, 8 B) uint8 codes, contiguous, as `encode_nvfp4` gives them.
    of_a: (M, B) uint8, their scales.
    b: (N, 8 B) like a.
    of_b: (N, B) like `of_a`.
    scale: (1,) float32, of both: g_a g_b.
    dtype: of the result, bfloat16 or float32.

Returns:
    (M, N) in `dtype`.
"""
