"""Weights of experts in the float baselines."""

from typing import Any

import torch
from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.families.experts.kernels.grouped_matmul import grouped_grad_w, grouped_matmul
from arbcli.model.baselines import FloatWeight
from arbcli.model.initial import projection_std
from arbcli.model.layers.compiled import KeepsInputs, operator


class FloatExpertWeight(FloatWeight):
    """Float matrices of all experts, stacked by rows; the counterpart of `ExpertWeight`."""

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
        rows = experts * out_features
        super().__init__(rows, in_features, spec, std=std or projection_std(in_features))
        self.experts = experts

    def multiply(self, x: Tensor, bounds: Tensor, norm: nn.Module | None) -> Tensor:
        """Multiply the slots of each expert, (S, K), by its matrix: (S, N).

        Uses torch's grouped product in bf16 on a GPU, and `grouped_matmul` elsewhere.
        """
        x = norm(x) if norm else x
        w = self.weight(x.dtype).unflatten(0, (self.experts, -1))
        if x.is_cuda and x.dtype == torch.bfloat16:
            return torch._grouped_mm(x, w.transpose(1, 2), offs=bounds[1:].to(torch.int32))
        return _grouped_product(x, w, bounds)


class _GroupedProduct(KeepsInputs):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bounds: Tensor) -> Tensor:
        return grouped_matmul(x, w, bounds)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, w, bounds = ctx.saved_tensors
        return grouped_matmul(grad_y, w.mT, bounds), grouped_grad_w(grad_y, x, bounds), None


_grouped_product = operator(_GroupedProduct, lambda x, w, bounds: x.new_empty(len(x), w.shape[1]))
