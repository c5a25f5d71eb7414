"""All weights of a model: their state, their initialisation, and tensors derived from them."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from arbcli.base.errors import ArbError
from arbcli.config.model import CACHE_DTYPES, ModelConfig
from arbcli.config.settings import check_choice
from arbcli.model import packed
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.parts.cached import CachedAttention, CacheFormat


class JoinedStatistics:
    """A part that records statistics in forward passes, which processes combine after a step."""

    def join(self, group: Any) -> None:
        """Combine the statistics of all processes.

        Args:
            group: the `arbcli.training.parallel.group.Group` of the run.
        """


class StepMemory(packed.StateModule, JoinedStatistics):
    """A part whose integer state is updated after a step, without gradients.

    Passes of micro-batches record statistics by name: tensors, and integers that are added up.

    Args:
        area: parameter group of the buffers, as reports name it.
    """

    def __init__(self, area: str) -> None:
        super().__init__(area)
        self.forget()

    def forget(self) -> None:
        """Clear the statistics, also of a step that was aborted."""
        self.records: dict[str, list[Tensor]] = {}
        """Recorded tensors, in the order of the micro-batches."""
        self.sums: dict[str, Tensor] = {}
        """Sums of integers."""

    def record(self, name: str, tensor: Tensor) -> None:
        """Record a tensor of a micro-batch, of the same shape in all of them."""
        self.records.setdefault(name, []).append(tensor)

    def add(self, name: str, integers: Tensor) -> None:
        """Add integers, of the same shape in all micro-batches, to their sum."""
        self.sums[name] = self.sums[name] + integers if name in self.sums else integers

    def join(self, group: Any) -> None:
        """Combine the statistics of all processes; records in the order of the micro-batches."""
        self.records = {name: group.gather(parts) for name, parts in self.records.items()}
        self.sums = {name: group.sum(total) for name, total in self.sums.items()}

    def finish_step(self) -> None:
        """Update the state from the statistics, and clear them; does not synchronise."""
        raise NotImplementedError


class PackedModel(nn.Module):
    """A module over packed tensors, or over the float weights of a baseline.

    Args:
        config: configuration of the model.
        compute_dtype: dtype of activations, bfloat16 or float32.
    """

    cache_format = CacheFormat()
    """Storage format of keys and values in caches."""
    weights_are_prepared = False
    """Whether the model is within `prepared_weights`."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype

    def forget_uses(self) -> None:
        """Discard forward passes whose backward was not run, as after an error."""
        for part in self.modules():
            if isinstance(part, packed.StreamedTensor | StepMemory):
                part.forget()

    def _memories(self) -> list[StepMemory]:
        return [part for part in self.modules() if isinstance(part, StepMemory)]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(itertools.chain(self.buffers(), self.parameters())).device

    @property
    def fits_bytes(self) -> bool:
        """Whether the integer values of all linear layers' weights fit in int8."""
        return all(matrix.rule.fits_a_byte for matrix in self._matrices())

    @contextmanager
    def prepared_weights(self, spare_bytes: int = 0) -> Iterator[None]:
        """Cache tensors derived from the weights, which must not change within the block.

        Float weights are cast once. Packed matrices are prepacked for decoding steps.

        Args:
            spare_bytes: memory for decoded matrices, which the torch backend keeps if all fit.
        """
        with ExitStack() as stack:
            if self.decoded_bytes <= spare_bytes:
                for weight in self._matrices():
                    stack.enter_context(weight.decoded_once())
            for part in self.modules():
                if isinstance(part, packed.Weight):
                    stack.enter_context(part.cast_once(self.compute_dtype))
                elif isinstance(part, packed.DecodingLayer):
                    stack.enter_context(part.prepacked_once())
            previous, self.weights_are_prepared = self.weights_are_prepared, True
            try:
                yield
            finally:
                self.weights_are_prepared = previous

    @property
    def decoded_bytes(self) -> int:
        """Size of all linear layers' matrices, decoded to the dtype of activations, in bytes."""
        return sum(weight.num_weights for weight in self._matrices()) * self.compute_dtype.itemsize

    def _matrices(self) -> list[LinearWeight]:
        return [part for part in self.modules() if isinstance(part, LinearWeight)]

    @contextmanager
    def cached_as(self, kv: str | None) -> Iterator[None]:
        """Set the storage format of keys and values for caches created within the block.

        A forward without a cache rounds keys and values likewise, so that its losses equal those of
        decoding. For inference only.

        Args:
            kv: `fp8`, `int8`, `bf16` if activations are bfloat16, or None for the dtype of
                activations. With `-mixed`, elements of keys that RoPE rotates are not quantised;
                with `-queries`, queries are quantised too.

        Raises:
            ArbError: the format is unknown, the model has no keys and values, or does not support
                it.
        """
        check_choice("kv", kv, (*CACHE_DTYPES, None))
        if kv == "bf16" and self.compute_dtype != torch.bfloat16:
            raise ArbError(
                "`--kv bf16` needs activations in bf16, and they are float32",
                "leave `--kv` out, or add `--compute bf16`",
            )
        chosen, previous = CacheFormat.parse(kv), self.cache_format
        attentions = [part for part in self.modules() if isinstance(part, CachedAttention)]
        if chosen.code_dtype and not attentions:
            raise ArbError("this model has no keys and values", "leave `--kv` out")
        if chosen.queries and not all(part.rounds_queries for part in attentions):
            raise ArbError(
                "queries of latent attention cannot be stored in eight bits",
                f"use `--kv {chosen._replace(queries=False).name('')}`",
            )
        parts: list[PackedModel | CachedAttention] = [self, *attentions]
        for part in parts:
            part.cache_format = chosen
        try:
            yield
        finally:
            for part in parts:
                part.cache_format = previous

    @property
    def cache_dtype(self) -> str:
        """Name of the storage format of keys and values."""
        return self.cache_format.name("bf16" if self.compute_dtype == torch.bfloat16 else "fp32")

    def initialise(self, seed: int) -> None:
        """Initialise all weights from a seed: see `arbcli.model.initial`."""
        for index, weight in enumerate(packed.drawn_weights(self)):
            weight.initialise(seed, index)

    def drop_training_state(self) -> None:
        """Delete the buffers that only training needs: see `TernaryTensor.drop_training_state`."""
        for weight in self.packed_tensors().values():
            weight.drop_training_state()

    def declare_wire(self) -> None:
        """Declare the buffers for several processes: see `TernaryTensor.declare_wire`."""
        for weight in self.packed_tensors().values():
            weight.declare_wire()

    def state_modules(self) -> Iterator[packed.StateModule]:
        """Yield all modules with persistent buffers, in the order of the model."""
        return (part for part in self.modules() if isinstance(part, packed.StateModule))

    def packed_tensors(self) -> dict[str, packed.TernaryTensor]:
        """Return all packed tensors by name, in the order of the model; none for a baseline."""
        tensors = self.weights().items()
        return {name: part for name, part in tensors if isinstance(part, packed.TernaryTensor)}

    @property
    def num_weights(self) -> int:
        """Number of weights, including those of frozen norms."""
        return sum(weight.num_weights for weight in self.weights().values())

    def weights(self) -> dict[str, packed.Weight]:
        """Return all weights by name, in the order of the model."""
        return {
            name: part for name, part in self.named_modules() if isinstance(part, packed.Weight)
        }
