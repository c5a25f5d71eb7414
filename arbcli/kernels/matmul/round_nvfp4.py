"""Round the rows of a matrix to NVFP4: four-bit numbers with a scale for 16 of them, and one float.

x ~ g * s * q, with q of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign), s of e4m3 for 16 columns,
and g for the matrix:

    g = 2**(octave(max |x|) - 10)
    s = e4m3(min(max of 16 |x| / g / 6, 448)),   q = e2m1(x / g / s)

g is a power of two, so that dividing by it is exact, and brings the largest s between 170 and 342:
no s is beyond 448, the largest of e4m3. Ties of q go to the even code. s * q has six bits at most,
which bfloat16 holds: so what hardware of such numbers would multiply, it can multiply here.
Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from arbcli.kernels.matmul.quantise_rows import (
    ACTIVATIONS,
    E4M3,
    has_e4m3,
    round_e4m3_reference,
    to_e4m3,
)
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.inputs import placed
from arbcli.kernels.runtime.operation import Case, Operation, Timing

BLOCK = 16
"""Columns of a scale."""
OCTAVE = 10
"""Of the largest magnitude divided by g."""
SIXTH = 1 / 6
LARGEST_SCALE = 448.0

_BLOCK, _SIXTH, _LARGEST = map(tl.constexpr, (BLOCK, SIXTH, LARGEST_SCALE))


def round_nvfp4_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what `round_nvfp4` must return, 16 columns at a time in float64."""
    largest = x.double().abs().max() if x.numel() else x.new_zeros((), dtype=torch.float64)
    octave = max(int(torch.frexp(largest).exponent) - 1, -116) if largest > 0 else -116
    values, y = x.double() / 2.0 ** (octave - 10), torch.zeros_like(x)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], 16):
        part = values[:, start : start + 16]
        sixth = (part.abs().amax(dim=1, keepdim=True).float() * (1 / 6)).clamp(max=448)
        s = round_e4m3_reference(sixth.double()).double()
        distance = (part.abs()[..., None] - s[..., None] * numbers).abs()
        nearest = distance.amin(dim=-1, keepdim=True)
        # of two that are as near, the one of the even code
        even = torch.arange(8, device=x.device) % 2 == 0
        code = (2 * (distance == nearest) + even).argmax(dim=-1)
        y[:, start : start + 16] = (part.sign() * s * numbers[code]).to(x.dtype)
    return y, torch.tensor([2.0 ** (octave - 10)], dtype=torch.float32, device=x.device)


