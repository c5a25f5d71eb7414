"""Gates that are packed for the backward pass."""

import pytest
import torch
from torch import Tensor

from arbcli.config.layer_spec import LayerSpec
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.norm import TernaryGate

ROWS, WIDTH, OUTPUTS = 80, 48, 32


def gradients(gate_up: Tensor, *, packs: bool, fp8: bool, normalise: bool) -> list[Tensor]:
    """Return a product of gated activations, and the gradients of gate and up and of the weight."""
    spec, of_weight = LayerSpec(dim=OUTPUTS, depth=1, ctx=ROWS), []
    gate = TernaryGate(WIDTH, spec, normalise=normalise)
    layer = TernaryLinear(OUTPUTS, WIDTH, spec, area="mlp")
    layer.weight.initialise(1, 0)
    if gate.weight:
        gate.weight.fill()
    layer.weight.number_format, gate.packs = "fp8" if fp8 else "bf16", packs
    layer.weight.sink = lambda tensor, grad, where=None: of_weight.append(grad)
    x = gate_up.clone().requires_grad_()
    y = layer(1 * x, gate, consumes=True)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *of_weight]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("fp8", [False, True])
def test_packed_gates_give_the_same_bits_if_their_numbers_are_not_far_apart(fp8, normalise):
    generator = torch.Generator().manual_seed(0)
    sign = 2 * torch.randint(0, 2, (ROWS, 2 * WIDTH), generator=generator) - 1
    size = torch.exp2(15 * torch.rand(ROWS, 2 * WIDTH, generator=generator) - 12)
    gate_up = (sign * size).bfloat16()
    with use_backend("torch"):
        kept, packed = (
            gradients(gate_up, packs=packs, fp8=fp8, normalise=normalise) for packs in (False, True)
        )
    assert len(kept) == len(packed) == 3
    assert all(map(torch.equal, kept, packed))
    assert all(part.count_nonzero() for part in packed)
