"""Large packed tables, of which a step reads and changes only a few rows (sparse updates).

A row's gradient is summed over all its uses before it is stepped. No tensor of the table's shape is
ever created: rows are decoded when they are read, and the touched rows are gathered, stepped and
scattered back.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.config.layer_spec import LayerSpec
from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.kernels.rows.weighted_rows import (
    touched_rows,
    weighted_rows,
    weighted_rows_grad,
    weighted_rows_grad_weights,
)
from arbcli.model.initial import projection_std
from arbcli.model.layers.compiled import anchor
from arbcli.model.packed import GradientSink, StreamedTensor

SPARSE_SPREAD = 0.2
"""Initial standard deviation of z relative to the rule's: 4 % of the trits are nonzero."""
MAX_USES = 127
"""Maximum of the usage counters."""


class TableWeight(StreamedTensor):
    """The rows of a `TernaryTable`.

    Nearly all trits are initially zero, so that rows without training add no noise. The buffer
    `usage`, (V, 1) int8, counts the steps that changed each row, up to 127.
    """

    usage: Tensor

    def __init__(self, num_rows: int, dim: int, spec: LayerSpec, *, area: str) -> None:
        std = projection_std(dim)
        super().__init__(num_rows, dim, spec, area=area, std=std, spread=SPARSE_SPREAD)
        self.declare("usage", torch.empty(num_rows, 1, dtype=torch.int8), "counters")

    def emit_gradient(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Sum the gradients of the touched rows, and pass them to the sink.

        Args:
            sink: consumer of the gradient, (touched rows, D) float32, and of `TouchedRows`.
            sources: ids, (M, k) int64, and weights, (M, k) float32, of each use.
            grad_y: output gradients of all uses, concatenated: (M of all uses, D).
        """
        ids: list[Tensor] = []
        weights: list[Tensor] = []
        tokens: list[Tensor] = []
        first = 0
        for source_ids, source_weights in sources:
            rows = torch.arange(first, first + len(source_ids), device=grad_y.device)
            ids.append(source_ids.flatten())
            weights.append(source_weights.flatten())
            tokens.append(rows.repeat_interleave(source_ids.shape[1]))
            first += len(source_ids)
        touched = touched_rows(torch.cat(ids), self.out_features)
        grad = weighted_rows_grad(grad_y, torch.cat(weights), torch.cat(tokens), touched)
        sink(self, grad, touched)
        if not getattr(sink, "counts_rows", False):
            self.count_use(touched.rows)

    def count_use(self, rows: Tensor) -> None:
        """Count a step of rows, (R,) int64; rows out of range are ignored."""
        used = gather_rows(self.usage, rows)
        scatter_rows_(self.usage, rows, used + (used < MAX_USES).to(torch.int8))

    def declare_wire(self) -> None:
        """Declare nothing, as the gradients of sparse rows are sent with their exponents."""

    def alive(self) -> float:
        """Return the share of rows that a step has changed; synchronises with the device."""
        return int(self.usage.count_nonzero()) / self.out_features


class _WeightedRows(Function):
    """y[m] = sum of weights[m, j] * w[ids[m, j]]; the gradient of w goes to the table's sink."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weights: Tensor,
        _anchor: Tensor,
        table: TableWeight,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(ids, weights)
        return weighted_rows(ids, weights, table.packed, dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        ids, weights = ctx.saved_tensors
        table, grad_weights = ctx.table, None
        if ctx.needs_input_grad[1]:
            grad_weights = weighted_rows_grad_weights(grad_y, ids, table.packed)
        table.collect((ids, weights), grad_y)
        return None, grad_weights, None, None, None


class TernaryTable(nn.Module):
    """Weighted sums of rows of a packed ternary table.

    Args:
        num_rows: V.
        dim: D.
        spec: storage settings and width of the stage.
        area: parameter group of the rows.
    """

    def __init__(self, num_rows: int, dim: int, spec: LayerSpec, *, area: str) -> None:
        super().__init__()
        self.weight = TableWeight(num_rows, dim, spec, area=area)

    def forward(self, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum weighted rows.

        Args:
            ids: (M, k) int64; ids outside of 0..V-1, such as -1, are ignored.
            weights: (M, k) float32; differentiable.
            dtype: dtype of the result.

        Returns:
            (M, D) of `dtype`.
        """
        self.weight.note_use()
        return _WeightedRows.apply(ids, weights, anchor(ids), self.weight, dtype)
