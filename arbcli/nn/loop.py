"""Parts of plain training loops: a loss without logits, and steps as CUDA graphs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from arbcli.base.errors import ArbError
from arbcli.kernels.runtime.device import EAGER_STEPS, capturing
from arbcli.kernels.runtime.merged import TABLES
from arbcli.nn.layers import IntegerModule
from arbcli.nn.optimizer import IntegerOptimizer
from arbcli.nn.weights import Symbols


def linear_cross_entropy(
    head: nn.Module, x: Tensor, targets: Tensor, ignore_index: int = -100
) -> Tensor:
    """Compute the mean cross-entropy of a head's logits, in nats.

    The logits of a large head, or of one that an embedding shares, are never in memory: they are
    computed in chunks of the vocabulary, and again in the backward.

    Args:
        head: a linear layer without a bias.
        x: (..., K) bfloat16 or float32.
        targets: (...) int64.
        ignore_index: target without a loss.

    Returns:
        A float32 scalar.

    Raises:
        ArbError: a target is outside of the vocabulary; not checked on a GPU.
    """
    rows, symbols = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    packed = head._packed.get("weight") if isinstance(head, IntegerModule) else None
    if not isinstance(packed, Symbols) or getattr(head, "bias", None) is not None:
        return functional.cross_entropy(head(rows).float(), symbols, ignore_index=ignore_index)
    mask = symbols != ignore_index
    if not symbols.is_cuda and ((symbols < 0) | (symbols >= packed.out_features))[mask].any():
        raise ArbError(
            f"a target is outside of 0..{packed.out_features - 1}",
            "targets without a loss are `ignore_index`",
        )
    losses = packed.losses(rows, symbols.where(mask, 0))
    return (losses * mask).sum() / mask.sum()


class CapturedStep:
    """The step of a plain loop, which a GPU replays as a CUDA graph.

    The first steps run as they are, and so do all steps on a CPU. A replay runs the same kernels
    without Python between them, so hooks and prints of the model are not repeated, and inputs have
    the shapes of the first ones. Float parameters are not stepped.

    Args:
        optimizer: optimizer of the integers.
        loss: computes the loss of a micro-batch from its tensors, without reading values.
    """

    def __init__(self, optimizer: IntegerOptimizer, loss: Callable[..., Tensor]) -> None:
        self.optimizer, self.loss = optimizer, loss
        self._steps = self._table_numbers = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[tuple[Tensor, ...]] = []
        self._total: Tensor | None = None

    def __call__(self, *micro_batches: Sequence[Tensor]) -> Tensor:
        """Run a step.

        Args:
            micro_batches: arguments of `loss`, as many as the optimizer's `accumulation`.

        Returns:
            The mean loss before the step, a scalar on the device.
        """
        accumulation = self.optimizer.param_groups[0]["accumulation"]
        if len(micro_batches) != accumulation:
            raise ArbError(
                f"a step has {accumulation} micro-batches, and {len(micro_batches)} were passed",
                "pass as many as the optimizer's `accumulation`",
            )
        uses_gpu = micro_batches[0][0].is_cuda
        self._steps += 1
        if not uses_gpu or self._steps <= EAGER_STEPS:
            previous = TABLES.brought
            total = self._run(micro_batches)
            self._table_numbers = TABLES.brought - previous
            return total
        if self._graph is None:
            self._capture(micro_batches)
        for buffers, micro_batch in zip(self._inputs, micro_batches, strict=True):
            for buffer, tensor in zip(buffers, micro_batch, strict=True):
                buffer.copy_(tensor, non_blocking=True)
        self.optimizer.set_step()
        assert self._graph is not None, "it was captured"
        assert self._total is not None, "with its loss"
        self._graph.replay()
        self.optimizer.step_number += 1
        return self._total.clone()

    def _run(self, micro_batches: Sequence[Sequence[Tensor]]) -> Tensor:
        total: Tensor | None = None
        for inputs in micro_batches:
            loss = self.loss(*inputs)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        self.optimizer.step()
        assert total is not None, "there is a micro-batch"
        return total / len(micro_batches)

    def _capture(self, micro_batches: Sequence[Sequence[Tensor]]) -> None:
        """Capture a step, which changes no state."""
        self._inputs = [tuple(part.clone() for part in inputs) for inputs in micro_batches]
        torch.cuda.empty_cache()  # the graph has a memory pool of its own
        self._graph = torch.cuda.CUDAGraph()
        self.optimizer.set_step()
        self.optimizer.is_set = True
        number = self.optimizer.step_number
        try:
            room = TABLES.captured(self._table_numbers, self._inputs[0][0].device)
            with room as self._tables, capturing(self._graph):
                self._total = self._run(self._inputs)
        finally:
            self.optimizer.is_set, self.optimizer.step_number = False, number
