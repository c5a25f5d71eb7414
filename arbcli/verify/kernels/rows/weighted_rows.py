"""Verification of `arbcli.kernels.rows.weighted_rows`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.rows import weighted_rows as weighted
from arbcli.verify.kernels.codec.decode_digits import (
    decode_digits_reference,
    decode_large,
    fix_float32,
)
from arbcli.verify.verification import CaseGenerator, Gate, Verification, filled, no_rows


def weighted_rows_reference(
    ids: Tensor, weights: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute the reference result of `weighted_rows`, one slot at a time, in float64."""
    table, ids = _append_zero_row(decode(packed), ids)
    weights = weights.double().masked_fill(ids == packed.out_features, 0)  # even if it is NaN
    y = table.new_zeros(len(ids), packed.in_features)
    for j in range(ids.shape[1]):
        y += weights[:, j, None] * table[ids[:, j]]
    return y


def weighted_rows_grad_weights_reference(
    grad_y: Tensor, ids: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute `weighted_rows_grad_weights` in float64, one slot at a time."""
    table, ids = _append_zero_row(decode(packed), ids)
    grad = table.new_zeros(ids.shape)
    for j in range(ids.shape[1]):
        grad[:, j] = (grad_y.double() * table[ids[:, j]]).sum(dim=1)
    return grad


def _append_zero_row(table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Append a row of zeros, in float64, for ids out of range."""
    inside = (ids >= 0) & (ids < len(table))
    zeros = table.new_zeros(1, table.shape[1])
    return torch.cat([table, zeros]).double(), ids.where(inside, len(table))


def weighted_rows_grad_reference(
    grad_y: Tensor, weights: Tensor, tokens: Tensor, order: Tensor, bounds: Tensor
) -> Tensor:
    """Compute the reference result of `weighted_rows_grad`, in float64."""
    sizes = bounds.diff()
    rows = torch.arange(len(sizes), device=bounds.device).repeat_interleave(sizes)
    slots = order[: len(rows)]
    grad = grad_y.new_zeros(len(sizes), grad_y.shape[1], dtype=torch.float64)
    return grad.index_add_(0, rows, weights[slots, None].double() * grad_y[tokens[slots]])


def _scale_path(group_size: int) -> tuple[bool, bool]:
    """Return whether groups are at least as wide as wide chunks, and whether chunks are padded."""
    return group_size >= 8, group_size % 4 > 0


SHAPES = ((2048, 32, 5_000_000, 64, 76), (2048, 8, 131_072, 1024, 8))
"""(M, k, V, D, V divided by the number of touched rows)."""


def _sum_bags(ids: Tensor, weights: Tensor, packed: Packed) -> Callable:
    """Return torch's `embedding_bag` of the decoded table in bfloat16."""
    ids, table = ids.clamp(0, packed.out_features - 1), decode_weight(packed)
    return partial(embedding_bag, ids, table, mode="sum", per_sample_weights=weights.bfloat16())


def _draw_ids(rng: CaseGenerator, m: int, n: int, min_slots: int = 64) -> Tensor:
    """Draw (m, k) ids, at least `min_slots` in total, some of them out of range."""
    return rng.integers(-1, n, m, max(1 + rng.integer(12), -(-min_slots // m)), dtype=torch.int64)


def _limit_tokens(m: int, k: int) -> int:
    """Limit the number of tokens of wide rows, to three blocks with a partial last one."""
    return min(m, 5) if k > 64 else m


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    m = max(_limit_tokens(m, k), -(-64 // k))  # so that few sums cancel
    ids = _draw_ids(rng, m, n, min_slots=m)
    weights = rng.reals(*ids.shape, dtype=torch.float32)
    weights.masked_fill_((ids < 0) | (ids >= n), torch.nan)
    return ids, weights, rng.packed(n, k, group_size)


def _draw_grad_weights(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    packed = rng.packed(n, k, group_size)
    m = max(_limit_tokens(m, k), 9)  # so that few sums cancel, also if all slots have one id
    return rng.reals(m, k), _draw_ids(rng, m, n), packed


def _draw_grad(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    ids = _draw_ids(rng, m, n)
    tokens = torch.arange(ids.numel(), device=rng.device) // ids.shape[1]
    _, order, bounds, _ = weighted.touched_rows(ids.flatten(), n)
    weights = rng.reals(ids.numel(), dtype=torch.float32)
    return rng.reals(m, k), weights, rng.view(tokens), order, bounds


_CHANGED: dict[str, dict[str, Any]] = {
    "one id": {"ids": filled(2)},
    "far outside": {"ids": lambda x: torch.where(x < 0, 1 << 40, x)},
}
weighted_rows_verification = Verification(
    weighted.weighted_rows, weighted_rows_reference,
    gate=Gate(relative=1e-6, reason="float32 sums of up to tens of rows"),
    changed=_CHANGED | {
        "one id": {"ids": filled(2), "weights": torch.nan_to_num},
        "no tokens": {"ids": no_rows, "weights": no_rows},
        "no slots": {"ids": lambda x: x[:, :0], "weights": lambda x: x[:, :0]},
        "empty table": {"ids": filled(3), "packed": lambda x: x.rows(slice(0)),
                        "weights": filled(torch.nan)},
    },
    triton=fix_float32(weighted.weighted_rows.triton),
    torch=fix_float32(weighted.weighted_rows.torch), draw=_draw,
    large_reference=partial(weighted_rows_reference, decode=decode_large), library=_sum_bags,
    looked_up="packed", needs_rows=True, scale_path=_scale_path,
)  # fmt: skip
weighted_rows_grad_weights_verification = Verification(
    weighted.weighted_rows_grad_weights, weighted_rows_grad_weights_reference,
    gate=Gate(relative=1e-6, reason="float32 sums of up to thousands of columns"),
    changed=_CHANGED | {
        "no tokens": {"ids": no_rows, "grad_y": no_rows},
        "no slots": {"ids": lambda x: x[:, :0]},
        "empty table": {"packed": lambda x: x.rows(slice(0))},
    },
    draw=_draw_grad_weights, looked_up="packed",
    large_reference=partial(weighted_rows_grad_weights_reference, decode=decode_large),
    needs_rows=True, scale_path=_scale_path,
)  # fmt: skip
weighted_rows_grad_verification = Verification(
    weighted.WEIGHTED_ROWS_GRAD, weighted_rows_grad_reference,
    gate=Gate(relative=1e-6, reason="float32 sums of up to thousands of slots"),
    shapes=((300, 3, 35), (2 * weighted.FEW, 17, 35)),  # rows of many slots, and of about `FEW`
    changed={"no slots": {
        "weights": no_rows, "tokens": no_rows, "order": no_rows, "bounds": torch.zeros_like,
    }},
    triton=fix_float32(weighted.WEIGHTED_ROWS_GRAD.triton),
    torch=fix_float32(weighted.WEIGHTED_ROWS_GRAD.torch), draw=_draw_grad, needs_rows=True,
)  # fmt: skip
