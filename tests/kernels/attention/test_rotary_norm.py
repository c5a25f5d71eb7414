"""The rotated and normalised queries and keys: what the cases of the specs do not say."""

import torch

from arbcli.kernels.attention.rotary_norm import rotary_norm_, rotary_norm_backward
from arbcli.model.baselines import FloatRotaryNorm
from arbcli.model.layers.rotary import rotary_table


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_gradient_equals_autograd_of_the_float_twin():
    qkv = random(2, 5, 3, 2, 12).requires_grad_()
    parts = FloatRotaryNorm(5, 12)(qkv)
    grads = [random(2, 2, 5, 12) * (index + 1) for index in range(3)]
    torch.autograd.backward(parts, grads)
    ours, table = qkv.detach().clone(), rotary_table(5, 12, torch.device("cpu"))
    r = rotary_norm_(ours, *table, 1e-6)
    for part, expected in zip(ours.permute(2, 0, 3, 1, 4), parts, strict=True):
        torch.testing.assert_close(part, expected)
    grad = rotary_norm_backward(*grads, ours, r, *table)
    torch.testing.assert_close(grad, qkv.grad)
