"""The packed tensor: trits, scales and the digits its update rule keeps, all uint8 and int8."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbcli.config.model import RULES, ModelConfig
from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    OCTAVE,
    Packed,
    num_groups,
)
from arbcli.kernels.codec.packing import pack_trits, row_bytes
from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.kernels.runtime.backend import row_chunks
from arbcli.kernels.update.random_bits import random_bits, stream_keys

INIT_SPREAD = 1.25
"""Standard deviation of z at the start, in units of P: about 32 % of the trits are zero."""

UNSET = -128
"""The whole digit of a running statistic that has seen no gradient yet."""


class TernaryTensor(nn.Module):
    """A matrix of N outputs by K inputs that is never stored as anything but integers.

    Buffers, as far as the rule needs them:
        trits: (N, row_bytes(K)) uint8, five weights a byte.
        exponent, fraction: (N, ceil(K / G)) int8, the digits E and F of each scale.
        remainder: (N, K) int8, A, the digit below the trit. With `nibble` its byte also holds the
            moment, as 16 m + (A mod 16).
        moment: (N, K) int8, running mean of the update direction.
        votes, scale_votes: int8, for the rule of that name, whose scales have no fraction.
        row_statistic, column_statistic: (N, 2) and (K, 2) int8, whole and fraction of the log2 of
            the running mean squares of the gradient, for the factored direction.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        config: ModelConfig,
        *,
        frozen: bool = False,
        matrices: int = 1,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.matrices = matrices
        """How many matrices lie one above the other; each is stepped as one."""
        self.group_size = config.group_size
        self.rule = RULES[config.rule]
        self.frozen = frozen
        groups = (out_features, num_groups(in_features, config.group_size))
        weights = (out_features, in_features)
        trits = torch.empty(out_features, row_bytes(in_features), dtype=torch.uint8)
        self.register_buffer("trits", trits)
        self._add("exponent", groups)
        voting = config.rule == "votes" and not frozen
        if not voting:
            self._add("fraction", groups)
        if frozen:
            return
        self._add("votes" if voting else "remainder", weights)
        if voting:
            self._add("scale_votes", groups)
        if self.rule.moment_range and not self.rule.nibble:
            self._add("moment", weights)
        if config.direction == "factored":
            self._add("row_statistic", (out_features, 2))
            self._add("column_statistic", (matrices * in_features, 2))

    def _add(self, name: str, shape: tuple[int, int]) -> None:
        self.register_buffer(name, torch.empty(shape, dtype=torch.int8))

    spread = INIT_SPREAD
    """Standard deviation of z at the start, in units of P."""

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
        """What kernels read weights from: views of trits and scales."""
        return Packed(self.trits, *self.scales, self.in_features, self.group_size)

    def weight(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Decode the weights: (N, K), bfloat16 or the same values in float32."""
        return decode_weight(self.packed, dtype)

    def matrix(self, index: int) -> "Matrix":
        """View one of the matrices."""

        def part(buffer: Tensor | None) -> Tensor | None:
            whole = buffer is None or self.matrices == 1
            return buffer if whole else buffer.chunk(self.matrices)[index]

        return Matrix(*(part(getattr(self, name, None)) for name in Matrix._fields))

    def gather(self, rows: Tensor) -> "Matrix":
        """Copy the state of some rows, (R,) int64; a row that does not exist is zeros."""
        copies = {name: gather_rows(buffer, rows) for name, buffer in self._row_buffers()}
        fields = {name: copies.get(name) for name in Matrix._fields}
        fields["column_statistic"] = getattr(self, "column_statistic", None)
        return Matrix(**fields)

    def scatter(self, rows: Tensor, matrix: "Matrix") -> None:
        """Write back what `gather` copied; that of a row that does not exist is dropped."""
        for name, buffer in self._row_buffers():
            scatter_rows_(buffer, rows, getattr(matrix, name))

    def _row_buffers(self) -> list[tuple[str, Tensor]]:
        found = ((name, getattr(self, name, None)) for name in Matrix._fields)
        return [(k, b) for k, b in found if b is not None and k != "column_statistic"]

    @torch.no_grad()
    def fill(self, trit: int = 1) -> None:
        """Set every weight to `trit` times a scale of 1."""
        for buffer in self.buffers():
            buffer.zero_()
        row = torch.full((1, self.in_features), trit, dtype=torch.int8, device=self.trits.device)
        self.trits.copy_(pack_trits(row).expand_as(self.trits))

    @torch.no_grad()
    def initialise(self, std: float, seed: int, index: int) -> None:
        """Draw the weights straight into packed form, a block of rows at a time.

        z = clamp(round(1.25 P n)), n normal, looked up by 16 counter-based random bits in a table
        of its quantiles: the same integers on every device, whatever the block size.

        Args:
            std: standard deviation of the weights.
            seed: of the run, 0..2**31-1.
            index: which tensor of the model this is.
        """
        radix, largest = self.rule.radix, self.rule.radix + self.rule.remainder_max
        device = self.trits.device
        integer = {"dtype": torch.int32, "device": device}
        ticks = torch.tensor(-1 - index, **integer)  # those of updates are not negative
        key = stream_keys(torch.tensor(seed, **integer), ticks, 1, 1)[0, 0]
        quantiles = _quantiles(self.spread * radix, largest)
        table = torch.tensor(quantiles, dtype=torch.int16, device=device)
        columns = torch.arange(self.in_features, **integer)
        for buffer in self.buffers():
            buffer.zero_()
        for rows in row_chunks(self.trits, 1 << 18):
            index = torch.arange(rows.start, rows.stop, **integer)
            z = table[(random_bits(key, index, columns) >> 16) + 2**15]
            trits = (z > radix // 2).to(torch.int8) - (z < -(radix // 2)).to(torch.int8)
            self.trits[rows] = pack_trits(trits)
            if hasattr(self, "remainder"):
                remainder = (z - trits.to(torch.int16) * radix).to(torch.int8)
                self.remainder[rows] = remainder & 15 if self.rule.nibble else remainder
        v = round(OCTAVE * math.log2(std / math.sqrt(_share_of_nonzero(radix))))
        if not hasattr(self, "fraction"):
            v = round(v / OCTAVE) * OCTAVE
        v = min(max(v, LOWEST_EXPONENT * OCTAVE), HIGHEST_EXPONENT * OCTAVE + OCTAVE - 1)
        self.exponent.fill_(v // OCTAVE)
        if hasattr(self, "fraction"):
            self.fraction.fill_(v % OCTAVE)
        if hasattr(self, "row_statistic"):
            self.row_statistic[:, 0] = UNSET
            self.column_statistic[:, 0] = UNSET

    def extra_repr(self) -> str:
        """Show the shape in `print(model)`."""
        return f"{self.out_features} x {self.in_features}{', frozen' if self.frozen else ''}"


class Matrix(NamedTuple):
    """What an update steps: the buffers of a `TernaryTensor`, of one of its matrices, or of rows.

    Those that the rule does not need are None.
    """

    trits: Tensor
    exponent: Tensor
    fraction: Tensor | None
    remainder: Tensor | None
    moment: Tensor | None
    votes: Tensor | None
    scale_votes: Tensor | None
    row_statistic: Tensor | None
    column_statistic: Tensor | None

    @property
    def scales(self) -> tuple[Tensor, Tensor | None]:
        """The exponent and the fraction of the scales."""
        return self.exponent, self.fraction


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _quantiles(spread: float, largest: int) -> list[int]:
    """List z = clamp(round(spread * n)) at 65536 evenly spaced quantiles of n, normal."""
    table = []
    for z in range(-largest, largest + 1):
        share = 1.0 if z == largest else _normal_cdf((z + 0.5) / spread)
        table += [z] * (round(share * 2**16) - len(table))
    return table


def _share_of_nonzero(radix: int) -> float:
    return 2 * _normal_cdf(-(radix // 2 + 0.5) / (INIT_SPREAD * radix))


GradientSink = Callable[..., None]
"""What a backward hands each gradient to, once a tensor and backward: an `Updater`."""
