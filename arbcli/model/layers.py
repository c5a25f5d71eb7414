"""Layers over packed tensors. A backward hands each weight's gradient on and forgets it."""

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.kernels.rms_norm import ternary_rms_norm
from arbcli.kernels.ternary_embedding import embedding_grad, embedding_rows
from arbcli.kernels.ternary_matmul import ternary_matmul, ternary_matmul_grad_x
from arbcli.model.config import ModelConfig
from arbcli.model.ternary import GradientSink, TernaryTensor

NORM_EPS = 1e-6


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
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def note_use(self) -> None:
        """Count a use whose backward will come; a recomputed forward is none."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._awaited += 1

    def collect(self, source: Tensor, grad_y: Tensor) -> None:
        """Take what the backward of one use saw; the last one forms the gradient."""
        self._pairs.append((source, grad_y))
        self._awaited -= 1
        if self._awaited > 0:
            return
        sources, grads = zip(*self._pairs, strict=True)
        self.forget()
        if self.sink is not None:
            one = len(sources) == 1
            source, grad_y = (
                (sources[0], grads[0]) if one else (torch.cat(sources), torch.cat(grads))
            )
            self.sink(self, self.gradient(source, grad_y))

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Form dL/dw, (N, K) float32, from what all uses saw."""
        raise NotImplementedError


class LinearWeight(StreamedTensor):
    """The weight of a `TernaryLinear`."""

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Multiply grad_y.T by x, accumulating in float32."""
        if source.is_cuda and source.dtype != torch.float32:
            return torch.mm(grad_y.T, source, out_dtype=torch.float32)
        return (grad_y.T @ source).float()


class EmbeddingWeight(StreamedTensor):
    """The weight of a `TernaryEmbedding`."""

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Sum the gradients of every symbol's occurrences."""
        return embedding_grad(grad_y, source, self.out_features)


class _Linear(Function):
    """y = x @ w.T. The gradient of x is returned, that of w goes to the weight's sink.

    `anchor` is an empty tensor that requires a gradient, so that the backward runs even where x
    does not need one.
    """

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor, weight: LinearWeight) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return ternary_matmul(x, weight.trits, *weight.scales, weight.group_size)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        (x,) = ctx.saved_tensors
        weight, grad_x = ctx.weight, None
        if ctx.needs_input_grad[0]:
            state = (weight.trits, *weight.scales, weight.in_features, weight.group_size)
            grad_x = ternary_matmul_grad_x(grad_y, *state)
        weight.collect(x, grad_y)
        return grad_x, None, None


class _Embedding(Function):
    """Rows of w. There is no gradient but that of w, which goes to the weight's sink."""

    @staticmethod
    def forward(ctx, ids: Tensor, anchor: Tensor, weight: EmbeddingWeight, dtype) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        state = (weight.trits, *weight.scales, weight.in_features, weight.group_size)
        return embedding_rows(ids, *state, dtype)

    @staticmethod
    def backward(ctx, grad_y: Tensor):
        ctx.weight.collect(*ctx.saved_tensors, grad_y)
        return None, None, None, None


def _anchor(like: Tensor) -> Tensor:
    return torch.empty(0, device=like.device, requires_grad=torch.is_grad_enabled())


class TernaryLinear(nn.Module):
    """y = x @ w.T with packed ternary weights."""

    def __init__(self, out_features: int, in_features: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = LinearWeight(out_features, in_features, config)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply (..., K) activations to (..., N) of the same dtype."""
        self.weight.note_use()
        y = _Linear.apply(x.reshape(-1, x.shape[-1]), _anchor(x), self.weight)
        return y.view(*x.shape[:-1], -1)


class TernaryEmbedding(nn.Module):
    """Look up rows of a packed ternary table."""

    def __init__(self, num_embeddings: int, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = EmbeddingWeight(num_embeddings, dim, config)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn (...) int64 ids into (..., D) vectors of `dtype`."""
        self.weight.note_use()
        y = _Embedding.apply(ids.reshape(-1), _anchor(ids), self.weight, dtype)
        return y.view(*ids.shape, -1)


class TernaryRMSNorm(nn.Module):
    """Divide by the root-mean-square, then multiply by frozen ternary weights, all ones."""

    def __init__(self, dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = TernaryTensor(1, dim, config, frozen=True)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of (..., D)."""
        weight = self.weight
        return ternary_rms_norm(x, weight.trits, *weight.scales, weight.group_size, NORM_EPS)
