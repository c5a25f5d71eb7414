"""The packed tensor: trits, scales and the digits its update rule keeps, all uint8 and int8."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from arbcli.config.site import Site
from arbcli.directions import find_direction
from arbcli.directions.base import State
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
from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.runtime.inputs import TensorOptions
from arbcli.kernels.update.quantise_gradient import NONE
from arbcli.kernels.update.random_bits import random_bits, stream_keys
from arbcli.rules import DIRECTION, find_rule
from arbcli.rules.start import quantiles


class StateModule(nn.Module):
    """A module with buffers that survive a step: integers, each declared where it is made.

    Counting, prediction and the audit read what is declared here.

    Args:
        area: the part of the model that the buffers belong to, as reports name it.
    """

    def __init__(self, area: str) -> None:
        super().__init__()
        self.area = area
        self.kinds: dict[str, str] = {}
        """Purpose of each buffer, by its name."""

    def declare(self, name: str, tensor: Tensor, kind: str) -> None:
        """Register an integer tensor as a buffer of some kind, such as `trits` or `counters`."""
        self.register_buffer(name, tensor)
        self.kinds[name] = kind


class TernaryTensor(StateModule):
    """A matrix of N outputs by K inputs that is never stored as anything but integers.

    Buffers, besides those that its rule and its direction declare:
        trits: (N, row_bytes(K)) uint8, five weights a byte.
        exponent, fraction: (N, ceil(K / G)) int8, the digits E and F of each scale.

    Args:
        out_features: N.
        in_features: K.
        site: says how it is stored.
        area: the part of the model that it belongs to.
        std: standard deviation of the weights at the start.
        spread: standard deviation of z at the start, as a share of the rule's; 0 is all zero.
        direction: of its steps; None is that of `site`.
        lr_factor: what the learning rate is multiplied by.
        frozen: whether it is never stepped; its weights are ones, and it has trits and scales only.
        matrices: how many matrices lie one above the other; each is stepped as one.
    """

    trits: Tensor
    exponent: Tensor
    fraction: Tensor
    """Missing where the rule has none."""
    remainder: Tensor
    """Missing where the rule has none, or keeps it under another name."""
    row_statistic: Tensor
    column_statistic: Tensor
    """There if its direction averages."""
    wire_exponent: Tensor
    """There after `declare_wire`."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        site: Site,
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
        self.lr_factor = lr_factor
        self.std, self.spread, self.frozen, self.matrices = std, spread, frozen, matrices
        self.updates = 0
        """How often kernels have been told to step it, as far as Python knows."""
        self.group_size = site.group_size
        self.rule = find_rule(site.rule, "trit" if frozen else site.digits, site.votes_fixes)
        self.reads_digits = self.rule.reads_all
        """Whether forwards read what is below the trit; where weights fade, the first ones do."""
        name = direction or site.direction
        self.direction = find_direction(name) if name and DIRECTION[site.rule] else None
        groups = num_groups(in_features, site.group_size)
        trits = torch.empty(out_features, row_bytes(in_features), dtype=torch.uint8)
        self.declare("trits", trits, "trits")
        self.of_training: tuple[str, ...] = ()
        """Names of the buffers that a step needs and a forward does not."""
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
        self.of_training = tuple(name for name in buffers if name not in read)

    def drop_training_state(self) -> None:
        """Forget what only a step needs, for good: the weights can be read and no more."""
        for name in self.of_training:
            delattr(self, name)
            del self.kinds[name]
        self.of_training = ()

    def declare_wire(self) -> None:
        """Declare what the gradients of each row are divided by where they travel as integers.

        `wire_exponent`, (N, 1) int8, is a power of two, or `NONE` before the first gradient. It
        belongs to a run that is shared out, and to its checkpoints.
        """
        if not self.frozen:
            exponents = torch.full((self.out_features, 1), NONE, dtype=torch.int8)
            self.declare("wire_exponent", exponents.to(self.trits.device), "wire")
            self.of_training += ("wire_exponent",)

    def _declare_int8(self, name: str, shape: tuple[int, int], kind: str) -> None:
        self.declare(name, torch.empty(shape, dtype=torch.int8), kind)

    @property
    def num_weights(self) -> int:
        """Logical weights: one a trit, padding not counted."""
        return self.out_features * self.in_features

    @property
    def scales(self) -> tuple[Tensor, Tensor | None]:
        """The exponent and the fraction of the scales; None where the rule has no fraction."""
        return self.exponent, getattr(self, "fraction", None)

    @property
    def packed(self) -> Packed:
        """Views of trits and scales, from which kernels read weights."""
        return self.packed_of(self.state)

    def packed_of(self, state: State) -> Packed:
        """Do as `packed` does, for the state of one of the matrices, or of some rows."""
        scales = state["exponent"], state.get("fraction")
        packed = Packed(state["trits"], *scales, self.in_features, self.group_size)
        return packed if self.frozen else self.rule.read(packed, state)

    def weight(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Decode the weights: (N, K), bfloat16 or the same values in float32."""
        return decode_weight(self.packed, dtype)

    @property
    def state(self) -> State:
        """The buffers that rule and direction step, by name."""
        return {
            name: getattr(self, name)
            for name, kind in self.kinds.items()
            if kind not in ("counters", "wire")
        }

    @property
    def version(self) -> tuple[int, ...]:
        """Count the changes of trits and scales: by updates, and in place by torch."""
        return self.updates, *(
            part._version for part in (self.trits, *self.scales) if part is not None
        )

    def matrix(self, index: int) -> State:
        """View the state of one of the matrices."""
        if self.matrices == 1:
            return self.state
        rows = self.rows_of(range(index, index + 1))
        return {
            name: part.chunk(self.matrices)[index] if name == "column_statistic" else part[rows]
            for name, part in self.state.items()
        }

    @property
    def matrix_rows(self) -> int:
        """Rows of each of the matrices; the last one has what is left."""
        return -(-self.out_features // self.matrices)

    def rows_of(self, matrices: range) -> slice:
        """Find the rows of some of the matrices."""
        start, stop = matrices.start * self.matrix_rows, matrices.stop * self.matrix_rows
        return slice(start, min(stop, self.out_features))

    always_has_gradients = False
    """Whether each of several matrices has a gradient in every micro-batch."""

    def gradient_ranges(self) -> list[range]:
        """List which of the matrices have their gradients formed together, in their order."""
        return [range(self.matrices)]

    @property
    def averages_gradients(self) -> bool:
        """Whether the direction of a step is that of the moment, which is of gradients."""
        takes_average = self.direction is not None and self.direction.takes_average
        return self.rule.averages_gradients and takes_average

    def gather(self, rows: Tensor) -> State:
        """Copy the state of some rows, (R,) int64; a row that does not exist is zeros."""
        return {
            name: part if name == "column_statistic" else gather_rows(part, rows)
            for name, part in self.state.items()
        }

    def scatter(self, rows: Tensor, state: State) -> None:
        """Write back what `gather` copied; that of a row that does not exist is dropped."""
        for name, part in state.items():
            if name != "column_statistic":
                scatter_rows_(getattr(self, name), rows, part)

    @torch.no_grad()
    def fill(self, trit: int = 1) -> None:
        """Set every weight to `trit` times a scale of 1."""
        for buffer in self.buffers():
            buffer.zero_()
        row = torch.full((1, self.in_features), trit, dtype=torch.int8, device=self.trits.device)
        self.trits.copy_(pack_trits(row).expand_as(self.trits))

    @torch.no_grad()
    def initialise(self, seed: int, index: int) -> None:
        """Draw the weights straight into packed form, a block of rows at a time.

        z = clamp(round(spread P n)), n normal, looked up by 16 counter-based random bits in a table
        of its quantiles: the same integers on every device, whatever the block size. Frozen weights
        are ones.

        Args:
            seed: of the run, 0..2**31-1.
            index: which tensor of the model this is.
        """
        if self.frozen:
            self.fill(1)
            return
        rule, state = self.rule, self.state
        radix, largest = rule.radix, rule.radix + rule.remainder_max
        device = self.trits.device
        integer: TensorOptions = {"dtype": torch.int32, "device": device}
        ticks = torch.tensor(-1 - index, **integer)  # those of updates are not negative
        key = stream_keys(torch.tensor(seed, **integer), ticks, 1, 1)[0, 0]
        drawn = quantiles(self.spread * rule.spread * radix, largest)
        table = torch.tensor(np.frombuffer(drawn, np.int16), device=device)
        columns = torch.arange(self.in_features, **integer)
        for buffer in self.buffers():
            buffer.zero_()
        for rows in row_chunks(self.trits, 1 << 18):
            places = torch.arange(rows.start, rows.stop, **integer)
            z = table[(random_bits(key, places, columns) >> 16) + 2**15]
            trits = (z > radix // 2).to(torch.int8) - (z < -(radix // 2)).to(torch.int8)
            self.trits[rows] = pack_trits(trits)
            rule.start(state, rows, (z - trits.to(torch.int16) * radix).to(torch.int8))
        v = round(OCTAVE * math.log2(self.std / rule.unit_std))
        if not rule.has_fraction:
            v = round(v / OCTAVE) * OCTAVE
        v = min(max(v, LOWEST_EXPONENT * OCTAVE), HIGHEST_EXPONENT * OCTAVE + OCTAVE - 1)
        self.exponent.fill_(v // OCTAVE)
        if rule.has_fraction:
            self.fraction.fill_(v % OCTAVE)
        if self.direction is not None:
            self.direction.start(state)

    def extra_repr(self) -> str:
        """Show the shape in `print(model)`."""
        return f"{self.out_features} x {self.in_features}{', frozen' if self.frozen else ''}"


GradientSink = Callable[..., None]
"""Consumer of gradients, called once per tensor and backward: an `Updater`."""
