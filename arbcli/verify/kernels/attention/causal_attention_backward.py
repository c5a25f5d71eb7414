"""Verification of `arbcli.kernels.attention.causal_attention_backward`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.attention.causal_attention_backward import (
    causal_attention_backward,
    flash_attention_backward,
)
from arbcli.verify.verification import CaseGenerator, Gate, Verification, gradients_of


def causal_attention_float64(
    q: Tensor, k: Tensor, v: Tensor, factors: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Attend in float64; return the result and the log-sum-exp of each query.

    Each head of k and v serves a group of those of q. Weights are multiplied by `factors`,
    (B, heads, T, T), after the softmax.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(part.double().repeat_interleave(group, dim=1) for part in (k, v))
    length = q.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(later, -torch.inf)
    return scores.softmax(dim=-1) * factors @ v, scores.logsumexp(dim=-1)


causal_attention_backward_reference = gradients_of(
    causal_attention_float64, range(3), ignored=(4, 5)
)


def random_attention(
    generator: torch.Generator, shape: tuple[int, int, int, int], dtype: torch.dtype, group: int = 1
) -> tuple[Tensor, ...]:
    """Draw a gradient, normalised queries and keys, and values; compute y and its log-sum-exps.

    A head of keys and values serves `group` heads of queries.
    """
    batch, heads, *sizes = shape
    shapes = shape, shape, *[(batch, heads // group, *sizes)] * 2
    grad_y, q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    q, k = (torch.nn.functional.rms_norm(part, shape[-1:]) for part in (q, k))
    parts = [part.to(dtype) for part in (grad_y, q, k, v)]
    y, logs = causal_attention_float64(*parts[1:])
    return *parts, y.to(dtype), logs.float()


def rounded_causal_gradients(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logs: Tensor,
    factors: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients in float64, with p and e rounded to bfloat16 as in products."""
    dtype, scale = q.dtype, q.shape[3] ** -0.5
    group = q.shape[1] // k.shape[1]
    g, q, y = (part.double() for part in (grad_y, q, y))
    k, v = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    p = torch.exp(q @ k.mT * scale - logs.double()[..., None]).tril()
    e = p * (factors * (g @ v.mT) - (g * y).sum(dim=-1, keepdim=True))
    p, e = (part.to(dtype).double() for part in (p * factors, e))
    grad_k, grad_v = (
        part.unflatten(1, (-1, group)).sum(dim=2).to(dtype) for part in (e.mT @ q * scale, p.mT @ g)
    )
    return (e @ k * scale).to(dtype), grad_k, grad_v


def _flash_attention(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logs: Tensor
) -> Callable:
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    return partial(flash_attention_backward, grad_y, q, k, v, y, logs)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    generator = rng.seeded()
    length = 2 + min(m, rng.pick((1, 40, 150)))
    group = rng.pick((1, 1, 2))
    shape = rng.pick((1, 2)), rng.pick((1, 3)) * group, length, rng.pick((16, 32, 64))
    *parts, logs = random_attention(generator, shape, rng.dtype, group)
    return *(rng.view(part.to(rng.device)) for part in parts), logs.to(rng.device)


GATE = Gate(
    relative=2e-5, peer_slack=0.2,
    reason="float32 sums; in bf16 the peer rounds what products take, and nothing else",
)  # fmt: skip

causal_attention_backward_verification = Verification(
    causal_attention_backward, causal_attention_backward_reference, gate=GATE,
    draw=_draw, peer=rounded_causal_gradients, needs_rows=True, library=_flash_attention,
)  # fmt: skip
