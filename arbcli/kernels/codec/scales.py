"""Scales of groups: 2**(v / 128), v = 128 E + F, built from the two digits E and F.

E is the exponent field of a float, F one of 128 mantissas, all at least 0.005 of a bf16 step away
from a rounding boundary: rounded to bf16, no implementation of exp2 can land on another one.
"""

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import OCTAVE
from arbcli.kernels.runtime._triton import tl, triton

_FRACTIONS = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.int8)
ROOTS = torch.exp2(_FRACTIONS / OCTAVE).bfloat16().float().view(torch.int32)
"""2**(F / 128) rounded to bf16, as the bits of a float32; F is counted as an unsigned byte."""


def scales_torch(exponent: Tensor, fraction: Tensor | None) -> Tensor:
    """Build (N, groups) float32 scales, each exactly representable in bf16, from E and F."""
    if fraction is None:
        bits = (exponent.to(torch.int32) + 127) << 23
    else:
        index = fraction.view(torch.uint8).to(torch.int32).flatten()
        roots = ROOTS.to(fraction.device).index_select(0, index)
        bits = torch.add(roots.view(fraction.shape), exponent, alpha=1 << 23)
    return bits.view(torch.float32)


@triton.jit
def scale_of(exponent, fraction):
    """Build float32 scales 2**E * bf16(2**(F / 128)) from int8 digits inside a kernel."""
    power = ((fraction.to(tl.int32) << 16) + 0x3F800000).to(tl.float32, bitcast=True)  # 1 + F / 128
    rounded = (tl.exp2(power).to(tl.int32, bitcast=True) + 0x8000) & -0x10000  # to bf16
    return (rounded + ((exponent.to(tl.int32) - 1) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(
    exponent_ptr, fraction_ptr, offs_n, offs_g, mask,
    stride_en, stride_eg, stride_fn, stride_fg,
    HAS_FRACTION: tl.constexpr,
):  # fmt: skip
    """Load the digits of scales and build the scales; `offs_n` and `offs_g` broadcast."""
    offset = offs_n * stride_en + offs_g * stride_eg
    exponent = tl.load(exponent_ptr + offset, mask=mask, other=0)
    if HAS_FRACTION:
        offset = offs_n * stride_fn + offs_g * stride_fg
        fraction = tl.load(fraction_ptr + offset, mask=mask, other=0)
    else:
        fraction = tl.zeros_like(exponent)
    return scale_of(exponent, fraction)
