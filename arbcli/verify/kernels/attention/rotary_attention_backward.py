"""Verification of `arbcli.kernels.attention.rotary_attention_backward`."""

import torch
from torch import Tensor

from arbcli.kernels.attention.rotary_attention_backward import rotary_attention_backward
from arbcli.kernels.attention.rotary_norm import unpack_qkv
from arbcli.verify.kernels.attention.causal_attention_backward import (
    causal_attention_backward_reference,
    causal_attention_float64,
    rounded_causal_gradients,
)
from arbcli.verify.kernels.attention.rotary_norm import (
    rotary_norm_backward_reference,
    rotary_norm_verification,
)
from arbcli.verify.verification import CaseGenerator, Gate, Verification

EPS = 1e-6


def rotary_attention_backward_reference(
    grad_y: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor, y: Tensor, logs: Tensor
) -> Tensor:
    """Compute `rotary_attention_backward` by both references, in float64."""
    q, k, v = causal_attention_backward_reference(grad_y, *unpack_qkv(qkv), y, logs)
    return rotary_norm_backward_reference(q, k, v, qkv, r, cos, sin)


def rounded_gradient(
    grad_y: Tensor, qkv: Tensor, r: Tensor, cos: Tensor, sin: Tensor, y: Tensor, logs: Tensor
) -> Tensor:
    """Compute the gradient in float64, with p, e and the gradients of queries and keys rounded."""
    grads = rounded_causal_gradients(grad_y, *unpack_qkv(qkv), y, logs)
    return rotary_norm_backward_reference(*grads, qkv, r, cos, sin).to(qkv.dtype)


def _draw_inputs(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> tuple:
    """Draw inputs for (B, T, heads, d): the saved tensors of the forward pass, and a gradient."""
    batch, length, heads, width = shape
    qkv = torch.randn(batch, length, 3, heads, width, generator=generator).to(dtype)
    angle = 7 * torch.randn(length, width // 2, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    qkv, r = rotary_norm_verification.torch(qkv, cos, sin, EPS)
    y, logs = causal_attention_float64(*unpack_qkv(qkv))
    grad_y = torch.randn(batch, length, heads, width, generator=generator).to(dtype)
    return grad_y.transpose(1, 2), qkv, r, cos, sin, y.to(dtype), logs.float()


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    length = 2 + min(m, rng.pick((1, 40, 150)))
    shape = rng.pick((1, 2)), length, rng.pick((1, 3)), rng.pick((16, 32, 64))
    grad_y, qkv, r, cos, sin, y, logs = _draw_inputs(rng.seeded(), shape, rng.dtype)
    grad_y, y = (rng.view(part.to(rng.device)) for part in (grad_y, y))
    return grad_y, *(part.to(rng.device) for part in (qkv, r, cos, sin)), y, logs.to(rng.device)


rotary_attention_backward_verification = Verification(
    rotary_attention_backward, rotary_attention_backward_reference, gate=Gate(
        relative=2e-5, peer_slack=0.2,
        reason="float32 sums; in bf16 the peer rounds what products take and what they give"
    ),
    draw=_draw, peer=rounded_gradient, needs_rows=True,
)  # fmt: skip
