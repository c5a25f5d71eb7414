"""Verification of `arbcli.families.compressed.kernels.compress_blocks`."""

import torch
from torch import Tensor

from arbcli.families.compressed.kernels.compress_blocks import (
    compress_blocks,
    compress_blocks_backward,
    grad_beta,
)
from arbcli.verify.kernels.attention.rotary_norm import normalise_reference, rotate_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification, gradients_of


def compress_blocks_reference(
    x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `compress_blocks` in float64, one byte and one block at a time."""
    x, m = x.double(), beta.shape[1]
    batch, length, _ = x.shape
    x, beta = x.view(batch, length, 3, heads, -1), beta.double().view(heads, -1, m)

    def rotated(v: Tensor, t: int) -> Tensor:
        return rotate_reference(v, cos[t], sin[t])

    normal = normalise_reference(x[:, :, 0], eps)
    recent = torch.stack([rotated(normal[:, t], t) for t in range(length)], dim=1)
    still, entries = [], []
    for j in range(length // m):
        weights = torch.stack([(x[:, j * m + i, 2] + beta[..., i]).exp() for i in range(m)])
        values = torch.stack([x[:, j * m + i, 1] for i in range(m)])
        mixed = (weights * values).sum(dim=0) / weights.sum(dim=0)
        still.append(normalise_reference(mixed, eps))
        entries.append(rotated(still[-1], j * m))
    if not still:
        none = recent[:, :0]
        return recent, none, none
    return recent, torch.stack(entries, dim=1), torch.stack(still, dim=1)


def rounded_block_gradients(
    grad_recent: Tensor, grad_entries: Tensor, x: Tensor, beta: Tensor, cos: Tensor, sin: Tensor,
    heads: int, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `compress_blocks_backward`, summing rounded gate gradients to that of beta.

    The gradient of a bias after a bf16 product is rounded in the same way.
    """
    grads = compress_blocks_backward.torch(grad_recent, grad_entries, x, beta, cos, sin, heads, eps)
    return grads[0], grad_beta(grads[0], beta)


_GATE = Gate(
    relative=1e-5, peer_slack=0.5,
    reason="float32 sums over a block; in bf16 what the gradient of beta adds up is rounded",
)  # fmt: skip


def _draw_blocks(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    heads, half, ratio = rng.pick((1, 2)), 1 + min(k, 40), 2 + rng.integer(7)
    batch, length = rng.pick((1, 2)), 1 + min(m, 60)
    x = rng.reals(batch, length, 6 * heads * half)
    beta = rng.reals(2 * heads * half, ratio, dtype=torch.float32)
    angle = rng.reals(length, half, dtype=torch.float32)
    return x, beta, angle.cos(), angle.sin(), heads, 1e-6


def _draw_backward(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    inputs = _draw_blocks(rng, group_size, m, n, k)
    recent, entries, _ = compress_blocks.torch(*inputs)
    return *(rng.reals(*t.shape, dtype=torch.float32) for t in (recent, entries)), *inputs


compress_blocks_verification = Verification(
    compress_blocks, compress_blocks_reference, gate=_GATE, draw=_draw_blocks,
    torch_is_peer=True, needs_rows=True,
)  # fmt: skip
compress_blocks_backward_verification = Verification(
    compress_blocks_backward, gradients_of(compress_blocks_reference, (0, 1), 2), gate=_GATE,
    draw=_draw_backward, peer=rounded_block_gradients, needs_rows=True,
)  # fmt: skip
