"""Verification of `arbcli.kernels.attention.dropped_attention`."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.kernels.attention.dropped_attention import dropped_attention, dropped_attention_backward
from arbcli.verify.kernels.attention.causal_attention_backward import (
    GATE,
    causal_attention_float64,
    random_attention,
    rounded_causal_gradients,
)
from arbcli.verify.kernels.update.random_bits import random_bits_reference
from arbcli.verify.verification import CaseGenerator, Verification, gradients_of


def _factors(q: Tensor, key: Tensor, rate: float) -> Tensor:
    """Compute the dropout factors of attention weights, (B, heads, T, T) float64."""
    batch, heads, length, _ = q.shape
    words = random_bits_reference(int(key), batch * heads * length, length).to(q.device)
    mask = (words >= round(rate * 2**32)).view(batch, heads, length, length)
    return mask.double() / (1 - rate)


def dropped_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """Attend in float64; return the result and the log-sum-exp of each query."""
    return causal_attention_float64(q, k, v, _factors(q, key, rate))


def _rounded_attention(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """Attend in float64, with unnormalised weights rounded to the dtype of the inputs."""
    factors, dtype = _factors(q, key, rate), q.dtype
    q, k, v = (part.double() for part in (q, k, v))
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(
        torch.ones_like(factors, dtype=torch.bool).triu(1), -torch.inf
    )
    p = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    y = (p * factors).to(dtype).double() @ v / p.sum(dim=-1, keepdim=True)
    return y.to(dtype), scores.logsumexp(dim=-1).float()


def _rounded_gradients(
    grad_y: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logs: Tensor, key: Tensor,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients in float64, with p and e rounded to bfloat16 as in products."""
    return rounded_causal_gradients(grad_y, q, k, v, y, logs, _factors(q, key, rate))


def _draw_inputs(
    generator: torch.Generator, shape: tuple[int, int, int, int], dtype: torch.dtype, rate: float
) -> tuple[tuple, tuple]:
    """Draw the inputs of the forward and of the backward, on the CPU."""
    grad_y, q, k, v, _, _ = random_attention(generator, shape, dtype)
    key = torch.tensor(shape[2] * 77 - 2**30, dtype=torch.int32)
    y, logs = dropped_attention_reference(q, k, v, key, rate)
    return (q, k, v, key, rate), (grad_y, q, k, v, y.to(dtype), logs.float(), key, rate)


def _draw(
    rng: CaseGenerator, group_size: int, m: int, n: int, k: int, *, backward: bool = False
) -> tuple:
    length = 2 + min(m, rng.pick((1, 40, 150)))
    shape = rng.pick((1, 2)), rng.pick((1, 3)), length, rng.pick((16, 32, 64))
    rate = rng.pick((0.0, 0.1, 0.5, 0.9))
    inputs = _draw_inputs(rng.seeded(), shape, rng.dtype, rate)[backward]
    return tuple(
        rng.view(part.to(rng.device))
        if isinstance(part, Tensor) and part.ndim == 4
        else part.to(rng.device) if isinstance(part, Tensor) else part
        for part in inputs
    )  # fmt: skip


dropped_attention_verification = Verification(
    dropped_attention, dropped_attention_reference, gate=GATE,
    draw=_draw, peer=_rounded_attention, needs_rows=True,
    library=lambda q, k, v, _key, rate: partial(
        functional.scaled_dot_product_attention, q, k, v, dropout_p=rate, is_causal=True
    ),
)  # fmt: skip
dropped_attention_backward_verification = Verification(
    dropped_attention_backward,
    gradients_of(dropped_attention_reference, range(3), ignored=(4, 5)), gate=GATE,
    draw=partial(_draw, backward=True), peer=_rounded_gradients, needs_rows=True,
)  # fmt: skip
