"""Rotation of queries and keys with gains, in grouped heads, or without a norm."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from arbcli.config.parts.rotary import PLAIN, RotaryConfig
from arbcli.kernels.attention.rotary_heads import rotary_heads, rotary_heads_backward
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.rotary import table_for


class _RotaryHeads(Function):
    """Normalise, scale and rotate queries and keys; saves only the inputs."""

    @staticmethod
    def forward(
        qkv: Tensor, gains: Tensor | None, cos: Tensor, sin: Tensor, kv: int, eps: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, heads = rotary_heads(qkv, gains, cos, sin, kv, eps), qkv.shape[2] - 2 * kv
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
        grad, grad_gains = rotary_heads_backward(q, k, v, qkv, gains, cos, sin, ctx.eps)
        return grad, None if gains is None else grad_gains, None, None, None, None


_rotary_heads = operator(_RotaryHeads)


def rotary_qkv(
    qkv: Tensor,
    gains: Tensor | None,
    kv: int,
    eps: float | None,
    table: tuple[Tensor, Tensor] | None = None,
    *,
    rotary: RotaryConfig = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and scale queries and keys, and rotate them by the angles of their positions.

    Args:
        qkv: (B, T, H, d) contiguous: heads of queries, then of keys and of values.
        gains: (2, d) float32, gains of queries and of keys; None is 1.
        kv: number of key heads.
        eps: epsilon of the RMS norm; None for no norm.
        table: T rows of a `rotary_table`; None is the first T, for positions from 0.
        rotary: configuration of the angles, for the default table.

    Returns:
        Queries, keys and values, (B, their heads, T, d); the last are a view.
    """
    table = table or table_for(qkv, rotary)
    return _rotary_heads(qkv, gains, *table, kv, eps)


def new_rotary_qkv(_ctx: int, _width: int, rotary: RotaryConfig) -> Callable:
    """Return `rotary_qkv` with its angles."""
    return partial(rotary_qkv, rotary=rotary)
