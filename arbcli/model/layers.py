"""Layers over packed tensors. A backward hands each weight's gradient on and forgets it.

What is cheap to compute again is not kept for the backward: a linear layer saves what its norm was
given rather than what the norm gave, and attention its turned queries and keys where the projection
had put them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.kernels.arranged_matmul import Arranged, arrange, arranged_matmul
from arbcli.kernels.cross_entropy import cross_entropy as losses_of_rows
from arbcli.kernels.cross_entropy import cross_entropy_backward
from arbcli.kernels.decode_weight import decode_weight
from arbcli.kernels.fp8_matmul import fp8_matmul
from arbcli.kernels.gated_rms_norm import gated_rms_norm, gated_rms_norm_backward
from arbcli.kernels.norm_e4m3 import gated_rms_norm_e4m3, rms_norm_e4m3
from arbcli.kernels.quantise_rows import quantise_rows
from arbcli.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from arbcli.kernels.rotary_norm import rotary_norm_, rotary_norm_backward
from arbcli.kernels.ternary_embedding import embedding_grad, embedding_rows
from arbcli.kernels.ternary_matmul import (
    FUSED_ROWS,
    ternary_matmul,
    ternary_matmul_grad_x,
)
from arbcli.model.config import ModelConfig
from arbcli.model.ternary import GradientSink, TernaryTensor

NORM_EPS = 1e-6
ROTARY_BASE = 10000.0


@lru_cache(maxsize=8)
def rotary_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position's angles, (length, head_dim / 2) float32 each.

    A derived constant: it follows from the configuration, so it is cached here and no part of the
    state. Source: J. Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, eq. 15.
    """
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of (..., d) by angles that fit them; differentiable, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class StreamedTensor(TernaryTensor):
    """A packed tensor whose gradient is formed in the backward of its last use, and handed on.

    The pairs of what a use saw (input, gradient of its output) are kept until the last one has
    come, then one gradient is formed, given to `sink`, and dropped. Nothing weight-shaped is saved
    between forward and backward: the packed state is decoded again.
    """

    sink: GradientSink | None = None
    """Who takes the gradient; None drops it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.forget()

    def forget(self) -> None:
        """Forget the uses of a forward whose backward never came."""
        self._awaited = 0
        self._pairs: list[tuple[Any, Tensor]] = []

    def note_use(self) -> None:
        """Count a use whose backward will come; a recomputed forward is none."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._awaited += 1

    def collect(self, source: Any, grad_y: Tensor) -> None:
        """Take what the backward of one use saw; the last one forms the gradient."""
        self._pairs.append((source, grad_y))
        self._awaited -= 1
        if self._awaited > 0:
            return
        sources, grads = zip(*self._pairs, strict=True)
        self.forget()
        if self.sink is not None:
            self.hand_on(sources, grads[0] if len(grads) == 1 else torch.cat(grads))

    def hand_on(self, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Form the gradient from what all uses saw, and give it to the sink."""
        source = sources[0] if len(sources) == 1 else torch.cat(sources)
        self.sink(self, self.gradient(source, grad_y))

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Form dL/dw, (N, K) float32 or bfloat16, from what all uses saw."""
        raise NotImplementedError


class LinearWeight(StreamedTensor):
    """The weight of a `TernaryLinear`."""

    fp8 = False
    """Whether products of many rows are computed in eight bits."""

    def multiply(self, x: Tensor, before: "TernaryRMSNorm | None") -> Tensor:
        """Compute before(x) @ w.T of (M, K) activations."""
        if self._in_fp8(x):
            q, scale = before.rounded(x) if before else quantise_rows(x)
            return fp8_matmul(q, scale, *self.packed, dtype=x.dtype)
        x = before(x) if before else x
        return ternary_matmul(x, self.trits, *self.scales, self.group_size)

    def propagate(self, grad_y: Tensor) -> Tensor:
        """Compute grad_y @ w of the (M, N) gradient of such a product."""
        if self._in_fp8(grad_y):
            rounded = quantise_rows(grad_y)
            return fp8_matmul(*rounded, *self.packed, transposed=True, dtype=grad_y.dtype)
        return ternary_matmul_grad_x(grad_y, *self.packed)

    def _in_fp8(self, rows: Tensor) -> bool:
        return self.fp8 and len(rows) > FUSED_ROWS

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Multiply grad_y.T by x, summed in float32 and rounded once to the dtype of x."""
        return grad_y.T @ source


class EmbeddingWeight(StreamedTensor):
    """The weight of a `TernaryEmbedding`."""

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Sum the gradients of every symbol's occurrences."""
        return embedding_grad(grad_y, source, self.out_features)


class _Linear(Function):
    """y = before(x) @ w.T. The gradient of x is returned, that of w goes to the weight's sink.

    `anchor` is an empty tensor that requires a gradient, so that the backward runs even where x
    does not need one.
    """

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor, weight: LinearWeight, before) -> Tensor:
        ctx.weight, ctx.before = weight, before
        ctx.save_for_backward(x)
        return weight.multiply(x, before)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        (source,) = ctx.saved_tensors
        weight, before, grad_x = ctx.weight, ctx.before, None
        if ctx.needs_input_grad[0]:
            grad_x = weight.propagate(grad_y)
            if before:
                grad_x, source = before.backward(grad_x, source)
        elif before:
            source = before(source)
        weight.collect(source, grad_y)
        return grad_x, None, None, None


