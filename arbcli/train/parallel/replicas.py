"""A float twin in several processes: torch's own DistributedDataParallel, gradients in bfloat16."""

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from arbcli.model.language_model import LanguageModel


class _Losses(nn.Module):
    """Losses of a step, as the one function that DistributedDataParallel wraps."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> dict[str, Tensor]:
        return self.model.losses(*given)


class Replicas:
    """The losses of a twin, whose backward averages the gradients of all processes.

    Args:
        model: with float weights, the same in all processes.
        local: micro-batches of this process in a step.
    """

    def __init__(self, model: LanguageModel, local: int) -> None:
        devices = [model.device.index] if model.device.type == "cuda" else None
        self._wrapped = DistributedDataParallel(
            _Losses(model), device_ids=devices, gradient_as_bucket_view=True
        )
        if model.device.type == "cuda":  # half of what float32 takes; gloo has no bfloat16
            self._wrapped.register_comm_hook(None, bf16_compress_hook)
        self._local, self._micro = local, 0

    def __call__(self, *given: Tensor) -> dict[str, Tensor]:
        """Compute the parts of the loss; the last micro-batch of a step brings gradients along."""
        self._micro = self._micro % self._local + 1
        # as its `no_sync` does
        self._wrapped.require_backward_grad_sync = self._micro == self._local
        return self._wrapped(*given)
