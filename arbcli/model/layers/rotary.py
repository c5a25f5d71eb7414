"""Rotary positions: the table of angles, and queries and keys turned where they lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.kernels.attention.rotary_norm import rotary_norm_, rotary_norm_backward
from arbcli.model.layers.norm import NORM_EPS

ROTARY_BASE = 10000.0
MOST_SPARE_ROWS = 2**16
"""Of a table beyond the positions that a text has."""


def _compute_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    exact = {"device": device, "dtype": torch.float64}  # in float32 far positions lose digits
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, **exact) / head_dim)
    angle = torch.outer(torch.arange(length, **exact), frequency)
    return angle.cos().float(), angle.sin().float()


def _new_cache():
    return lru_cache(maxsize=8)(_compute_table)


_tables = _new_cache()


def rotary_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position's angles, (length, head_dim / 2) float32 each.

    A derived constant: it follows from the configuration, so it is cached here and no part of the
    state. Source: J. Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, eq. 15.
    """
    return _tables(length, head_dim, device)


def table_rows(positions: int, context: int) -> int:
    """Find the rows of the table for a text: whole contexts, so that texts can share it."""
    unit = min(context, MOST_SPARE_ROWS)
    return -(-positions // unit) * unit


@contextmanager
def fresh_tables() -> Iterator[None]:
    """Make tables anew inside, and forget them at the end: for who counts what a step leaves."""
    global _tables
    before, _tables = _tables, _new_cache()
    try:
        yield
    finally:
        _tables = before


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of (..., d) by angles that fit them; differentiable, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class _RotaryNorm(Function):
    """Turn and normalise queries and keys where they are; nothing else is kept of them."""

    @staticmethod
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor):
        r = rotary_norm_(qkv, cos, sin, NORM_EPS)
        ctx.save_for_backward(qkv, r, cos, sin)
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return rotary_norm_backward(list(grads), *ctx.saved_tensors), None, None


def rotary_norm(
    qkv: Tensor, table: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries and keys by the angles of their positions, and normalise each head.

    Args:
        qkv: (B, T, 3, heads, d) contiguous; overwritten.
        table: T rows of a `rotary_table`; None is its first ones, for positions from 0 on.

    Returns:
        Queries, keys and values, views of (B, heads, T, d).
    """
    table = table or rotary_table(qkv.shape[1], qkv.shape[-1], qkv.device)
    return _RotaryNorm.apply(qkv, *table)
