"""Rotary position embedding (RoPE): the table of angles, and rotation of queries and keys."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.kernels.attention.rotary_norm import rotary_norm_, rotary_norm_backward, unpack_qkv
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.norm import NORM_EPS

MAX_SPARE_ROWS = 2**16
"""Maximum number of rows of a table beyond the length of a text."""
ROWS_AT_ONCE = 2**16
"""Rows of a table that are computed in float64 at once."""


def _compute_table(
    length: int, head_dim: int, device: torch.device, rotated: int, rotary: RotaryConfig, first: int
) -> tuple[Tensor, Tensor]:
    # float32 is inaccurate for large positions, and MPS has no float64
    uses_mps = torch.empty(0, device=device).is_mps
    exact_device = torch.device("cpu") if uses_mps else device
    exact: TensorOptions = {"device": exact_device, "dtype": torch.float64}
    frequency = rotary_rates(rotated, rotary, exact_device)
    if rotated < head_dim:
        frequency = torch.cat((frequency, torch.zeros((head_dim - rotated) // 2, **exact)))

    def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
        angle = torch.outer(torch.arange(start, stop, **exact), frequency)
        cos, sin = angle.cos(), angle.sin()
        if rotary.stretch != 1:  # unrotated elements too, so that complete scores are scaled
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
    """Allocate zeros; on a CPU the pages take memory when they are first written."""
    if device.type == "cpu":
        return torch.from_numpy(numpy.zeros((rows, columns), numpy.float32))
    return torch.zeros(rows, columns, device=device)


def rotary_rates(rotated: int, rotary: RotaryConfig, device: torch.device | str = "cpu") -> Tensor:
    """Compute the angular frequency of each pair, (rotated / 2,) float64 radians per position."""
    indices = torch.arange(0, rotated, 2, dtype=torch.float64, device=device)
    frequency = rotary.base ** (-indices / rotated)
    if rotary.scaling == "none":
        return frequency
    kept = _kept_share(frequency, rotary)
    return frequency * (kept + (1 - kept) / rotary.factor)


def _kept_share(frequency: Tensor, rotary: RotaryConfig) -> Tensor | float:
    """Compute the share of each frequency that context scaling leaves unchanged.

    Sources: Llama 3.1, `apply_scaling` of github.com/meta-llama/llama-models; B. Peng et al.,
    "YaRN", https://arxiv.org/abs/2309.00071, section 3.2, with its pairs rounded as in its code.
    """
    if rotary.scaling == "linear":
        return 0.0
    low, high = rotary.bounds
    assert rotary.original_ctx is not None  # the configuration needs it
    if rotary.scaling == "llama3":
        rotations = rotary.original_ctx * frequency / (2 * math.pi)
        return ((rotations - low) / (high - low)).clamp(0, 1)
    half = len(frequency)
    first, last = (
        half * math.log(rotary.original_ctx / (2 * math.pi * rotations)) / math.log(rotary.base)
        for rotations in (high, low)
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
    """Compute cosines and sines of all positions' angles, (length, head_dim / 2) float32 each.

    Rows before `first` are not read, and may be left zero.

    The first `rotated` elements of a head are rotated, with the frequencies of a head of that
    width; the angles of the others are 0. None is the share that `rotary` rotates. Cosines and
    sines are multiplied by `rotary.stretch`.

    The table follows from the configuration, so it is cached here and is not part of the state.
    Source: J. Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, eq. 15.
    """
    rotated = rotated or rotary.rotated(head_dim)
    if torch.compiler.is_compiling():
        like = torch.empty(0, device=device)
        return _copied_table(
            like, length, head_dim, rotated, rotary.base, rotary.factor, rotary.low, rotary.high,
            rotary.original_ctx, rotary.scaling,
        )  # fmt: skip
    first = first if length > ROWS_AT_ONCE else 0  # so that texts share the cached table
    return _tables(length, head_dim, device, rotated, rotary, first)


def _copy_table(
    like: Tensor,
    length: int,
    head_dim: int,
    rotated: int,
    base: float,
    factor: float,
    low: float | None,
    high: float | None,
    original_ctx: int | None,
    scaling: str,
) -> tuple[Tensor, Tensor]:
    rotary = RotaryConfig(
        base=base, scaling=scaling, factor=factor, low=low, high=high, original_ctx=original_ctx
    )
    cos, sin = _tables(length, head_dim, like.device, rotated, rotary, 0)
    return cos.clone(), sin.clone()  # the compiler may overwrite an operator's results


def _empty_table(like: Tensor, length: int, head_dim: int, *_: object) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.empty(length, head_dim // 2, device=like.device) for _ in range(2))
    return cos, sin


_copied_table = operator(_copy_table, _empty_table)


def table_rows(positions: int, context: int) -> int:
    """Return the number of rows for a text, rounded up to contexts, so that texts share a table."""
    unit = min(context, MAX_SPARE_ROWS)
    return -(-positions // unit) * unit


@contextmanager
def fresh_tables() -> Iterator[None]:
    """Use a separate cache of tables within the block, to measure the memory of a step."""
    global _tables
    previous, _tables = _tables, _new_cache()
    try:
        yield
    finally:
        _tables = previous


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of positions, (T, d / 2) each, or (T, 1, d / 2) for several heads."""


def rows_at(table: Angles, positions: Tensor | slice) -> Angles:
    """Return the rows of a table at positions, (T,) integers or a slice."""
    return table[0][positions], table[1][positions]


def broadcast_heads(angles: Angles) -> Angles:
    """View (T, d / 2) as (T, 1, d / 2), to broadcast over heads."""
    return angles[0][:, None], angles[1][:, None]


class _RotaryNorm(Function):
    """Rotate and normalise queries and keys in place, and save only the result."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r = rotary_norm_(qkv, cos, sin, NORM_EPS)
        ctx.save_for_backward(qkv, r, cos, sin)
        return unpack_qkv(qkv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotary_norm_backward(*grads, *ctx.saved_tensors), None, None


class _CopiedRotaryNorm(Function):
    """Rotate and normalise a copy, for `torch.compile`, which may reuse the memory of the input."""

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
        return rotary_norm_backward(*unpack_qkv(grad), *ctx.saved_tensors), None, None


_copied_rotary_norm = operator(_CopiedRotaryNorm)


def table_for(qkv: Tensor, rotary: RotaryConfig = PLAIN) -> Angles:
    """Compute the angles of the positions of (B, T, ..., d): see `rotary_table`."""
    return rotary_table(qkv.shape[1], qkv.shape[-1], qkv.device, rotary=rotary)


def rotary_norm(
    qkv: Tensor, table: tuple[Tensor, Tensor] | None = None, *, rotary: RotaryConfig = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions, and normalise each head.

    Args:
        qkv: (B, T, 3, heads, d) contiguous; overwritten.
        table: T rows of a `rotary_table`; None is the first T, for positions from 0.
        rotary: configuration of the angles, for the default table.

    Returns:
        Queries, keys and values, views of (B, heads, T, d).
    """
    table = table or table_for(qkv, rotary)
    if torch.compiler.is_compiling():
        return unpack_qkv(_copied_rotary_norm(qkv, *table)[0])
    return _RotaryNorm.apply(qkv, *table)


def new_rotary_norm(_ctx: int, _width: int, rotary: RotaryConfig) -> Callable:
    """Return `rotary_norm` with its angles."""
    return partial(rotary_norm, rotary=rotary)
