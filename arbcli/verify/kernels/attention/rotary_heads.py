"""Verification of `arbcli.kernels.attention.rotary_heads`."""

import torch
from torch import Tensor

from arbcli.kernels.attention.rotary_heads import no_gains, rotary_heads, rotary_heads_backward
from arbcli.verify.kernels.attention.rotary_norm import normalise_reference, rotate_reference
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums


def rotary_heads_reference(
    qkv: Tensor, gains: Tensor | None, cos: Tensor, sin: Tensor, kv: int, eps: float | None
) -> Tensor:
    """Compute the reference result of `rotary_heads`, in float64."""
    x = qkv[:, :, : qkv.shape[2] - kv].to(torch.float64)
    z = x if eps is None else normalise_reference(x, eps)
    if gains is not None:
        key_rows = torch.arange(x.shape[2], device=x.device) >= x.shape[2] - kv
        z = z * gains.to(torch.float64)[key_rows.long()]
    return rotate_reference(z, cos[:, None], sin[:, None])


def rotary_heads_backward_reference(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, gains: Tensor | None,
    cos: Tensor, sin: Tensor, eps: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `rotary_heads_backward` by autograd through the reference."""
    grads = (grad_q, grad_k, grad_v)
    grad_q, grad_k, grad_v = (grad.transpose(1, 2).to(torch.float64) for grad in grads)
    kv = grad_k.shape[2]
    x = qkv.detach().to(torch.float64).requires_grad_()
    g = None if gains is None else gains.detach().to(torch.float64).requires_grad_()
    with torch.enable_grad():
        y = rotary_heads_reference(x, g, cos, sin, kv, eps)
        sources = (x,) if g is None else (x, g)
        grad_sources = torch.autograd.grad(y, sources, torch.cat((grad_q, grad_k), dim=2))
    grad_sources[0][:, :, -kv:] = grad_v
    return grad_sources[0], no_gains(qkv) if g is None else grad_sources[1]


_GATE = float32_sums("of squares, and over all heads")


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    batch, heads, kv, half = (
        1 + rng.integer(3), 1 + rng.integer(4), 1 + rng.integer(3), 2 + min(k, 64)
    )  # fmt: skip
    angle = rng.reals(m, half, dtype=torch.float32).contiguous()
    qkv = rng.reals(batch * m * (heads + 2 * kv), 2 * half).contiguous()
    gains = None
    if rng.integer(3) != 1:
        gains = rng.reals(2, 2 * half, dtype=torch.float32).contiguous()
    eps = None if gains is None and rng.integer(2) else 0.1
    qkv = qkv.view(batch, m, heads + 2 * kv, 2 * half)
    return qkv, gains, angle.cos(), angle.sin(), kv, eps


def _draw_backward(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    qkv, gains, cos, sin, kv, eps = _draw(rng, group_size, m, n, k)
    batch, length, heads, width = qkv.shape
    grads = [
        rng.reals(batch * count * length, width).reshape(batch, count, length, width)
        for count in (heads - 2 * kv, kv, kv)
    ]
    return *grads, qkv, gains, cos, sin, eps


rotary_heads_verification = Verification(
    rotary_heads, rotary_heads_reference, gate=_GATE,
    draw=_draw, needs_rows=True,
)  # fmt: skip
rotary_heads_backward_verification = Verification(
    rotary_heads_backward, rotary_heads_backward_reference, gate=_GATE,
    draw=_draw_backward, needs_rows=True,
)  # fmt: skip
