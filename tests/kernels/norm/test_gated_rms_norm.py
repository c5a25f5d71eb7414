"""The gated norm: what the cases of its specs do not say."""

import pytest
import torch
from torch.nn import functional

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import pack_trits_reference
from arbcli.kernels.norm.gated_rms_norm import gated_rms_norm
from arbcli.kernels.runtime.backend import use_backend

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")
NO_NORM = (None, None)


def ones(device: torch.device | str = "cpu") -> Packed:
    trits = pack_trits_reference(torch.ones(1, 33, dtype=torch.int8))
    scales = torch.zeros(1, 2, dtype=torch.int8)
    return Packed(trits, scales, scales, 33, 32).to(device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_norm_of_ones_is_that_of_torch(backend, device):
    gate_up = torch.randn(7, 66, generator=torch.Generator().manual_seed(0)).to(device)
    gate, up = gate_up.chunk(2, dim=-1)
    product = functional.silu(gate) * up
    with use_backend(backend):
        y = gated_rms_norm(gate_up, ones(device), 1e-6)
        torch.testing.assert_close(y, functional.rms_norm(product, (33,), eps=1e-6))
        torch.testing.assert_close(gated_rms_norm(gate_up, *NO_NORM), product)
