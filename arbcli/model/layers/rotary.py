"""Rotary positions: the table of angles, and queries and keys turned where they lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor, library
from torch.autograd import Function

from arbcli.kernels.attention.rotary_norm import rotary_norm_, rotary_norm_backward
from arbcli.model.layers.norm import NORM_EPS

ROTARY_BASE = 10000.0
MOST_SPARE_ROWS = 2**16
"""Of a table beyond the positions that a text has."""
ROWS_AT_ONCE = 2**16
"""Of a table, that are computed in float64."""


def _compute_table(
    length: int, head_dim: int, device: torch.device, turned: int
) -> tuple[Tensor, Tensor]:
    # in float32 far positions lose digits, and a GPU of Apple has no float64
    on_mps = torch.empty(0, device=device).is_mps
    exact = {"device": "cpu" if on_mps else device, "dtype": torch.float64}
    frequency = ROTARY_BASE ** (-torch.arange(0, turned, 2, **exact) / turned)
    if turned < head_dim:
        still = torch.zeros((head_dim - turned) // 2, **exact)
        frequency = torch.cat((frequency, still))

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        angle = torch.outer(torch.arange(start, stop, **exact), frequency)
        return angle.cos().float().to(device), angle.sin().float().to(device)

    if length <= ROWS_AT_ONCE:
        return rows(0, length)
    cos, sin = (torch.empty(length, head_dim // 2, device=device) for _ in range(2))
    for start in range(0, length, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, length)
        cos[start:stop], sin[start:stop] = rows(start, stop)
    return cos, sin


def _new_cache():
    return lru_cache(maxsize=8)(_compute_table)


_tables = _new_cache()


def rotary_table(
    length: int, head_dim: int, device: torch.device, turned: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position's angles, (length, head_dim / 2) float32 each.

    Of a head `turned` numbers turn, by angles as of a head of that width, and the others' angles
    are 0; None is all of them.

    A derived constant: it follows from the configuration, so it is cached here and no part of the
    state. Source: J. Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, eq. 15.
    """
    return _tables(length, head_dim, device, turned or head_dim)


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
        return _parts(qkv)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return rotary_norm_backward(list(grads), *ctx.saved_tensors), None, None


@library.custom_op("arb::rotary_norm", mutates_args=())
def _compiled_rotary_norm(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Do as `_RotaryNorm` does to a copy, in a compiled function: it, and what was multiplied by.

    A compiler puts the copy where nothing else needs its input.
    """
    qkv = qkv.clone(memory_format=torch.contiguous_format)
    return qkv, rotary_norm_(qkv, *_table_for(qkv), NORM_EPS)


@_compiled_rotary_norm.register_fake
def _(qkv):
    batch, length, _, heads, _ = qkv.shape
    like = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return like, qkv.new_empty(batch, length, 2, heads, dtype=torch.float32)


@library.custom_op("arb::rotary_norm_backward", mutates_args=())
def _compiled_rotary_norm_backward(grad: Tensor, qkv: Tensor, r: Tensor) -> Tensor:
    return rotary_norm_backward(list(_parts(grad)), qkv, r, *_table_for(qkv))


@_compiled_rotary_norm_backward.register_fake
def _(grad, qkv, r):
    return torch.empty_like(qkv)


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*output)


def _backward_of_compiled(ctx, grad, _):
    return _compiled_rotary_norm_backward(grad, *ctx.saved_tensors)


_compiled_rotary_norm.register_autograd(_backward_of_compiled, setup_context=_save_for_backward)


def _table_for(qkv: Tensor) -> tuple[Tensor, Tensor]:
    return rotary_table(qkv.shape[1], qkv.shape[-1], qkv.device)


def _parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return qkv.permute(2, 0, 3, 1, 4).unbind()


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
    if table is None and torch.compiler.is_compiling():
        return _parts(_compiled_rotary_norm(qkv)[0])
    return _RotaryNorm.apply(qkv, *(table or _table_for(qkv)))
