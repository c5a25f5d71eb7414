"""Packed trits and their scales: all 256 bytes, every scale, and decoding in registers."""

import math

import pytest
import torch

from arbcli.kernels.codec.decode_weight import decode_weight_triton
from arbcli.kernels.codec.packed import Packed, scales_torch
from arbcli.kernels.codec.packing import illegal_bytes, pack_trits
from arbcli.verify.check_kernels import copies
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference
from arbcli.verify.kernels.codec.decode_weight import decode_weight_verification


def test_illegal_bytes_are_those_above_242():
    packed = torch.arange(256, dtype=torch.uint8)[:, None]
    assert [illegal_bytes(byte) for byte in packed] == [number > 242 for number in range(256)]


def every_v() -> tuple[torch.Tensor, torch.Tensor]:
    exponent = torch.arange(-96, 32, dtype=torch.int8)[:, None].expand(128, 128).contiguous()
    fraction = torch.arange(128, dtype=torch.int8)[None, :].expand(128, 128).contiguous()
    return exponent, fraction


def test_a_fraction_out_of_range_is_a_power_of_two_as_well():
    fraction = torch.arange(-128, 128, dtype=torch.int8)[None]  # a file may hold any
    exact = torch.tensor([[2.0 ** (5 + f / 128) for f in range(-128, 128)]])
    scales = scales_torch(torch.full_like(fraction, 5), fraction)
    assert torch.equal(scales, exact.to(torch.bfloat16).float())


def test_every_scale_is_the_same_in_the_kernel(device):
    exponent, fraction = (digits.to(device) for digits in every_v())
    trits = torch.ones(128, 128 * 4, dtype=torch.int8, device=device)
    inputs = (Packed(pack_trits(trits), exponent, fraction, 128 * 4, 4),)
    expected = decode_weight_verification.reference(*copies(inputs))
    assert torch.equal(decode_weight_verification.triton(*copies(inputs)), expected)
    assert torch.equal(decode_weight_verification.torch(*copies(inputs)), expected)
    assert math.isclose(float(expected[-1, -1]), 2 ** (31 + 127 / 128), rel_tol=0.004)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_byte_is_decoded_and_a_weight_of_zero_has_no_sign(device, dtype):
    trits = (torch.arange(256, device=device) % 243).to(torch.uint8).view(2, 128)
    exponent, fraction = torch.full((2, 2, 20), 7, dtype=torch.int8, device=device)
    packed = Packed(trits, exponent, fraction, 640, 32)
    weight = decode_weight_triton(packed, dtype)
    expected = decode_digits_reference(packed).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(weight.view(bits), expected.view(bits))
