"""The largest exponent of a matrix, by which all of its weights are brought into e4m3."""

import pytest
import torch

from arbcli.kernels.codec import decode_e4m3
from arbcli.kernels.codec.packed import random_packed
from arbcli.kernels.runtime.backend import use_backend

KERNEL_BACKEND = "triton" if torch.cuda.is_available() else "interpreter"


@pytest.mark.parametrize("backend", [KERNEL_BACKEND, "torch"])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 30])
def test_largest_exponent_is_found_wherever_it_is(backend, rows, device, monkeypatch):
    """In any part of those that programs share out, the last one of which may be short."""
    monkeypatch.setattr(decode_e4m3, "PART", 8)
    monkeypatch.setattr(decode_e4m3, "MOST_PARTS", 4)
    packed = random_packed(rows, 33, 16, torch.Generator().manual_seed(0)).to(device)
    number = packed.exponent.numel()
    for place in sorted({0, 7, 8, 15, 16, number // 2, number - 2, number - 1}):
        if not 0 <= place < number:
            continue
        packed.exponent.fill_(-40).view(-1)[place] = -7
        with use_backend(backend):
            assert decode_e4m3.largest_exponents(packed).amax() == -7, place
