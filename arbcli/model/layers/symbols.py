"""Embedding and head weights for large vocabularies, separate or tied.

A large weight is stepped in chunks of rows, each a separate matrix. Losses are computed in chunks
of the vocabulary, and the backward recomputes the logits that the forward has not kept, so that
neither all logits nor, where the losses are the last use, the complete gradient of the weight are
ever in memory.
"""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from arbcli.config.layer_spec import MAX_CHUNK, LayerSpec
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.output.symbol_losses import add_symbols_, grade_symbols_
from arbcli.kernels.rows.table_rows import scatter_rows_
from arbcli.kernels.rows.weighted_rows import TouchedRows, touched_rows, weighted_rows_grad
from arbcli.kernels.runtime.backend import backend_of
from arbcli.model.initial import head_lr_factor, head_std
from arbcli.model.layers.compiled import anchor
from arbcli.model.layers.linear import LinearWeight, TernaryLinear
from arbcli.model.layers.loss import add_divergence_, grade_divergence_
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.packed import NO_SINK, GradientSink

ALIGNMENT = 64
"""The number of rows in a chunk is a multiple of this."""
KEPT_BYTES = {False: 5 * 2**29, True: 2**30}
"""Maximum size of the logits that a forward keeps for its backward, by whether blocks are
recomputed, where the loss decides the peak. The first holds 8,192 rows of 152 k symbols in bf16."""


class Predictions(NamedTuple):
    """Inputs of a teacher's logits, which are computed in the same chunks."""

    x: Tensor
    """(M, D)."""
    weight: "SymbolWeight"
    total: Tensor
    """(M,) float32, log-sum-exp of all logits."""

    def logits(self, rows: slice) -> Tensor:
        """Compute the logits of a slice of symbols, (M, N)."""
        return self.x @ self.weight.decode_rows(rows, self.x.dtype).T


class Scored(NamedTuple):
    """Inputs of the losses of a batch, saved for the backward."""

    x: Tensor
    """(M, D)."""
    targets: Tensor | Predictions
    """(M,) int64, or a teacher's predictions."""
    total: Tensor
    """(M,) float32, log-sum-exp of all logits."""
    logits: list[Tensor]
    """Logits of the first chunks, (M, N) each, which are taken and overwritten chunk by chunk."""


class Graded(NamedTuple):
    """The gradient of the weight from losses that were not its last use."""

    chunks: list[Tensor | None]
    """(N, D) of each chunk; None if the weight had no sink."""


