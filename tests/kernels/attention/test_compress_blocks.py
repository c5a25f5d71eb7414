"""What the gradient of taps may differ by in bf16: the rounding of what it adds up, and no more."""

import torch

from arbcli.kernels.attention.compress_blocks import (
    compress_blocks_backward,
    rounded_block_gradients,
)


def test_a_peer_adds_up_rounded_gradients_of_gates():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 13, 36, generator=generator).bfloat16()
    beta, angle = torch.randn(12, 4, generator=generator), torch.randn(13, 3, generator=generator)
    grads = [torch.randn(2, count, 2, 6, generator=generator) for count in (13, 3)]
    inputs = (*grads, x, beta, angle.cos(), angle.sin(), 2, 1e-6)
    (grad_x, grad_beta), (same, exact) = (
        run(*inputs) for run in (rounded_block_gradients, compress_blocks_backward.torch)
    )
    assert torch.equal(grad_x, same)
    assert grad_beta.shape == beta.shape
    of_second = grad_x[:, 1:12:4, 24:].float().sum(dim=(0, 1))
    torch.testing.assert_close(grad_beta[:, 1], of_second)
    error = (grad_beta - exact).norm() / exact.norm()
    assert 1e-5 < error < 2**-8