def global_scale(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the largest magnitude, g and 1 / g, (1,) float32 each; g is NaN if it is not finite."""
    largest = x.abs().amax().float()[None] if x.numel() else x.new_zeros(1, dtype=torch.float32)
    field = (largest.view(torch.int32) >> 23).clamp(min=OCTAVE + 1)
    scale = ((field - OCTAVE) << 23).view(torch.float32)
    inverse = ((254 + OCTAVE - field) << 23).view(torch.float32)
    return largest, torch.where(largest < torch.inf, scale, torch.nan), inverse


def _round_nvfp4_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    _, scale, inverse = global_scale(x)
    width = x.shape[1]
    t = torch.nn.functional.pad(x.float() * inverse, (0, -width % BLOCK)).unflatten(1, (-1, BLOCK))
    size = t.abs()
    largest = size.amax(dim=2, keepdim=True)
    s = (largest * SIXTH).clamp(max=LARGEST_SCALE).to(E4M3).float()
    q = 0.5 * (size > 0.25 * s) + 0.5 * (size >= 0.75 * s) + 0.5 * (size > 1.25 * s)
    q += 0.5 * (size >= 1.75 * s) + 1.0 * (size > 2.5 * s) + 1.0 * (size >= 3.5 * s)
    q += 2.0 * (size > 5 * s)
    return (t.sign() * q * s).flatten(1)[:, :width].to(x.dtype).contiguous(), scale


@triton.jit
def number_of_scale(code, NATIVE: tl.constexpr):
    """Read the float32 numbers of bits of e4m3 that are not negative."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    code = code.to(tl.int32)
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _round_nvfp4_kernel(
    x_ptr, largest_ptr, y_ptr,
    M, K, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None, None]
    b = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    k = b[None, :, None] * _BLOCK + tl.arange(0, _BLOCK)[None, None, :]
    mask = (m < M) & (k < K)
    x = tl.load(x_ptr + m * stride_xm + k * stride_xk, mask=mask, other=0).to(tl.float32)
    field = tl.maximum(tl.load(largest_ptr).to(tl.int32, bitcast=True) >> 23, 11)
    t = x * ((264 - field) << 23).to(tl.float32, bitcast=True)
    size = tl.abs(t)
    sixth = tl.minimum(tl.max(size, axis=2) * _SIXTH, _LARGEST)
    s = number_of_scale(to_e4m3(sixth, NATIVE), NATIVE)[:, :, None]
    # no quotient: comparisons are the same to the last bit everywhere
    q = tl.where(size > 0.25 * s, 0.5, 0.0) + tl.where(size >= 0.75 * s, 0.5, 0.0)
    q += tl.where(size > 1.25 * s, 0.5, 0.0) + tl.where(size >= 1.75 * s, 0.5, 0.0)
    q += tl.where(size > 2.5 * s, 1.0, 0.0) + tl.where(size >= 3.5 * s, 1.0, 0.0)
    q += tl.where(size > 5.0 * s, 2.0, 0.0)
    y = tl.where(t < 0, -q * s, q * s)
    tl.store(y_ptr + m * K + k, y.to(y_ptr.dtype.element_ty), mask=mask)


def _round_nvfp4_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    largest, scale, _ = global_scale(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        rows, blocks = len(x), min(16, triton.next_power_of_2(triton.cdiv(x.shape[1], BLOCK)))
        block_m = min(128 // blocks, triton.next_power_of_2(rows))
        grid = (triton.cdiv(rows, block_m), triton.cdiv(x.shape[1], BLOCK * blocks))
        _round_nvfp4_kernel[grid](
            x, largest, y, *x.shape, *x.stride(),
            BLOCK_M=block_m, BLOCKS=blocks, NATIVE=has_e4m3(x),
        )  # fmt: skip
    return y, scale


def round_stack_nvfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round each matrix of a stack by a g of its own, all in one launch.

    Each is brought to the same octave first, by a power of two, which is exact.

    Args:
        w: (E, M, K) float32 or bfloat16, any strides.

    Returns:
        s * q, (E, M, K) in the dtype of w, contiguous; and g of each, (E,) float32.
    """
    field = (w.abs().amax(dim=(1, 2)).float().view(torch.int32) >> 23).clamp(OCTAVE + 1, 253)
    inverse = ((254 - field) << 23).view(torch.float32).to(w.dtype)
    y, scale = round_nvfp4((w * inverse[:, None, None]).flatten(0, 1))
    return y.view(w.shape), scale * (field << 23).view(torch.float32)


def _cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def case(label: str, x: Tensor) -> Case:
        return Case(label, (placed(x, device),))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for shape in ((1, 1), (3, 33), (65, 160), (2, 1311)):
        yield case("x".join(map(str, shape)), normal(*shape))
    yield case("5x64 of all sizes", normal(5, 64) * torch.exp2(12 * normal(5, 64)))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -2.5, -5, 0, 1, 2, 3, 4])
    yield case("4x16 ties", torch.stack([ties * scale for scale in (1, 2, 0.5, 448 / 256)]))
    trits = torch.randint(-1, 2, (7, 48), generator=generator).float()
    yield case("7x48 trits", trits * 0.0371)
    yield case("7x48 small and large", torch.cat((normal(3, 48), 1e-4 * normal(4, 48))))
    yield case("3x20 strided", normal(40, 6).T[::2, ::2])
    yield case("2x32 zeros", torch.zeros(2, 32))
    yield case("3x20 the smallest", normal(3, 20) * 2.0**-120)
    yield case("0x32 empty", torch.zeros(0, 32))
    if device.type == "cuda":  # the interpreter computes wrongly in bf16
        yield case("1311x776 bf16", normal(1311, 776).bfloat16())


def _timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    x = torch.randn(16384, 2048, device=device, dtype=torch.bfloat16)
    yield Timing("16384x2048 bf16", (x,))


round_nvfp4 = Operation(
    "round_nvfp4", _round_nvfp4_triton, _round_nvfp4_torch, round_nvfp4_reference, _cases,
    arguments={"x": ACTIVATIONS}, torch_is_peer=True, timings=_timings,
)  # fmt: skip
"""Round a matrix to numbers of four bits, their scales multiplied in.

Args:
    x: (M, K) float32 or bfloat16, any strides.

Returns:
    s * q, (M, K) in the dtype of x, contiguous; and g, (1,) float32, which is NaN if an element
    is not finite.
"""
