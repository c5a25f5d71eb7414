"""Float baselines in several processes: DistributedDataParallel with bfloat16 gradients."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from arbcli.model.language_model import LanguageModel


class _Losses(nn.Module):
    """The losses of a step as a module, for DistributedDataParallel."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
        return self.model.losses(*inputs, **options)


class Replicas:
    """Computes the losses of a float baseline; the backward averages gradients over processes.

    Args:
        model: a model with float weights, equal in all processes.
        local: number of micro-batches of this process in a step.
    """

    def __init__(self, model: LanguageModel, local: int) -> None:
        devices = [model.device.index] if model.device.type == "cuda" else None
        self._wrapped = DistributedDataParallel(
            _Losses(model), device_ids=devices, gradient_as_bucket_view=True
        )
        if model.device.type == "cuda":  # gloo does not support bfloat16
            self._wrapped.register_comm_hook(None, bf16_compress_hook)
        self._local, self._micro = local, 0

    def __call__(self, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
        """Compute the losses, float32 scalars; the last micro-batch of a step reduces gradients.

        Args:
            *inputs: arguments of `LanguageModel.losses`.
            **options: its other arguments.
        """
        self._micro = self._micro % self._local + 1
        # equivalent to `no_sync`
        self._wrapped.require_backward_grad_sync = self._micro == self._local
        return self._wrapped(*inputs, **options)
