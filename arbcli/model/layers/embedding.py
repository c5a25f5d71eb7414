"""The embedding of symbols with a packed table."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.base.lazy import imported
from arbcli.config.layer_spec import LayerSpec, is_chunked
from arbcli.kernels.rows.ternary_embedding import embedding_grad, embedding_rows
from arbcli.model.layers.compiled import anchor
from arbcli.model.packed import StreamedTensor


class EmbeddingWeight(StreamedTensor):
    """The weight of a `TernaryEmbedding`."""

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Sum (..., D) gradients over the occurrences of each symbol: (V, D)."""
        return embedding_grad(grad_y, source, self.out_features)


class _Embedding(Function):
    """Rows of w, whose gradient goes to the weight's sink."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, anchor: Tensor, weight: StreamedTensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return embedding_rows(ids, weight.packed, dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        ctx.weight.collect(*ctx.saved_tensors, grad_y)
        return None, None, None, None


class TernaryEmbedding(nn.Module):
    """Look up rows of a packed ternary table.

    Args:
        num_embeddings: V.
        dim: D.
        spec: storage settings and width of the stage.
        area: parameter group of the weights.
        tied: whether a `TiedHead` shares the weight.
    """

    def __init__(
        self, num_embeddings: int, dim: int, spec: LayerSpec, *, area: str, tied: bool = False
    ) -> None:
        super().__init__()
        kind: type[StreamedTensor] = EmbeddingWeight
        if tied:
            kind = imported("arbcli.model.layers.symbols:SymbolWeight")
        elif is_chunked(num_embeddings):
            kind = imported("arbcli.model.layers.symbols:ManyEmbeddingsWeight")
        self.weight = kind(num_embeddings, dim, spec, area=area)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up (...) int64 ids: (..., D) of `dtype`."""
        self.weight.note_use()
        y = _Embedding.apply(ids.reshape(-1), anchor(ids), self.weight, dtype)
        return y.view(*ids.shape, -1)
