"""Packed tables of many rows, of which a step reads and changes only a few.

A row's gradient is summed over all that read it, and only then the row is stepped. No tensor of the
shape of the table is ever made: rows are decoded where they are read, and those that were touched
are copied together, stepped, and copied back.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.config.site import Site
from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.kernels.rows.weighted_rows import (
    touched_rows,
    weighted_rows,
    weighted_rows_grad,
    weighted_rows_grad_weights,
)
from arbcli.model.initial import projection_std
from arbcli.model.layers.compiled import anchor
from arbcli.model.layers.streamed import GradientSink, StreamedTensor

SPARSE_SPREAD = 0.2
"""Spread of z at the start, as a share of the rule's: 4 % of the trits are not zero."""
MOST_USES = 127
"""Where the counters of rows stop."""


class TableWeight(StreamedTensor):
    """The rows of a `TernaryTable`.

    Trits are nearly all zero at first, so that a row that was never read before adds no noise.
    A further buffer, `usage`, (V, 1) int8, counts the steps that changed a row, up to 127.
    """

    usage: Tensor

    def __init__(self, num_rows: int, dim: int, site: Site, *, area: str) -> None:
        std = projection_std(dim)
        super().__init__(num_rows, dim, site, area=area, std=std, spread=SPARSE_SPREAD)
        self.declare("usage", torch.empty(num_rows, 1, dtype=torch.int8), "counters")

    def hand_on(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Sum the gradients of the rows that were touched, and give these to the sink."""
        ids: list[Tensor] = []
        weights: list[Tensor] = []
        tokens: list[Tensor] = []
        first = 0
        for of_ids, of_weights in sources:
            rows = torch.arange(first, first + len(of_ids), device=grad_y.device)
            ids.append(of_ids.flatten())
            weights.append(of_weights.flatten())
            tokens.append(rows.repeat_interleave(of_ids.shape[1]))
            first += len(of_ids)
        touched = touched_rows(torch.cat(ids), self.out_features)
        grad = weighted_rows_grad(grad_y, torch.cat(weights), torch.cat(tokens), touched)
        sink(self, grad, touched)
        if not getattr(sink, "counts_rows", False):
            self.count_use(touched.rows)

    def count_use(self, rows: Tensor) -> None:
        """Count a step of some rows, (R,) int64; one that does not exist is dropped."""
        used = gather_rows(self.usage, rows)
        scatter_rows_(self.usage, rows, used + (used < MOST_USES).to(torch.int8))

    def declare_wire(self) -> None:
        """Declare nothing: what a step sends of a row has an exponent of its own."""

    def alive(self) -> float:
        """Find the share of rows that any step has changed; waits for the device."""
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
    """Look up rows of a packed ternary table, and add them up.

    Args:
        num_rows: V.
        dim: D.
        site: where it stands.
        area: the part of the model that the rows belong to.
    """

    def __init__(self, num_rows: int, dim: int, site: Site, *, area: str) -> None:
        super().__init__()
        self.weight = TableWeight(num_rows, dim, site, area=area)

    def forward(self, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up weighted rows.

        Args:
            ids: (M, k) int64; one outside 0..V-1, such as -1, is not a row.
            weights: (M, k) float32; differentiable.
            dtype: of the result.

        Returns:
            (M, D) of `dtype`.
        """
        self.weight.note_use()
        return _WeightedRows.apply(ids, weights, anchor(ids), self.weight, dtype)
