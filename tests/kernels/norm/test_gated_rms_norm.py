"""The gated norm: what the cases of its specs do not say."""

import pytest
import torch
from torch.nn import functional

from arbcli.kernels.codec.packing import pack_trits_reference
from arbcli.kernels.norm.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward
from arbcli.kernels.runtime.backend import use_backend

BACKENDS = ("torch", "triton" if torch.cuda.is_available() else "interpreter")
NO_NORM = (None, None, None, 1, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_norm_of_ones_is_that_of_torch(backend, device):
    gate_up = torch.randn(7, 66, generator=torch.Generator().manual_seed(0)).to(device)
    packed = pack_trits_reference(torch.ones(1, 33, dtype=torch.int8)).to(device)
    scales = torch.zeros(1, 2, dtype=torch.int8, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    product = functional.silu(gate) * up
    with use_backend(backend):
        y = gated_rms_norm(gate_up, packed, scales, scales, 32, 1e-6)
        torch.testing.assert_close(y, functional.rms_norm(product, (33,), eps=1e-6))
        torch.testing.assert_close(gated_rms_norm(gate_up, *NO_NORM), product)


def test_gated_norm_rejects_what_does_not_fit():
    gate_up = torch.zeros(2, 66)
    packed = pack_trits_reference(torch.ones(1, 33, dtype=torch.int8))
    scales = torch.zeros(1, 2, dtype=torch.int8)
    with pytest.raises(ValueError, match="two halves"):
        gated_rms_norm(gate_up[:, :65], *NO_NORM)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        gated_rms_norm(gate_up.double(), *NO_NORM)
    with pytest.raises(ValueError, match="not rows of 32 weights"):
        gated_rms_norm(gate_up[:, :64], packed[:, 1:2], scales, scales, 32, 1e-6)
    with pytest.raises(ValueError, match="one packed row"):
        gated_rms_norm(gate_up, packed.repeat(2, 1), scales, scales, 32, 1e-6)
    with pytest.raises(ValueError, match=r"need grad_y of torch.float32 \(2, 33\)"):
        gated_rms_norm_backward(gate_up, gate_up, *NO_NORM)
