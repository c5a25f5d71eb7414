"""The packed tensor: trits, scales and training state in uint8 and int8.

The gradient of a `StreamedTensor` is computed in the backward of its last use, for a sink.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from arbcli.config.layer_spec import LayerSpec
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.layout import row_bytes
from arbcli.kernels.codec.packed import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    OCTAVE,
    Packed,
    num_groups,
)
from arbcli.kernels.codec.packing import pack_trits
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.update.random_bits import random_bits, stream_key
from arbcli.model.layers.compiled import Findable
from arbcli.model.optimizers import find_direction
from arbcli.model.rules import DIRECTION, find_rule

if TYPE_CHECKING:
    from arbcli.model.optimizers.base import State


class Weight(nn.Module):
    """A weight of a model: a packed tensor, or the float matrix of a baseline."""

    frozen = False
    """Whether it is never stepped."""
    lr_factor: float = 1.0
    """Factor of the learning rate."""

    @property
    def num_weights(self) -> int:
        """Number of elements."""
        raise NotImplementedError

    def initialise(self, seed: int, index: int) -> None:
        """Draw the weight; it only depends on `seed` and `index`."""
        raise NotImplementedError

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (N, K) of a dtype."""
        raise NotImplementedError

    def cast_once(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Cache the cast weight within the block; packed weights have none."""
        return nullcontext()


class DecodingLayer(nn.Module):
    """A layer that derives tensors from its weights for decoding steps."""

    def prepacked_once(self) -> AbstractContextManager[None]:
        """Cache these tensors within the block; the weights must not change meanwhile."""
        raise NotImplementedError


class StateModule(nn.Module):
    """A module whose persistent buffers are integers, each declared with its purpose.

    Counting, memory prediction and the audit read these declarations.

    Args:
        area: parameter group of the buffers, as reports name it.
    """

    unread: frozenset[str] = frozenset()
    """Names of buffers that only steps read."""

    def __init__(self, area: str) -> None:
        super().__init__()
        self.area = area
        self.kinds: dict[str, str] = {}
        """Purpose of each buffer, by name: `trits`, `scales`, `remainder`, `moment` and others."""

    def declare(self, name: str, tensor: Tensor, kind: str) -> None:
        """Register an integer buffer with its purpose, such as `trits` or `counters`."""
        self.register_buffer(name, tensor)
        self.kinds[name] = kind


@runtime_checkable
class DrawOrder(Protocol):
    """A module with several parts that have weights; `draws` numbers them for initialisation."""

    @property
    def draws(self) -> tuple[str, ...]:
        """Names of the parts, in the order of their random streams; a new one comes last."""


def drawn_weights(module: nn.Module) -> list[Weight]:
    """List the weights of a module in the order of their random streams of initialisation.

    The order of modules does not matter to these; it numbers the streams of updates.

    Raises:
        ValueError: a module does not declare the order of its parts.
    """
    if isinstance(module, Weight):
        return [module]
    children = {name: drawn_weights(child) for name, child in module.named_children()}
    names = [name for name, weights in children.items() if weights]
    if isinstance(module, nn.ModuleList):
        names.sort(key=int)
    elif len(names) > 1:
        draws = module.draws if isinstance(module, DrawOrder) else ()
        if missing := [name for name in names if name not in draws]:
            raise ValueError(f"`draws` of `{type(module).__name__}` lacks {missing}")
        names.sort(key=draws.index)
    weights = [weight for name in names for weight in children[name]]
    return list(dict.fromkeys(weights))  # tied weights are drawn once


class TernaryTensor(StateModule, Weight):
    """An N by K weight matrix that is stored as packed trits with integer scales.

    A weight is an integer z = T P + A, with the trit T, the remainder A, and the P of its rule. The
    model multiplies by T, or by z / U with U the next power of two of P, times the scale
    2**(E + F / 128) of its group of G consecutive weights of a row.

    `Ternary` in names of classes, and `weights="ternary"` of a configuration, say that a weight is
    stored with a trit as its high digit, in contrast to a float baseline. `--weights int8`
    multiplies by z.

    Buffers, in addition to those of its rule and direction:
        trits: (N, row_bytes(K)) uint8, five weights a byte.
        exponent, fraction: (N, ceil(K / G)) int8, the digits E and F of each scale.

    Args:
        out_features: N.
        in_features: K.
        spec: storage settings of the stage that it belongs to.
        area: parameter group, as reports name it.
        std: initial standard deviation of the weights.
        spread: initial standard deviation of z relative to the rule's; 0 initialises to zero.
        direction: direction of its steps; None is that of `spec`.
        lr_factor: factor of the learning rate, in addition to that of the spec's rule.
        frozen: whether it is never stepped; its weights are 1, and it only has trits and scales.
        matrices: number of matrices stacked by rows, each of which is stepped separately.
    """

    trits: Tensor
    exponent: Tensor
    fraction: Tensor
    """Absent for rules without fractions."""
    remainder: Tensor
    """Absent for rules without a remainder."""
    row_statistic: Tensor
    column_statistic: Tensor
    """Present if the direction keeps statistics."""
    wire_exponent: Tensor
    """Present after `declare_wire`."""
    average: Tensor
    """Present after `declare_averages` of `arbcli.model.averages`."""
    fixed_scales = False
    """Whether no step changes the scales."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        spec: LayerSpec,
        *,
        area: str,
        std: float = 1.0,
        spread: float = 1.0,
        direction: str | None = None,
        lr_factor: float = 1.0,
        frozen: bool = False,
        matrices: int = 1,
    ) -> None:
        super().__init__(area)
        self.out_features, self.in_features = out_features, in_features
        self.lr_factor = lr_factor * spec.lr_factor
        self.decays = True
        """Whether weight decay shrinks the weights."""
        self.std, self.spread, self.frozen, self.matrices = std, spread, frozen, matrices
        self.updates = 0
        """Number of steps launched by Python; steps in CUDA graphs are not counted."""
        self.group_size = spec.group_size
        self.rule = find_rule(spec.rule, "trit" if frozen else spec.digits, spec.votes_fixes)
        self.fades = spec.digits not in ("trit", "all")
        """Whether its weights fade from all digits to the trit in the course of a run."""
        self.reads_digits = self.rule.reads_all
        """Whether forward passes read the remainder; fading weights do so until they have faded."""
        name = direction or spec.direction
        self.direction = find_direction(name) if name and DIRECTION[spec.rule] else None
        groups = num_groups(in_features, spec.group_size)
        trits = torch.empty(out_features, row_bytes(in_features), dtype=torch.uint8)
        self.declare("trits", trits, "trits")
        self.training_only: tuple[str, ...] = ()
        """Names of the buffers that only training needs."""
        self._declare_int8("exponent", (out_features, groups), "scales")
        if frozen or self.rule.has_fraction:
            self._declare_int8("fraction", (out_features, groups), "scales")
        if frozen:
            return
        buffers = self.rule.buffers(out_features, in_features, groups)
        if self.direction is not None:
            buffers |= self.direction.buffers(out_features, in_features, matrices)
        for name, buffer in buffers.items():
            self._declare_int8(name, *buffer)
        read = {"remainder"} if self.reads_digits else set()
        self.training_only = tuple(name for name in buffers if name not in read)

    def drop_training_state(self) -> None:
        """Delete the buffers that only training needs; the weights can no longer be stepped."""
        for name in self.training_only:
            delattr(self, name)
            del self.kinds[name]
        self.training_only = ()

    def declare_wire(self) -> None:
        """Declare the quantisation scales of gradients in the all-reduce between processes.

        `wire_exponent`, (N, 1) int8, has the exponent of two for each row, or `NONE` before the
        first gradient. It is saved in checkpoints of runs with several processes.
        """
        from arbcli.kernels.update.quantise_gradient import NONE

        if not self.frozen:
            exponents = torch.full((self.out_features, 1), NONE, dtype=torch.int8)
            self.declare("wire_exponent", exponents.to(self.trits.device), "wire")
            self.training_only += ("wire_exponent",)

    def _declare_int8(self, name: str, shape: tuple[int, int], kind: str) -> None:
        self.declare(name, torch.empty(shape, dtype=torch.int8), kind)

    @property
    def num_weights(self) -> int:
        """Number of weights, without padding."""
        return self.out_features * self.in_features

    @property
    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Exponent and fraction of the scales, (N, ceil(K / G)) int8 each; None for no fraction."""
        return self.exponent, getattr(self, "fraction", None)

    @property
    def packed(self) -> Packed:
        """The weights as kernels read them: views of trits, scales and remainder."""
        return self.packed_of(self.state)

    def packed_of(self, state: "State") -> Packed:
        """Return `packed` for a partial state, of one matrix or of some rows."""
        scales = state["exponent"], state.get("fraction")
        packed = Packed(state["trits"], *scales, self.in_features, self.group_size)
        return packed if self.frozen else self.rule.read(packed, state)

    def weight(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Decode the weights: (N, K), bfloat16 or the same values in float32."""
        return decode_weight(self.packed, dtype)

    @property
    def state(self) -> "State":
        """The buffers that a step reads and writes, by name."""
        return {
            name: getattr(self, name)
            for name, kind in self.kinds.items()
            if kind not in ("counters", "wire", "average")
        }

    @property
    def version(self) -> tuple[int, ...]:
        """Version counters of trits and scales: of updates, and of in-place changes by torch."""
        return self.updates, *(
            part._version for part in (self.trits, *self.scales) if part is not None
        )

    def matrix(self, index: int) -> "State":
        """Return the state of one of the stacked matrices, as views."""
        if self.matrices == 1:
            return self.state
        rows = self.rows_of(range(index, index + 1))
        return {
            name: part.chunk(self.matrices)[index] if name == "column_statistic" else part[rows]
            for name, part in self.state.items()
        }

    @property
    def matrix_rows(self) -> int:
        """Rows of each stacked matrix; the last one may have fewer."""
        return -(-self.out_features // self.matrices)

    def rows_of(self, matrices: range) -> slice:
        """Return the rows of a range of the stacked matrices."""
        start, stop = matrices.start * self.matrix_rows, matrices.stop * self.matrix_rows
        return slice(start, min(stop, self.out_features))

    def gather(self, rows: Tensor) -> "State":
        """Copy the state of rows, (R,) int64; rows out of range are zero."""
        from arbcli.kernels.rows.table_rows import gather_rows  # only tables have such rows

        return {
            name: part if name == "column_statistic" else gather_rows(part, rows)
            for name, part in self.state.items()
        }

    def scatter_(self, rows: Tensor, state: "State") -> None:
        """Write the state of rows, (R,) int64, from `gather`; rows out of range are ignored."""
        from arbcli.kernels.rows.table_rows import scatter_rows_

        for name, part in state.items():
            if name != "column_statistic":
                scatter_rows_(self.state[name], rows, part)

    always_has_gradients = False
    """Whether each stacked matrix has a gradient in every micro-batch."""

    @property
    def steps_once(self) -> bool:
        """Whether it steps after the last gradient of a step, not after each."""
        return self.matrices == 1 or self.always_has_gradients

    def gradient_ranges(self) -> list[range]:
        """Return the ranges of stacked matrices whose gradients are computed together, in order."""
        return [range(self.matrices)]

    @property
    def gradient_moment(self) -> bool:
        """Whether the moment averages gradients, and its direction is taken afterwards."""
        reads_moment = self.direction is not None and self.direction.reads_moment
        return self.rule.moment_range > 0 and reads_moment

    @torch.no_grad()
    def fill(self, trit: int = 1) -> None:
        """Set all weights to `trit`, with scales of 1 and zero training state."""
        for buffer in self.buffers():
            buffer.zero_()
        row = torch.full((1, self.in_features), trit, dtype=torch.int8, device=self.trits.device)
        self.trits.copy_(pack_trits(row).expand_as(self.trits))

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Initialise the weights directly in packed form, in blocks of rows.

        z = clamp(round(spread P n)) for a normal n, the P of the rule, and the product of the
        spreads of tensor and rule: 16 counter-based random bits index a table of quantiles, which
        gives the same integers on all devices. Frozen weights are set to 1.

        Args:
            seed: seed of the run, 0..2**31-1.
            index: number of this tensor in the model.
        """
        if self.frozen:
            self.fill(1)
            return
        rule, state = self.rule, self.state
        radix, largest = rule.radix, rule.radix + rule.remainder_max
        device = self.trits.device
        integer: TensorOptions = {"dtype": torch.int32, "device": device}
        key = stream_key(seed, -1 - index, device)  # updates have ticks from 0
        from arbcli.model.rules.base import digit_tables

        tables = digit_tables(self.spread * rule.spread * radix, radix, largest)
        trits, remainders = (torch.tensor(table, device=device) for table in tables)
        columns = torch.arange(self.in_features, **integer)
        for buffer in self.buffers():
            buffer.zero_()
        for rows in row_chunks(self.trits, 1 << 18):
            indices = torch.arange(rows.start, rows.stop, **integer)
            drawn = (random_bits(key, indices, columns) >> 16).add_(2**15)
            shape, drawn = drawn.shape, drawn.flatten()
            self.trits[rows] = pack_trits(trits.index_select(0, drawn).view(shape))
            rule.start(state, rows, remainders.index_select(0, drawn).view(shape))
        self._start_scales([self.std / rule.unit_std])

    def _start_scales(self, scales: Iterable[float]) -> None:
        """Set scales, one for all rows or one for each, and start the direction.

        They are rounded to multiples of 1/128 octave, or of an octave without a fraction.
        """
        unit = 1 if self.rule.has_fraction else OCTAVE
        levels = [round(round(OCTAVE * math.log2(scale)) / unit) * unit for scale in scales]
        v = torch.tensor(levels, device=self.trits.device)[:, None]
        v = v.clamp(LOWEST_EXPONENT * OCTAVE, HIGHEST_EXPONENT * OCTAVE + OCTAVE - 1)
        self.exponent.copy_(v // OCTAVE)
        if self.rule.has_fraction:
            self.fraction.copy_(v % OCTAVE)
        if self.direction is not None:
            self.direction.start(self.state)

    def extra_repr(self) -> str:
        """Show the shape in `print(model)`."""
        return f"{self.out_features} x {self.in_features}{', frozen' if self.frozen else ''}"


GradientSink = Callable[..., None]
"""Consumer of gradients, such as an `Updater`; called once per tensor and backward."""


NO_SINK = "a packed weight has no `sink`, so its gradient is discarded: set an `Updater`"

_recomputing = False


def recompute_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of forward and recomputation, as `context_fn` of torch's `checkpoint`.

    A recomputed forward must not register uses, as no separate backward follows.
    """
    return nullcontext(), _recomputed()


def recomputing() -> bool:
    """Return whether a backward is recomputing a forward."""
    return _recomputing


@contextmanager
def _recomputed() -> Iterator[None]:
    global _recomputing
    _recomputing = True
    try:
        yield
    finally:
        _recomputing = False


class StreamedTensor(Findable, TernaryTensor):
    """A packed tensor whose gradient is passed to a sink in the backward of its last use.

    Each backward contributes a pair of input and output gradient. After the last one, the gradient
    is computed from all pairs, passed to `sink`, and freed. No tensor of the weight's shape is
    saved between forward and backward: the backward decodes the packed state again.
    """

    sink: GradientSink | None = None
    """Consumer of the gradient; None discards it, with a warning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forget()

    @property
    def key_tensor(self) -> Tensor:
        """The trits, (N, row_bytes(K)) uint8."""
        return self.trits

    def forget(self) -> None:
        """Discard registered uses, as after a forward whose backward was not run."""
        self._awaited = 0
        self._pairs: list[tuple[Any, Tensor]] = []

    def note_use(self) -> None:
        """Register a use while gradients are recorded."""
        if torch.is_grad_enabled():
            self.await_backward()

    def await_backward(self) -> None:
        """Register a use whose backward will run, unless the forward is recomputed."""
        if not _recomputing:
            self._awaited += 1

    def collect(self, source: Any, grad_y: Tensor) -> None:
        """Add the input and the output gradient of one use; after the last, emit the gradient.

        Args:
            source: input of the use, such as (M, K) activations.
            grad_y: gradient of its output, such as (M, N).
        """
        self._pairs.append((source, grad_y))
        self._awaited -= 1
        if self._awaited > 0:
            return
        uses = self._pairs
        self.forget()
        if self.sink is not None:
            self.emit_gradient_of_uses(self.sink, uses)
        elif not self.frozen:
            warnings.warn(NO_SINK, RuntimeWarning, stacklevel=1)

    @property
    def is_awaited(self) -> bool:
        """Whether a use was registered whose backward has not run."""
        return self._awaited > 0

    @property
    def is_last_use(self) -> bool:
        """Whether only one use was registered, and its backward is next."""
        return self._awaited <= 1 and not self._pairs

    def emit_gradient_of_uses(self, sink: GradientSink, uses: list[tuple[Any, Tensor]]) -> None:
        """Compute the gradient from the pairs of all uses, and pass it to the sink.

        Args:
            sink: consumer of the gradient.
            uses: input and output gradient of each use: see `collect`.
        """
        sources, grads = zip(*uses, strict=True)
        self.emit_gradient(sink, sources, grads[0] if len(grads) == 1 else torch.cat(grads))

    def emit_gradient(self, sink: GradientSink, sources: tuple[Any, ...], grad_y: Tensor) -> None:
        """Compute the gradient, (N, K), and pass it to the sink.

        Args:
            sink: consumer of the gradient.
            sources: input of each use, such as (M, K) activations.
            grad_y: output gradients of all uses, concatenated, such as (M of all uses, N).
        """
        source = sources[0] if len(sources) == 1 else torch.cat(sources)
        sink(self, self.gradient(source, grad_y))

    def gradient(self, source: Tensor, grad_y: Tensor) -> Tensor:
        """Compute dL/dw, (N, K) float32 or bfloat16, from concatenated inputs and gradients."""
        raise NotImplementedError


def pass_gradients(tensors: Iterable[TernaryTensor], sink: GradientSink | None) -> None:
    """Set the consumer of the gradients of all tensors whose gradients are streamed."""
    for tensor in tensors:
        if isinstance(tensor, StreamedTensor):
            tensor.sink = sink