class SymbolWeight(LinearWeight):
    """The weight of a `SymbolHead`, of a `TernaryEmbedding`, or of both.

    Args:
        vocabulary: V.
        dim: D.
        spec: storage settings and width of the stage.
        area: parameter group of the weights.
        std: initial standard deviation of the weights; None is that of a head.
        lr_factor: factor of the learning rate; None is that of a head.
    """

    low_precision = False
    always_has_gradients = True

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        spec: LayerSpec,
        *,
        area: str,
        std: float | None = None,
        lr_factor: float | None = None,
    ) -> None:
        super().__init__(
            vocabulary,
            dim,
            spec,
            area=area,
            std=head_std(dim) if std is None else std,
            lr_factor=head_lr_factor(spec) if lr_factor is None else lr_factor,
            matrices=-(-vocabulary // MAX_CHUNK),
        )

    @property
    def matrix_rows(self) -> int:
        """Rows of each chunk; the last one may have fewer."""
        rows = super().matrix_rows
        return rows if self.matrices == 1 else -(-rows // ALIGNMENT) * ALIGNMENT

    def gradient_ranges(self) -> list[range]:
        """Return the chunks, one range each."""
        return [range(index, index + 1) for index in range(self.matrices)]

    def score(
        self, x: Tensor, targets: Tensor, room: int = 0
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute the cross-entropy of each row of (M, D) in nats, and the log-sum-exp of logits.

        Both are (M,) float32. The third result has the logits of the first chunks, up to `room`
        bytes.
        """
        total = torch.full((len(x),), -torch.inf, dtype=torch.float32, device=x.device)
        target_logits, kept = torch.zeros_like(total), list[Tensor]()
        for rows, w in self._chunks(x.dtype):
            logits = x @ w.T
            add_symbols_(total, target_logits, logits, targets - rows.start)
            room -= logits.nbytes
            if room >= 0:
                kept.append(logits)
        return total - target_logits, total, kept

    def diverge(self, x: Tensor, predictions: Predictions) -> tuple[Tensor, Tensor]:
        """Compute the KL divergence of each row of (M, D) from the teacher, and the log-sum-exp."""
        total = torch.full((len(x),), -torch.inf, dtype=torch.float32, device=x.device)
        divergences, ignored = -predictions.total, torch.zeros_like(total)
        no_target = torch.full(total.shape, -1, device=x.device)
        for rows, w in self._chunks(x.dtype):
            logits = x @ w.T
            add_symbols_(total, ignored, logits, no_target)
            add_divergence_(divergences, logits, predictions.logits(rows), predictions.total)
        return divergences + total, total

    def losses_backward(self, scored: Scored, scale: Tensor) -> Tensor:
        """Run the backward of losses; the last use passes the weight's gradient to the sink.

        Args:
            scored: inputs of the losses.
            scale: (M,) float32, gradient of each loss.

        Returns:
            The gradient of x, (M, D) in its dtype.
        """
        grad_x = torch.zeros(scored.x.shape, dtype=torch.float32, device=scored.x.device)
        if self.is_last_use:
            self.forget()
            self.emit_gradient_of_uses(self.sink, [(scored, scale)], grad_x)
        else:
            ranges = map(self.rows_of, self.gradient_ranges())
            grads = [self._gradient_of_losses(scored, scale, rows, grad_x) for rows in ranges]
            self.collect(Graded(grads), scale)
        return grad_x.to(scored.x.dtype)

    def propagate_losses(self, scored: Scored, scale: Tensor) -> Tensor:
        """Compute the gradient of x alone, (M, D), as `losses_backward` does."""
        grad_x = torch.zeros(scored.x.shape, dtype=torch.float32, device=scored.x.device)
        for rows, w in self._chunks(scored.x.dtype):
            _add_product_(grad_x, _gradient_of_logits(scored, scale, rows, w), w)
        return grad_x.to(scored.x.dtype)

    def emit_gradient_of_uses(
        self,
        sink: GradientSink | None,
        uses: list[tuple[Scored | Graded | Tensor, Tensor]],
        grad_x: Tensor | None = None,
    ) -> None:
        """Compute the gradient of each chunk from all uses, and pass it to the sink.

        Args:
            sink: consumer of the gradients, (N, D) of each chunk; None discards them.
            uses: pairs of inputs and gradients: of losses `Scored` or `Graded`, and (M,) float32;
                of products (M, D) and (M, V); of embeddings (M,) int64 ids and (M, D).
            grad_x: (M, D) float32, to which the losses' gradient of x is added.
        """
        if sink is None and not self.frozen:
            warnings.warn(NO_SINK, RuntimeWarning, stacklevel=1)
        looked_up = [use for use in uses if _are_ids(use[0])]
        uses = [use for use in uses if not _are_ids(use[0])]
        if looked_up:
            ids, grads = map(torch.cat, zip(*looked_up, strict=True))
            grad_rows, touched = _gradient_of_rows(ids, grads, self.out_features)
        for index, chunk in enumerate(self.gradient_ranges()):
            rows = self.rows_of(chunk)
            grad = self._gradient_of_chunk(uses, index, rows, grad_x)
            if looked_up:
                shape = rows.stop - rows.start, self.in_features
                dense = torch.zeros(shape, dtype=torch.float32, device=grad_rows.device)
                indices = touched.rows - rows.start
                scatter_rows_(dense.view(torch.uint8), indices, grad_rows.view(torch.uint8))
                grad = dense if grad is None else dense.add_(grad)
            if sink is None or grad is None:
                continue
            if self.matrices == 1:
                sink(self, grad)
            else:
                sink(self, grad[None], range(index, index + 1))

    def _gradient_of_chunk(
        self,
        uses: list[tuple[Scored | Graded | Tensor, Tensor]],
        index: int,
        rows: slice,
        grad_x: Tensor | None,
    ) -> Tensor | None:
        """Compute the gradient of a chunk of rows from losses and products; None without these."""
        grad = None
        for source, grad_result in uses:
            if isinstance(source, Graded):
                part = source.chunks[index]
            elif isinstance(source, Scored):
                part = self._gradient_of_losses(source, grad_result, rows, grad_x)
            else:
                part = grad_result[:, rows].T @ source
            grad = part if grad is None or part is None else grad + part
        return grad

    def _gradient_of_losses(
        self, scored: Scored, scale: Tensor, rows: slice, grad_x: Tensor | None
    ) -> Tensor | None:
        """Compute the gradient of a chunk of rows, None without a sink, and add to that of x."""
        w = self.decode_rows(rows, scored.x.dtype)
        grad_logits = _gradient_of_logits(scored, scale, rows, w)
        if grad_x is not None:
            _add_product_(grad_x, grad_logits, w)
        return None if self.sink is None else grad_logits.T @ scored.x

    def decode_rows(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Decode the weights of a slice of symbols, (N, D) of `dtype`."""
        return decode_weight(self.packed.rows(rows), dtype)

    def _chunks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each chunk, and their decoded weights, (N, D) of `dtype`."""
        for chunk in self.gradient_ranges():
            rows = self.rows_of(chunk)
            yield rows, self.decode_rows(rows, dtype)


class ManyEmbeddingsWeight(SymbolWeight):
    """The weight of a `TernaryEmbedding` with a large vocabulary, stepped in chunks of rows.

    Chunks of which a batch reads no row are not stepped.
    """

    always_has_gradients = False

    def __init__(self, vocabulary: int, dim: int, spec: LayerSpec, *, area: str) -> None:
        super().__init__(vocabulary, dim, spec, area=area, std=1.0, lr_factor=1.0)


def _are_ids(source: Scored | Graded | Tensor) -> bool:
    return isinstance(source, Tensor) and not source.is_floating_point()


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a float32 sum: on a GPU in the product, which is not rounded before."""
    if a.dtype != torch.float32 and backend_of(a) == "triton" and not a.is_cpu:
        if not a.is_meta:  # for which torch 2.11 cannot trace it; it allocates nothing
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def _gradient_of_logits(scored: Scored, scale: Tensor, rows: slice, w: Tensor) -> Tensor:
    logits = scored.logits.pop(0) if scored.logits else scored.x @ w.T
    targets = scored.targets
    if isinstance(targets, Predictions):
        grade_divergence_(logits, targets.logits(rows), scored.total, targets.total, scale)
    else:
        grade_symbols_(logits, targets - rows.start, scored.total, scale)
    return logits


def _gradient_of_rows(ids: Tensor, grad_y: Tensor, num_rows: int) -> tuple[Tensor, TouchedRows]:
    """Sum the gradients of the rows that were looked up.

    Args:
        ids: (M,) int64.
        grad_y: (M, D).
        num_rows: rows of the table, V.

    Returns:
        The gradients, (R, D) float32 with R = min(M, V), and the indices of these rows.
    """
    touched = touched_rows(ids, num_rows)
    ones = torch.ones(len(ids), dtype=torch.float32, device=ids.device)
    slots = torch.arange(len(ids), device=ids.device)
    return weighted_rows_grad(grad_y, ones, slots, touched, torch.float32), touched


class _Losses(Function):
    """Losses of each row of norm(x) @ w.T; the gradient of w goes to the weight's sink."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        targets: Tensor | Predictions,
        _anchor: Tensor,
        weight: SymbolWeight,
        norm: TernaryRMSNorm,
        room: int,
    ) -> Tensor:
        ctx.weight, ctx.norm, ctx.predictions, ctx.kept = weight, norm, None, []
        normal = norm(x)
        if isinstance(targets, Predictions):
            losses, total = weight.diverge(normal, targets)
            ctx.predictions = targets
            ctx.save_for_backward(x, total)
        else:
            losses, total, ctx.kept = weight.score(normal, targets, room)
            ctx.save_for_backward(x, total, targets)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, total, *targets_of_loss = ctx.saved_tensors
        norm, targets = ctx.norm, ctx.predictions or targets_of_loss[0]
        scored = Scored(norm(x), targets, total, ctx.kept)
        grad_x, _ = norm.backward(ctx.weight.losses_backward(scored, grad.contiguous()), x)
        return grad_x, None, None, None, None, None


class SymbolHead(TernaryLinear):
    """A head for a large vocabulary, which can compute losses without storing all logits."""

    weight: SymbolWeight

    def __init__(self, vocabulary: int, dim: int, spec: LayerSpec, *, area: str) -> None:
        nn.Module.__init__(self)
        self.weight = SymbolWeight(vocabulary, dim, spec, area=area)

    def losses(
        self, x: Tensor, targets: Tensor | Predictions, norm: TernaryRMSNorm, *, recompute: bool
    ) -> Tensor:
        """Compute the cross-entropy of each position in nats, or its divergence from a teacher.

        Args:
            x: (..., D), the stream.
            targets: (...) int64, or a teacher's predictions.
            norm: norm that is applied to x first.
            recompute: whether blocks are recomputed: see `KEPT_BYTES`.

        Returns:
            (...) float32.
        """
        room = 0
        if torch.is_grad_enabled():
            room = KEPT_BYTES[recompute]
            self.weight.await_backward()
            norm.await_backward()
        rows = x.reshape(-1, x.shape[-1])
        symbols = targets if isinstance(targets, Predictions) else targets.reshape(-1)
        losses = _Losses.apply(rows, symbols, anchor(x), self.weight, norm, room)
        return losses.view(x.shape[:-1])

    @torch.no_grad()
    def predictions(self, x: Tensor, norm: TernaryRMSNorm) -> Predictions:
        """Return a teacher's predictions for its stream, (..., D), as targets of `losses`."""
        rows = norm(x.reshape(-1, x.shape[-1]))
        no_target = torch.full((len(rows),), -1, device=x.device)
        return Predictions(rows, self.weight, self.weight.score(rows, no_target)[1])


class TiedHead(SymbolHead):
    """A head that shares the weight of the embedding."""

    def __init__(self, weight: SymbolWeight) -> None:
        nn.Module.__init__(self)
        self._embedding_weight = (weight,)  # a tuple, so that it is not registered twice

    @property
    def weight(self) -> SymbolWeight:  # type: ignore[override]
        """The weight of the embedding."""
        return self._embedding_weight[0]
