"""Verification of `arbcli.kernels.attention.attend_parts`."""

import torch
from torch import Tensor

from arbcli.kernels.attention.attend_parts import (
    MAX_PARTS,
    WIDTHS,
    AttentionParts,
    attend_parts,
    sharing,
)
from arbcli.verify.kernels.attention.decode_attention import rotated_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def attend_parts_reference(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    eps: float, max_parts: int = MAX_PARTS,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the values, totals and ring of `attend_parts`, in float64.

    Query and key are rounded to bf16. Parts that the kernel does not write are 0.
    """
    p, (heads, window, width) = int(position), keys.shape
    parts, _, span = sharing(window, width, max_parts)
    x, keys, values = (part.to(torch.float64) for part in (qkv, keys, values))
    q, k = rotated_reference(x, cos[p], sin[p], eps).to(qkv.dtype).to(torch.float64)
    keys[:, p % window], values[:, p % window] = k, x[2]
    means = torch.zeros(parts, heads, width, dtype=torch.float64, device=qkv.device)
    totals = means.new_zeros(parts, heads)
    seen = torch.arange(min(p + 1, window), device=qkv.device)
    for part in range(parts):
        slots = seen[seen // span % parts == part]
        for head in range(heads if len(slots) else 0):
            weight = torch.exp(keys[head, slots] @ q[head] / width**0.5)
            totals[part, head] = weight.sum()
            means[part, head] = weight @ values[head, slots] / weight.sum()
    return means.flatten(1), totals, keys, values


def _append_state(inputs: tuple, parts: AttentionParts) -> tuple[Tensor, ...]:
    """Return the result and the rings; parts that are not written are zeros."""
    _, keys, values, position, *_ = inputs
    used = torch.arange(len(parts.totals), device=keys.device)[:, None] * parts.span <= position
    sums, totals = (torch.where(used, part, 0) for part in parts[:2])
    return sums, totals, keys, values


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    heads, width, position = 1 + rng.integer(3), WIDTHS[k % 2], rng.integer(3 * n)
    qkv = rng.reals(3 * heads, width, dtype=torch.bfloat16).contiguous().view(3, heads, width)
    rings = [rng.reals(heads * n, width, dtype=torch.bfloat16).contiguous() for _ in range(2)]
    angle = rng.reals(position + 1, width // 2, dtype=torch.float32).contiguous()
    return (
        # a ring begins at a multiple of 16 bytes
        qkv, *(ring.clone().view(heads, n, width) for ring in rings), rng.scalar(position),
        angle.cos(), angle.sin(), 0.1, rng.pick((1, 3, MAX_PARTS)),
    )  # fmt: skip


attend_parts_verification = Verification(
    attend_parts, attend_parts_reference, gate=Gate(
        relative=2.5e-3,
        reason="parts are rounded to bf16 once; where query and key are rounded otherwise than in"
        " float64, in the last bit, weights differ by less"
    ),
    compared=_append_state, draw=_draw, needs_rows=False,
)  # fmt: skip
