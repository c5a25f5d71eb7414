"""Verification of `arbcli.kernels.attention.rotary_norm`."""

import torch
from torch import Tensor

from arbcli.kernels.attention.rotary_norm import rotary_norm_, rotary_norm_backward
from arbcli.verify.verification import CaseGenerator, Verification, float32_sums


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (..., d) by (..., d / 2) angles, as complex numbers in float64."""
    rotated = torch.complex(*x.double().chunk(2, dim=-1)) * torch.complex(
        cos.double(), sin.double()
    )
    return torch.cat((rotated.real, rotated.imag), dim=-1)


def normalise_reference(x: Tensor, eps: float) -> Tensor:
    """Divide (..., d) by the root of its mean square plus eps."""
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def _rotary_norm_float64(qkv: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Rotate and normalise queries and keys, and copy values: (B, T, 3, heads, d) float64."""
    qkv = qkv.to(torch.float64)
    normal = normalise_reference(rotate_reference(qkv, cos[:, None, None], sin[:, None, None]), eps)
    return torch.cat([normal[:, :, :2], qkv[:, :, 2:]], dim=2)


def rotary_norm_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the result of `rotary_norm_` and its `qkv`, in float64."""
    squares = qkv[:, :, :2].to(torch.float64).square().mean(dim=-1)
    return _rotary_norm_float64(qkv, cos, sin, eps), (squares + eps) ** -0.5


def rotary_norm_backward_reference(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Compute `rotary_norm_backward` in float64, rotating by -t."""
    grads = (part.transpose(1, 2).double() for part in (grad_q, grad_k, grad_v))
    grad = torch.stack((*grads,), dim=2)
    y, grad_y = qkv[:, :, :2].to(torch.float64), grad[:, :, :2]
    grad_y = (grad_y - y * (y * grad_y).mean(dim=-1, keepdim=True)) * r.double()[..., None]
    rotated = rotate_reference(grad_y, cos[:, None, None], -sin[:, None, None])
    return torch.cat([rotated, grad[:, :, 2:]], dim=2)


_GATE = float32_sums("of at most 128 squares")


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    batch, heads, half = 1 + rng.integer(3), 1 + rng.integer(4), 2 + min(k, 64)
    angle = rng.reals(m, half, dtype=torch.float32)
    qkv = rng.reals(batch * m * 3 * heads, 2 * half).contiguous()
    angle = angle.contiguous()
    return qkv.view(batch, m, 3, heads, 2 * half), angle.cos(), angle.sin(), 0.1


def _draw_backward(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    qkv, cos, sin, eps = _draw(rng, group_size, m, n, k)
    r = rotary_norm_verification.torch(qkv, cos, sin, eps)[1]
    batch, length, _, heads, width = qkv.shape
    rows = [rng.reals(batch * heads * length, width) for _ in range(3)]
    grads = [grad.reshape(batch, heads, length, width) for grad in rows]
    return *grads, qkv, r, cos, sin


def _append_qkv(inputs: tuple, r: Tensor) -> tuple[Tensor, Tensor]:
    return inputs[0], r


rotary_norm_verification = Verification(
    rotary_norm_, rotary_norm_reference, gate=_GATE, compared=_append_qkv, draw=_draw,
    needs_rows=True,
)  # fmt: skip
rotary_norm_backward_verification = Verification(
    rotary_norm_backward, rotary_norm_backward_reference, gate=_GATE,
    draw=_draw_backward, needs_rows=True,
)  # fmt: skip
