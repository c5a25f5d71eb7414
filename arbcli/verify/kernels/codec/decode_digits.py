"""Verification of `arbcli.kernels.codec.decode_digits`."""

import math
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from arbcli.kernels.codec import decode_digits
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.verify.kernels.codec.packing import unpack_trits_reference
from arbcli.verify.verification import Verification

P = ParamSpec("P")


def digits_reference(packed: Packed) -> Tensor:
    """Compute T, or z / U if the weights are all digits, in float64."""
    trits = unpack_trits_reference(packed.trits, packed.in_features).double()
    if packed.remainder is None:
        return trits
    low = packed.remainder.to(torch.int64)
    low = (low % 16 + 8) % 16 - 8 if packed.nibble else low
    z = trits * packed.radix + low * packed.low
    return z / 2 ** math.ceil(math.log2(packed.radix))


def scales_reference(packed: Packed) -> Tensor:
    """Compute the scale of each weight, in float64, without rounding."""
    v = packed.exponent.to(torch.float64) * 128
    if packed.fraction is not None:
        v = v + packed.fraction.to(torch.float64)
    scale = torch.exp2(v / 128).repeat_interleave(packed.group_size, dim=1)
    return scale[:, : packed.in_features]


def decode_digits_reference(packed: Packed) -> Tensor:
    """Decode in float64, with scales and weights rounded to bf16."""
    scale = scales_reference(packed).to(torch.bfloat16).double()
    return (digits_reference(packed) * scale).to(torch.bfloat16)


def fix_float32(run: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Wrap an implementation with `dtype` fixed to float32."""

    @wraps(run)
    def as_float32(*inputs: P.args, **named: P.kwargs) -> Tensor:
        named["dtype"] = torch.float32
        return run(*inputs, **named)

    return as_float32


def digits_large(packed: Packed) -> Tensor:
    """Compute the digits of a matrix that is too large for the reference."""
    return decode_digits.digits_torch(packed, torch.float32)


def decode_large(packed: Packed) -> Tensor:
    """Decode a matrix that is too large for the reference, to float32."""
    return decode_digits.decode_digits_torch(packed, torch.float32)


def rounded_float32(decode: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Wrap an implementation to decode to float32, rounded to bf16 for the comparison.

    Triton's interpreter rounds bf16 wrongly; float32 holds the same values.
    """
    decode = fix_float32(decode)

    @wraps(decode)
    def run(*inputs: P.args, **named: P.kwargs) -> Tensor:
        weight = decode(*inputs, **named)
        rounded = weight.to(torch.bfloat16)
        # a value that is not exact in bf16 becomes NaN, which fails every comparison
        return torch.where(rounded.float() == weight, rounded, torch.nan)

    return run


decode_digits_verification = Verification(
    decode_digits.DECODE_DIGITS, decode_digits_reference,
    changed={
        "five sixteenths": {"packed": lambda x: x._replace(radix=246, low=5, nibble=True)},
        "thirteen sixteenths": {"packed": lambda x: x._replace(radix=1024, low=13, nibble=False)},
    },
    triton=rounded_float32(decode_digits.decode_digits_triton),
    torch=rounded_float32(decode_digits.decode_digits_torch),
    native=rounded_float32(decode_digits.decode_digits_native),
    scale_path=has_planes, values={"packed": {"spread": 90, "digits": "all"}},
)  # fmt: skip
