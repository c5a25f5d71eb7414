"""Verification of `arbcli.families.compressed.kernels.compressed_attention_backward`."""

from typing import Any

import torch
from torch import Tensor

from arbcli.families.compressed.kernels.compressed_attention import Sight
from arbcli.families.compressed.kernels.compressed_attention_backward import (
    compressed_attention_backward,
)
from arbcli.families.compressed.verify import compressed_attention
from arbcli.verify.kernels.attention.rotary_norm import rotate_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification, gradients_of


def rounded_attention_gradients(*inputs: Any) -> tuple[Tensor, ...]:
    """Compute the gradients in float64, with the kernels' roundings to the dtype of x.

    q, do, p and ds are rounded to bfloat16 for products, and so is each group's sum of a selected
    entry. Each rounding alone gives an error of 1e-3 to 2e-3, all together 3e-3 to 4e-3.
    """
    return _gradients_and_terms(*inputs)[0]


def gradient_terms(*inputs: Any) -> tuple[Tensor, ...]:
    """Compute what the gradients sum.

    That of a sink is a single sum over all bytes, of y . dy with y rounded to bfloat16: of one head
    and two bytes it can be 100 times smaller than its terms. That of x is what the norm leaves of
    the gradient of q: with a head width of 2, one direction of two.
    """
    return _gradients_and_terms(*inputs)[1]


def _gradients_and_terms(
    grad_y: Tensor, y: Tensor, logs: Tensor, x: Tensor, recent: Tensor, entries: Tensor,
    chosen: Tensor | None, sink: Tensor, cos: Tensor, sin: Tensor, sight: Sight, eps: float,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    dtype, (length, heads, width), near = x.dtype, x.shape[1:], recent.shape[1]
    cos, sin = cos[:, None], sin[:, None]

    def rounded(part: Tensor) -> Tensor:
        return part.to(dtype).double()

    grad_y, y, x, recent, entries = (part.double() for part in (grad_y, y, x, recent, entries))
    heads_per_kv = heads // recent.shape[2]
    vectors = torch.cat((recent, entries), dim=1).repeat_interleave(heads_per_kv, dim=2)
    place = torch.arange(length, device=x.device)[:, None]
    ago = place + near - length - torch.arange(near, device=x.device)
    complete = (sight.start + place + 1) // sight.ratio
    j = torch.arange(entries.shape[1] + 1, device=x.device)  # the last row stands for -1
    far = ((j < complete) & (j >= complete - sight.max_entries)).expand(len(x), -1, -1)
    if chosen is not None:
        mine = chosen[:, (complete - complete[0])[:, 0]].long()  # (B, T, k)
        far = torch.zeros_like(far).scatter(2, mine.where(mine >= 0, j[-1]), True)
    window_mask = ((ago >= 0) & (ago < sight.window)).expand(len(x), -1, -1)
    seen = torch.cat((window_mask, far[..., :-1]), dim=2)[:, :, None]

    r = (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    q, do = (rounded(rotate_reference(part, cos, sin)) for part in (x * r, grad_y))
    s, dp = (torch.einsum("bthd,bjhd->bthj", part, vectors) for part in (q, do))
    p = torch.where(seen, (s * width**-0.5 - logs[..., None]).exp(), 0)
    delta = (grad_y * y).sum(dim=-1)
    p, ds = rounded(p), rounded(p * (dp - delta[..., None]) * width**-0.5)

    def sum_queries(queries: Tensor) -> Tensor:
        grad = torch.einsum("bthj,bthd->bjhd", p[:, queries], do[:, queries])
        grad += torch.einsum("bthj,bthd->bjhd", ds[:, queries], q[:, queries])
        return grad.unflatten(2, (-1, heads_per_kv)).sum(dim=3)

    grad_recent, grad_entries = sum_queries(place[:, 0]).tensor_split([near], dim=1)
    if chosen is not None:
        groups = [place[complete == g] for g in complete.unique()]
        group_sums = [rounded(sum_queries(group)[:, near:]) for group in groups]
        grad_entries = torch.stack(group_sums).sum(0)
    grad_q = rotate_reference(torch.einsum("bthj,bjhd->bthd", ds, vectors), cos, -sin)
    grad_x = (grad_q - x * r * (grad_q * x * r).mean(dim=-1, keepdim=True)) * r
    sink_shares = (sink - logs).exp()
    grad_sink = -(sink_shares * delta).sum(dim=(0, 1))
    gradients = grad_x.to(dtype), grad_recent, grad_entries, grad_sink
    sink_terms = sink_shares[..., None] * grad_y * y
    return gradients, (grad_q * r, grad_recent, grad_entries, sink_terms)


GATE = Gate(
    relative=1e-5, peer_slack=0.5,
    reason="float32 sums; in bf16 the peer rounds what products take and groups keep, else nothing",
)  # fmt: skip


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    inputs = compressed_attention.draw_attention(rng, group_size, m, n, k)
    y, logs, *_ = compressed_attention.compressed_attention_verification.torch(*inputs)
    return rng.reals(*y.shape), y, logs, *inputs


compressed_attention_backward_verification = Verification(
    compressed_attention_backward,
    gradients_of(compressed_attention.compressed_attention_reference, (0, 1, 2, 4), ignored=(1, 2)),
    gate=GATE, draw=_draw, peer=rounded_attention_gradients, terms=gradient_terms, needs_rows=True,
)  # fmt: skip