class _Embedding(Function):
    """Rows of w. There is no gradient but that of w, which goes to the weight's sink."""

    @staticmethod
    def forward(ctx, ids: Tensor, anchor: Tensor, weight: EmbeddingWeight, dtype) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return embedding_rows(ids, *weight.packed, dtype)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        ctx.weight.collect(*ctx.saved_tensors, grad_y)
        return None, None, None, None


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


class _CrossEntropy(Function):
    """Mean loss of all rows; the backward computes the probabilities again."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return losses_of_rows(logits, targets).mean()

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        logits, targets = ctx.saved_tensors
        return cross_entropy_backward(logits, targets, grad_loss / len(logits)), None


def anchor(like: Tensor) -> Tensor:
    """Make an empty tensor that requires a gradient, so that a backward runs in any case."""
    return torch.empty(0, device=like.device, requires_grad=torch.is_grad_enabled())


class TernaryRMSNorm(nn.Module):
    """Divide by the root-mean-square, then multiply by frozen ternary weights, all ones.

    A norm is part of the linear layer behind it, which differentiates it: see `TernaryLinear`.
    """

    def __init__(self, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = TernaryTensor(1, dim, config, frozen=True)
        self._held: Tensor | None = None
        self.plain = False
        """Whether the weights are held, and known to be ones."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D); not differentiable."""
        return rms_norm(x, *self._norm(), self._held)

    @torch.no_grad()
    def after(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, and that normalised; not differentiable."""
        return add_rms_norm(x, added, *self._norm(), self._held)

    @torch.no_grad()
    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise (M, D), and round rows to e4m3: numbers and scales; not differentiable."""
        return rms_norm_e4m3(x, *self._norm())

    def backward(self, grad_y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of x, and the result again."""
        return rms_norm_backward(grad_y, x, *self._norm())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Decode the weights once for many forwards; meanwhile they must not change."""
        self.plain = True
        if self.weight is not None:
            packed, *scales, group_size, _ = self._norm()
            width = self.weight.in_features
            self._held = decode_weight(packed, *scales, width, group_size, torch.float32)[0]
            self.plain = bool((self._held == 1).all())
        try:
            yield
        finally:
            self._held, self.plain = None, False

    def _norm(self) -> tuple:
        weight = self.weight
        return weight.trits, *weight.scales, weight.group_size, NORM_EPS


class TernaryGate(TernaryRMSNorm):
    """The middle of a gated MLP: silu of the first half times the second, normalised.

    `normalise` False leaves the norm out, and there are no weights. Like a norm, it is part of the
    linear layer behind it.
    """

    def __init__(self, dim: int, config: ModelConfig, *, normalise: bool) -> None:
        nn.Module.__init__(self)
        self.weight = TernaryTensor(1, dim, config, frozen=True) if normalise else None
        self._held: Tensor | None = None
        self.plain = False

    @torch.no_grad()
    def forward(self, gate_up: Tensor) -> Tensor:
        """Turn (..., 2 D) into (..., D); not differentiable."""
        return gated_rms_norm(gate_up, *self._norm(), self._held)

    @torch.no_grad()
    def rounded(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Turn (M, 2 D) into (M, D), and round rows to e4m3; not differentiable."""
        return gated_rms_norm_e4m3(gate_up, *self._norm())

    def backward(self, grad_y: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient of gate_up, and the result again."""
        return gated_rms_norm_backward(grad_y, gate_up, *self._norm())

    def _norm(self) -> tuple:
        return super()._norm() if self.weight else (None, None, None, 1, NORM_EPS)


class TernaryLinear(nn.Module):
    """y = x @ w.T with packed ternary weights."""

    def __init__(self, out_features: int, in_features: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = LinearWeight(out_features, in_features, config)
        self._arranged: Arranged | None = None

    def forward(self, x: Tensor, before: TernaryRMSNorm | None = None) -> Tensor:
        """Multiply (..., K) activations to (..., N) of the same dtype.

        `before` is applied to x first, and differentiated with the product, so that only x itself
        is saved.
        """
        self.weight.note_use()
        y = _Linear.apply(x.reshape(-1, x.shape[-1]), anchor(x), self.weight, before)
        return y.view(*x.shape[:-1], -1)

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        *,
        normalise: bool,
        gated: bool = False,
        added: Tensor | None = None,
    ) -> Tensor:
        """Multiply few rows, (..., K) to (..., N), and do in the same kernel what is around that.

        The weights are arranged for it when first used; `held` says until when.

        Args:
            x: activations.
            normalise: whether to divide them by their root-mean-square first.
            gated: whether silu of the first half of the result multiplies the second; always the
                same for a layer.
            added: what to add to the result, like it.
        """
        if self._arranged is None:
            self._arranged = arrange(*self.weight.packed, gated)
        eps = NORM_EPS if normalise else None
        added = None if added is None else added.reshape(-1, added.shape[-1])
        y = arranged_matmul(x.reshape(-1, x.shape[-1]), self._arranged, eps, added)
        return y.view(*x.shape[:-1], -1)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the weights as they are arranged for steps; meanwhile they must not change."""
        try:
            yield
        finally:
            self._arranged = None


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


class TernaryEmbedding(nn.Module):
    """Look up rows of a packed ternary table."""

    def __init__(self, num_embeddings: int, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = EmbeddingWeight(num_embeddings, dim, config)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn (...) int64 ids into (..., D) vectors of `dtype`."""
        self.weight.note_use()
        y = _Embedding.apply(ids.reshape(-1), anchor(ids), self.weight, dtype)
        return y.view(*ids.shape, -1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy of (M, V) logits and (M,) int64 targets: nats, float32 scalar."""
    return _CrossEntropy.apply(logits, targets)
