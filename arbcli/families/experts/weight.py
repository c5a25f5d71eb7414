"""Weights of experts, multiplied in a grouped matrix product."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from arbcli.config.layer_spec import LayerSpec
from arbcli.families import FOUR_BIT_PRODUCTS
from arbcli.families.experts.kernels.grouped_matmul import (
    MAX_EXPERTS,
    grouped_grad_w,
    grouped_matmul,
)
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.model.initial import projection_std
from arbcli.model.layers.compiled import operator
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.layers.products import FEW_ROWS, LowPrecision, fits_low_precision
from arbcli.model.packed import GradientSink, StreamedTensor

WEIGHTS_AT_ONCE = 2**25
"""Maximum number of weights that are decoded, or whose gradient is computed, at once."""


class ExpertWeight(StreamedTensor, LowPrecision):
    """The matrices of all experts, stacked by rows and stepped separately."""

    nvfp4 = False
    """Whether products of many slots emulate NVFP4: see `build_model`."""

    def __init__(
        self,
        experts: int,
        out_features: int,
        in_features: int,
        spec: LayerSpec,
        *,
        area: str,
        std: float | None = None,
    ) -> None:
        super().__init__(
            experts * out_features,
            in_features,
            spec,
            area=area,
            std=projection_std(in_features) if std is None else std,
            matrices=experts,
        )

    def multiply_in(self, number_format: str) -> bool:
        """Multiply in NVFP4 if the shapes fit: see `LowPrecision`."""
        fits = fits_low_precision(self.matrix_rows, self.in_features)
        self.nvfp4 = number_format == "nvfp4" and fits
        return self.nvfp4

    def multiply(self, x: Tensor, bounds: Tensor, norm: TernaryRMSNorm | None) -> Tensor:
        """Multiply the slots of each expert by its matrix; differentiable.

        Args:
            x: (S, K) slots, sorted by expert.
            bounds: (E + 1,) int64: slots of expert e are bounds[e] to bounds[e + 1] - 1.
            norm: norm or gate that is applied to x first; None for none.

        Returns:
            (S, N).
        """
        return _grouped_linear(x, self, bounds, norm)

    def product(
        self, x: Tensor, bounds: Tensor, *, transposed: bool = False, apart: bool = False
    ) -> Tensor:
        """Multiply the sorted slots, (S, K), by the matrix of their expert, or its transpose.

        With `apart`, the bits of a slot's result do not depend on the other slots.
        """
        width = self.in_features if transposed else self.matrix_rows
        y = x.new_empty(len(x), width)  # each slot has an expert, so all rows are written
        four_bits, scales = self.nvfp4 and len(x) > FEW_ROWS, []
        if four_bits:
            x, x_scale = import_module(FOUR_BIT_PRODUCTS).round_nvfp4(x)
        for experts_range in self.gradient_ranges():
            w = decode_weight(self.packed.rows(self.rows_of(experts_range)), x.dtype)
            w = w.unflatten(0, (len(experts_range), -1))
            w = w.transpose(1, 2) if transposed else w
            if four_bits:
                w, w_scale = import_module(FOUR_BIT_PRODUCTS).round_stack_nvfp4(w)
                scales.append(x_scale * w_scale)
            grouped_matmul(x, w, bounds[experts_range.start : experts_range.stop + 1], y, apart)
        if four_bits:
            y *= torch.cat(scales)[_owners(x, bounds), None]
        return y

    def emit_gradient(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Compute the gradients of ranges of experts, and pass them to the sink.

        Args:
            sink: consumer of the gradients: (experts, N, K) with their range.
            sources: slots, (S, K) sorted by expert, and their bounds, (E + 1,) int64, of each use.
            grad_y: output gradients of all uses, concatenated: (S of all uses, N).
        """
        x, bounds = sources[0]
        if len(sources) > 1:
            owners = torch.cat([_owners(x, bounds) for x, bounds in sources])
            owners, order = owners.sort(stable=True)
            x, grad_y = torch.cat([x for x, _ in sources])[order], grad_y[order]
            bounds = torch.searchsorted(owners, torch.arange(self.matrices + 1, device=x.device))
        for experts_range in self.gradient_ranges():
            grads = grouped_grad_w(grad_y, x, bounds[experts_range.start : experts_range.stop + 1])
            sink(self, grads, experts_range)

    def gradient_ranges(self) -> list[range]:
        """Return the ranges of experts that are decoded, or have gradients computed, together."""
        together = max(1, WEIGHTS_AT_ONCE // (self.matrix_rows * self.in_features))
        together = min(together, MAX_EXPERTS)
        all_experts = range(self.matrices)
        return [all_experts[start : start + together] for start in all_experts[::together]]


def _owners(x: Tensor, bounds: Tensor) -> Tensor:
    """Return the expert of each of the sorted slots, (S,) int64, by their bounds."""
    return torch.searchsorted(bounds[1:], torch.arange(len(x), device=x.device), right=True)


class _GroupedLinear(Function):
    """y = norm(x) @ w[expert].T for slots sorted by expert; see `layers._Linear`."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: ExpertWeight,
        bounds: Tensor,
        norm: TernaryRMSNorm | None,
        anchor: Tensor,
        trained: bool,
    ) -> Tensor:
        if trained:
            weight.await_backward()
            if norm:
                norm.await_backward()
        return weight.product(norm(x) if norm else x, bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.weight, bounds, ctx.norm, *_ = inputs
        ctx.save_for_backward(x, bounds)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, bounds = ctx.saved_tensors
        grad_x = ctx.weight.product(grad_y, bounds, transposed=True)
        if ctx.norm:
            grad_x, x = ctx.norm.backward(grad_x, x)
        ctx.weight.collect((x, bounds), grad_y)
        return grad_x, None, None, None, None, None


_grouped_linear = operator(
    _GroupedLinear,
    lambda x, trits, bounds, *_: x.new_empty(len(x), len(trits) // (len(bounds) - 1)),
)
