"""Rotary positions: the table of angles, and queries and keys rotated in place."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.kernels.attention.rotary_heads import rotary_heads, rotary_heads_backward
from arbcli.kernels.attention.rotary_norm import rotary_norm_, rotary_norm_backward
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.norm import NORM_EPS

MOST_SPARE_ROWS = 2**16
"""Of a table beyond the positions that a text has."""
ROWS_AT_ONCE = 2**16
"""Of a table, that are computed in float64."""


def _compute_table(
    length: int, head_dim: int, device: torch.device, rotated: int, rotary: RotaryConfig, first: int
) -> tuple[Tensor, Tensor]:
    # in float32 far positions lose digits, and a GPU of Apple has no float64
    on_mps = torch.empty(0, device=device).is_mps
    place = torch.device("cpu") if on_mps else device
    exact: TensorOptions = {"device": place, "dtype": torch.float64}
    frequency = rotary_rates(rotated, rotary, place)
    if rotated < head_dim:
        still = torch.zeros((head_dim - rotated) // 2, **exact)
        frequency = torch.cat((frequency, still))

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        angle = torch.outer(torch.arange(start, stop, **exact), frequency)
        cos, sin = angle.cos(), angle.sin()
        if rotary.stretch != 1:  # of what does not turn, too, so that whole scores are sharpened
            cos, sin = cos * rotary.stretch, sin * rotary.stretch
        return cos.float().to(device), sin.float().to(device)

    if length <= ROWS_AT_ONCE:
        return rows(0, length)
    cos, sin = (_zeros(length, head_dim // 2, device) for _ in range(2))
    for start in range(first, length, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, length)
        cos[start:stop], sin[start:stop] = rows(start, stop)
    return cos, sin


def _zeros(rows: int, columns: int, device: torch.device) -> Tensor:
    """Make zeros, which take memory of a CPU only once something is written to them."""
    if device.type == "cpu":
        return torch.from_numpy(numpy.zeros((rows, columns), numpy.float32))
    return torch.zeros(rows, columns, device=device)


def rotary_rates(rotated: int, rotary: RotaryConfig, device: torch.device | str = "cpu") -> Tensor:
    """Compute the radians a position by which each pair turns, (rotated / 2,) float64."""
    places = torch.arange(0, rotated, 2, dtype=torch.float64, device=device)
    frequency = rotary.base ** (-places / rotated)
    if rotary.scaling == "none":
        return frequency
    kept = _kept_share(frequency, rotary)
    return frequency * (kept + (1 - kept) / rotary.factor)


def _kept_share(frequency: Tensor, rotary: RotaryConfig) -> Tensor | float:
    """Compute the share of each frequency that a longer context leaves as it is.

    Sources: Llama 3.1, `apply_scaling` of github.com/meta-llama/llama-models; B. Peng et al.,
    "YaRN", https://arxiv.org/abs/2309.00071, section 3.2, with its pairs rounded as in its code.
    """
    if rotary.scaling == "linear":
        return 0.0
    low, high = rotary.bounds
    assert rotary.original_ctx is not None  # the configuration needs it
    if rotary.scaling == "llama3":
        turns = rotary.original_ctx * frequency / (2 * math.pi)
        return ((turns - low) / (high - low)).clamp(0, 1)
    half = len(frequency)
    first, last = (
        half * math.log(rotary.original_ctx / (2 * math.pi * turns)) / math.log(rotary.base)
        for turns in (high, low)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
    pair = torch.arange(half, device=frequency.device, dtype=frequency.dtype)
    return 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)


def _new_cache() -> Callable[..., tuple[Tensor, Tensor]]:
    return lru_cache(maxsize=8)(_compute_table)


_tables = _new_cache()


def rotary_table(
    length: int,
    head_dim: int,
    device: torch.device,
    rotated: int | None = None,
    rotary: RotaryConfig = PLAIN,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position's angles, (length, head_dim / 2) float32 each.

    Nobody asks for those of positions before `first`, which may be left out.

    Of a head `rotated` numbers turn, by angles as of a head of that width, and the others' angles
    are 0; None is the share of `rotary`. Both are multiplied by `rotary.stretch`.

    A derived constant: it follows from the configuration, so it is cached here and no part of the
    state. Source: J. Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, eq. 15.
    """
    rotated = rotated or rotary.rotated(head_dim)
    if torch.compiler.is_compiling():
        like = torch.empty(0, device=device)
        return _copied_table(like, length, head_dim, rotated, *_numbers(rotary), rotary.scaling)
    first = first if length > ROWS_AT_ONCE else 0  # so that texts share it
    return _tables(length, head_dim, device, rotated, rotary, first)


def _numbers(rotary: RotaryConfig) -> tuple[float, float, float, float, int]:
    """List the numbers of a configuration that angles follow from; 0 is none."""
    return (
        rotary.base, rotary.factor, rotary.low or 0.0, rotary.high or 0.0, rotary.original_ctx or 0
    )  # fmt: skip


