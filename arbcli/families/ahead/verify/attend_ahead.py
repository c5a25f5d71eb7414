"""Verification of `arbcli.families.ahead.kernels.attend_ahead`."""

import torch
from torch import Tensor

from arbcli.families.ahead.kernels.attend_ahead import KEEP_ACCEPTED, MAX_AHEAD, attend_ahead
from arbcli.kernels.attention.attend_parts import MAX_PARTS, WIDTHS, sharing
from arbcli.verify.kernels.attention.attend_parts import attend_parts_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def attend_ahead_reference(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    new: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    max_parts: int = MAX_PARTS,
) -> tuple[Tensor, ...]:
    """Compute the result of `attend_ahead`, its new keys and values, and the rings, in float64."""
    before, means, stored = (keys, values), [], []
    for row, row_qkv in enumerate(qkv):
        at = int(position) + row
        mean, total, keys, values = attend_parts_reference(
            row_qkv, keys, values, torch.tensor(at), cos, sin, eps, max_parts
        )
        shares = (total / total.sum(0))[..., None]  # (S, heads, 1)
        means.append((shares * mean.unflatten(1, (total.shape[1], -1))).sum(0).flatten())
        slot = at % keys.shape[1]
        stored.append(torch.stack([keys[:, slot], values[:, slot]]))
    return torch.stack(means), torch.stack(stored, dim=1), *before


def keep_accepted_reference(
    keys: Tensor, values: Tensor, new: Tensor, position: Tensor, accepted: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one pair of rings after `keep_accepted_`, one vector at a time."""
    keys, values = keys.clone(), values.clone()
    for row in range(int(accepted)):
        for head in range(len(keys)):
            slot = (int(position) + row) % keys.shape[1]
            keys[head, slot], values[head, slot] = new[0, row, head], new[1, row, head]
    return keys, values


def _append_rings(inputs: tuple, y: Tensor) -> tuple[Tensor, ...]:
    """Return the result, the new keys and values, and the rings, which must not change."""
    _, keys, values, new, *_ = inputs
    return y, new, keys, values


def _draw_ahead(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    rows, heads, width = 2 + m % (MAX_AHEAD - 1), 1 + rng.integer(3), WIDTHS[k % 2]
    slots, max_parts, half = max(n, rows), rng.pick((MAX_PARTS, 1, 3)), torch.bfloat16
    parts, _, span = sharing(slots, width, max_parts)
    # between two positions another part begins
    position = span * (1 + rng.integer(parts)) - 1 if rng.plain else rng.integer(3 * n)
    qkv = rng.reals(rows * 3 * heads, width, dtype=half).contiguous().view(rows, 3, heads, width)
    rings = [rng.reals(heads * slots, width, dtype=half).contiguous() for _ in range(2)]
    angle = rng.reals(position + rows, width // 2, dtype=torch.float32).contiguous()
    return (
        qkv, *(ring.clone().view(heads, slots, width) for ring in rings),
        torch.zeros(2, rows, heads, width, device=rng.device, dtype=half), rng.scalar(position),
        angle.cos(), angle.sin(), 0.1, max_parts,
    )  # fmt: skip


attend_ahead_verification = Verification(
    attend_ahead, attend_ahead_reference, shapes=((2, 300, 1), (4, 99, 0), (6, 5, 0)),
    gate=Gate(
        relative=4e-3,
        reason="as of `attend_parts`; then the mean of rounded parts is rounded to bf16 again"
    ),
    compared=_append_rings, draw=_draw_ahead, needs_rows=False,
)  # fmt: skip


def _draw_kept(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    rows, heads, width = 1 + m % MAX_AHEAD, 1 + rng.integer(3), 1 + k
    slots = max(n, rows)
    rings = [rng.reals(heads * slots, width).contiguous() for _ in range(2)]
    new = rng.reals(2 * rows * heads, width).contiguous().view(2, rows, heads, width)
    return (
        *(ring.view(heads, slots, width) for ring in rings), new, rng.scalar(rng.integer(3 * n)),
        rng.scalar(1 + rng.integer(rows)),
    )  # fmt: skip


keep_accepted_verification = Verification(
    KEEP_ACCEPTED, keep_accepted_reference, draw=_draw_kept, needs_rows=False, timed=False
)