def _copy_table(
    like: Tensor,
    length: int,
    head_dim: int,
    rotated: int,
    base: float,
    factor: float,
    low: float,
    high: float,
    original_ctx: int,
    scaling: str,
) -> tuple[Tensor, Tensor]:
    rotary = RotaryConfig(
        base=base, scaling=scaling, factor=factor, low=low or None, high=high or None,
        original_ctx=original_ctx or None,
    )  # fmt: skip
    cos, sin = _tables(length, head_dim, like.device, rotated, rotary, 0)
    return cos.clone(), sin.clone()  # a compiler may write over what an operator gave


def _empty_table(like: Tensor, length: int, head_dim: int, *_: object) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.empty(length, head_dim // 2, device=like.device) for _ in range(2))
    return cos, sin


_copied_table = operator(_copy_table, _empty_table)


def table_rows(positions: int, context: int) -> int:
    """Find the rows of the table for a text: whole contexts, so that texts can share it."""
    unit = min(context, MOST_SPARE_ROWS)
    return -(-positions // unit) * unit


@contextmanager
def fresh_tables() -> Iterator[None]:
    """Make tables anew inside, and forget them at the end, to count what a step leaves."""
    global _tables
    before, _tables = _tables, _new_cache()
    try:
        yield
    finally:
        _tables = before


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of positions, (T, d / 2) each, or (T, 1, d / 2) for several heads."""


def rows_at(table: Angles, places: Tensor | slice) -> Angles:
    """Take some rows of a table."""
    return table[0][places], table[1][places]


def for_heads(angles: Angles) -> Angles:
    """View (T, d / 2) as (T, 1, d / 2), for rows of several heads."""
    return angles[0][:, None], angles[1][:, None]


class _RotaryNorm(Function):
    """Turn and normalise queries and keys where they are; nothing else is kept of them."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r = rotary_norm_(qkv, cos, sin, NORM_EPS)
        ctx.save_for_backward(qkv, r, cos, sin)
        return _parts(qkv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotary_norm_backward(*grads, *ctx.saved_tensors), None, None


class _RotaryNormOfCopy(Function):
    """Do the same to a copy, for a compiler: it puts that where nothing else needs the input."""

    @staticmethod
    def forward(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        qkv = qkv.clone(memory_format=torch.contiguous_format)
        return qkv, rotary_norm_(qkv, cos, sin, NORM_EPS)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*output, *inputs[1:])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _r: Tensor) -> tuple[Tensor | None, ...]:
        return rotary_norm_backward(*_parts(grad), *ctx.saved_tensors), None, None


_rotary_norm_of_copy = operator(_RotaryNormOfCopy)


def table_for(qkv: Tensor, rotary: RotaryConfig = PLAIN) -> Angles:
    """Compute the angles of the positions of (B, T, ..., d): see `rotary_table`."""
    return rotary_table(qkv.shape[1], qkv.shape[-1], qkv.device, rotary=rotary)


def _parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def rotary_norm(
    qkv: Tensor, table: tuple[Tensor, Tensor] | None = None, *, rotary: RotaryConfig = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries and keys by the angles of their positions, and normalise each head.

    Args:
        qkv: (B, T, 3, heads, d) contiguous; overwritten.
        table: T rows of a `rotary_table`; None is its first ones, for positions from 0 on.
        rotary: the angles of that table.

    Returns:
        Queries, keys and values, views of (B, heads, T, d).
    """
    table = table or table_for(qkv, rotary)
    if torch.compiler.is_compiling():
        return _parts(_rotary_norm_of_copy(qkv, *table)[0])
    return _RotaryNorm.apply(qkv, *table)


class _RotaryHeads(Function):
    """Normalise, scale and turn queries and keys; what came is saved, and no other tensor."""

    @staticmethod
    def forward(
        qkv: Tensor, gains: Tensor | None, cos: Tensor, sin: Tensor, kv: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, heads = rotary_heads(qkv, gains, cos, sin, kv, _eps(eps)), qkv.shape[2] - 2 * kv
        parts = y[:, :, :heads], y[:, :, heads:], qkv[:, :, heads + kv :]
        q, k, v = (part.transpose(1, 2) for part in parts)
        return q, k, v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *saved, _, ctx.eps = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        qkv, gains, cos, sin = ctx.saved_tensors
        grad, of_gains = rotary_heads_backward(q, k, v, qkv, gains, cos, sin, _eps(ctx.eps))
        return grad, None if gains is None else of_gains, None, None, None, None


def _eps(eps: float) -> float | None:
    """Read what an operator is given, which takes no None."""
    return None if eps < 0 else eps


_rotary_heads = operator(_RotaryHeads)


def turned_heads(
    qkv: Tensor,
    gains: Tensor | None,
    kv: int,
    eps: float | None,
    table: tuple[Tensor, Tensor] | None = None,
    *,
    rotary: RotaryConfig = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and scale queries and keys, and turn them by the angles of their positions.

    Args:
        qkv: (B, T, H, d) contiguous: heads of queries, then of keys and of values.
        gains: (2, d) float32, of queries and of keys; None is ones.
        kv: heads of keys.
        eps: added to the mean square; None leaves the norm out.
        table: T rows of a `rotary_table`; None is its first ones, for positions from 0 on.
        rotary: the angles of that table.

    Returns:
        Queries, keys and values, (B, their heads, T, d); the last are a view.
    """
    table = table or table_for(qkv, rotary)
    return _rotary_heads(qkv, gains, *table, kv, -1.0 if eps is None else eps)
