"""Interface of update rules: buffers, their initial values, and the step."""

import copy
import math
from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
from torch import Tensor

from arbcli.kernels.codec.packed import Packed, unit_of
from arbcli.kernels.update.add_slopes import add_slopes, sum_squares
from arbcli.kernels.update.gradient_gains import GradientGains, slope_gain
from arbcli.kernels.update.gradient_statistics import GradientStatistics
from arbcli.kernels.update.step_scales import step_scales
from arbcli.model.optimizers.base import Buffer, FactoredUpdate, State


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


@cache
def quantiles(spread: float, largest: int) -> array:
    """Return clamp(round(spread * n)) at 65536 evenly spaced quantiles of a normal n, as int16."""
    if spread == 0:
        return array("h", bytes(2 * 2**16))
    table = array("h")
    for z in range(-largest, largest + 1):
        share = 1.0 if z == largest else _normal_cdf((z + 0.5) / spread)
        table.extend([z] * (round(share * 2**16) - len(table)))
    return table


@cache
def digit_tables(spread: float, radix: int, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `quantiles` as trits and remainders, int8 each: z = radix * trit + remainder."""
    z = np.frombuffer(quantiles(spread, largest), np.int16)
    trits = (z > radix // 2).astype(np.int16) - (z < -(radix // 2))
    return trits.astype(np.int8), (z - trits * radix).astype(np.int8)


def share_of_nonzero(radix: int, spread: float) -> float:
    """Return the share of nonzero trits for a normal z of standard deviation `spread * radix`."""
    return 2 * _normal_cdf(-(radix // 2 + 0.5) / (spread * radix))


@cache
def root_mean_square(spread: float, largest: int) -> float:
    """Return the RMS of `quantiles`."""
    table = quantiles(spread, largest)
    return math.sqrt(sum(z * z for z in table) / len(table))


STEP_CLIP = 4
"""Maximum step of a weight, relative to the RMS of the direction."""
DECAY_OF_LR = 1 / 128
"""Decay of weights in a step at `lr` 1 and `weight_decay` 1. The default rates of digits and of
Muon, 0.5 and 3e-3, move weights alike, so the same `weight_decay` shrinks them alike."""
STEP_OF_RADIX = 1 / 16
"""Step of z for a direction of unit RMS at `lr` 1, in units of P."""
SCALE_STEP = 4
"""Step of a scale's level for a slope of unit RMS at `lr` 1."""

MOMENT, TRIT, SCALE, ROW, COLUMN = range(5)
"""Indices of the random streams of a matrix: one for each kind of stochastic rounding."""
NUM_STREAMS = 5


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a matrix with its statistics and direction, the input of a rule's step."""

    values: Tensor
    """(N, K) float32 or bfloat16; int8 signs for a rule that `reads_signs`."""
    packed: Packed
    """The weights, as views of the state."""
    statistics: GradientStatistics
    gains: GradientGains
    direction: FactoredUpdate | None
    """The direction, of unit RMS; None for a rule without one."""

    @property
    def required_direction(self) -> FactoredUpdate:
        """The direction, for a rule that needs one.

        Raises:
            ValueError: the direction was not computed.
        """
        if self.direction is None:
            raise ValueError("the rule needs a direction, and none was computed")
        return self.direction


@dataclass(frozen=True, slots=True)
class StepControl:
    """Parameters of a step of one matrix: scalar tensors on the device, and Python flags.

    Factors are those of the whole step, or of the gradient's share of it where scales, moments or
    weights step after each gradient.
    """

    step: Tensor
    """Number of the step, from 0, int32."""
    turn: Tensor | None
    """Offset of the random bits of trits, int32; None unless the rule `turns_bits`."""
    moment_turn: Tensor | None
    """The same for the moment, which may be updated several times in a step."""
    keys: tuple[Tensor, ...]
    """Keys of the random streams, NUM_STREAMS int32 scalars."""
    scale_gain: tuple[Tensor, Tensor]
    """Factor of a slope in fixed point, int32 gain and shift; 0 for fixed scales."""
    weight: Tensor
    """Weight of the gradient in its step, int32 in units of 2**-16."""
    slopes: Tensor | None
    """(N, groups) int16, weighted sum of the slopes of the step so far: see `add_slopes`. None if
    scales step after each gradient."""
    gain: tuple[Tensor, Tensor]
    """Factor of a direction, int32 gain and shift."""
    blend_gain: tuple[Tensor, Tensor]
    """Factor of a direction in the moment, int32 gain and shift."""
    step_size: Tensor
    """Factor of the moment, int64 in units of 2**-32 of z."""
    limit: Tensor
    """Maximum step of z by the gradient, int32 in units of 2**-16: a share of that of a step where
    weights step after each gradient."""
    weight_decay: Tensor | None
    """Decay of z, int32 in units of 2**-24; None without weight decay."""
    flips: Tensor
    """Counter of changed trits, int64; incremented by the step."""
    squares: Tensor
    """Sum of the squares of the moment, int64; accumulated by the step."""
    share: Tensor | None
    """Share of the rows that take part; None for all rows."""
    first: bool
    """Whether this is the first gradient of the step, before which the moment decays."""
    last: bool
    """Whether this is the last gradient of the step, after which the weights step."""


class Rule(ABC):
    """An update rule for integers z = T * P + A, with the trit T and remainder A as digits.

    For each gradient of a matrix the updater calls `step`, which also steps the weights where that
    is due. If the moment averages gradients, it calls `update_moment` instead, and after the last
    gradient of a step `step_along_direction` with the direction of the moment. A matrix without a
    gradient in the last micro-batch steps by `end_scales` and `step_along_moment`.
    """

    name: str
    """Name in `arbcli.model.rules.RULES`."""
    reads_all: bool = False
    """Whether weights are z rather than T."""
    kept: Fraction = Fraction(1)
    """Share of the remainder that contributes to a weight; below 1 while weights fade."""
    fade_growth: float = 1.0
    """Factor by which the learning rate grows until weights have faded to T."""
    radix: int
    """P, the value of a trit in units of the remainder."""
    remainder_max: int
    """Maximum of abs(A) where abs(T) is 1; z is clipped to +-(P + this)."""
    moment_range: float = 0.0
    """Maximum of the moment, relative to the RMS of the direction; 0 without a moment."""
    spread: float = 1.25
    """Initial standard deviation of z in units of P: about 32 % of the trits are zero."""
    share_a_byte: bool = False
    """Whether remainder and moment share a byte, four bits each."""
    has_fraction: bool = True
    """Whether scales have a fraction of an octave."""
    merges: bool = True
    """Whether launches of the step's kernels may be merged, as only kernels read their results."""
    turns_bits: bool = False
    """Whether random bits of trits and moment are offset each time instead of drawn anew."""
    steps_by_signs: bool = False
    """Whether slopes of scales are computed from the signs of the gradient."""

    @property
    def blend_units(self) -> float:
        """Factor of a direction of unit RMS in the moment, in its units; 0 without a moment."""
        return 0.0

    @property
    def expected_square(self) -> float:
        """Mean square of the moment of gradients that are independent; 0 without a moment."""
        return 0.0

    def moment_bytes(self, state: State) -> Tensor:
        """Return the bytes that contain the moment, (N, K) int8: see `share_a_byte`."""
        return state["remainder"] if self.share_a_byte else state["moment"]

    @property
    def reads_signs(self) -> bool:
        """Whether a step only reads the signs of the gradient, and slopes computed from them."""
        return False

    @abstractmethod
    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare the buffers stored next to trits and scales of a matrix, initially zero."""

    def start(self, state: State, rows: slice, remainder: Tensor) -> None:
        """Initialise the remainders of a slice of rows, (R, K) int8, if the rule keeps them."""
        if "remainder" in state:
            state["remainder"][rows] = remainder

    @abstractmethod
    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Return the digits below the trit, (N, K) int8 by name, each with its largest magnitude.

        The first one carries into the trit.
        """

    def read(self, packed: Packed, state: State) -> Packed:
        """Add the remainder to trits and scales, if it is part of the weights."""
        if not self.reads_all:
            return packed
        return packed._replace(
            remainder=state["remainder"],
            radix=self.read_radix,
            low=self.kept.numerator,
            nibble=self.share_a_byte,
        )

    @property
    def read_radix(self) -> int:
        """Value of a trit in a weight: P, unless weights fade.

        A fading weight interpolates between all digits and the trit, (1 - t) z / U + t T, with
        1 - t = n / d the share `kept`. This equals (T * read_radix + n A) / (d U).
        """
        kept, parts = self.kept.as_integer_ratio()
        return kept * self.radix + (parts - kept) * unit_of(self.radix)

    @property
    def fits_a_byte(self) -> bool:
        """Whether the integer value of a weight fits in int8."""
        return not self.reads_all or (self.kept == 1 and self.radix + self.remainder_max <= 127)

    def faded(self, kept: Fraction) -> "Rule":
        """Return a copy of the rule with the remainder's share set to `kept`."""
        rule = copy.copy(self)
        rule.kept = kept
        return rule

    def strip_digits(self) -> "Rule":
        """Return a copy of the rule for weights that are the trit."""
        rule = copy.copy(self)
        rule.reads_all = False
        return rule

    @property
    def unit_std(self) -> float:
        """Initial standard deviation of the weights, in units of their scale."""
        if not self.reads_all:
            return math.sqrt(share_of_nonzero(self.radix, self.spread))
        largest = self.radix + self.remainder_max
        return root_mean_square(self.spread * self.radix, largest) / unit_of(self.radix)

    def move_scales(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Step the scales along their negative slopes, or add these to the sum of the step."""
        slope, gain, ok = gradient.statistics.slope, gradient.gains.slope, gradient.gains.ok
        if control.slopes is not None:
            squares = add_slopes(control.slopes, slope, gain, control.weight, ok)
            if not control.last:
                return
            slope = control.slopes
            ok, gain = slope_gain(slope, squares)
        self._step_scales(state, slope, gain, ok, control)

    def end_scales(self, state: State, control: StepControl) -> None:
        """Step the scales along the slopes so far, if the step ends before its last gradient."""
        if control.slopes is not None:
            ok, gain = slope_gain(control.slopes, sum_squares(control.slopes))
            self._step_scales(state, control.slopes, gain, ok, control)

    def _step_scales(
        self, state: State, slope: Tensor, gain: Tensor, ok: Tensor, control: StepControl
    ) -> None:
        key, size = control.keys[SCALE], control.scale_gain
        step_scales(state["exponent"], state["fraction"], slope, gain, key, *size, ok)

    def step_along_moment(self, state: State, ok: Tensor, control: StepControl) -> None:
        """Step weights along their moment, for a rule with a moment that averages directions.

        Args:
            state: state of the matrix.
            ok: int32 scalar tensor; 0 skips the step.
            control: parameters of the step.

        Raises:
            ValueError: the rule has no such moment.
        """
        raise ValueError(f"weights of `{self.name}` have no moment to step along")

    @abstractmethod
    def step(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Update the state of one matrix by a gradient, in place."""

    def update_moment(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Step the scales, and blend the gradient or direction into the moment."""
        raise NotImplementedError

    def step_along_direction(
        self, state: State, direction: FactoredUpdate, ok: Tensor, control: StepControl
    ) -> None:
        """Step weights along the direction of the moment, after the last gradient of a step.

        Args:
            state: state of the matrix, updated by `update_moment`.
            direction: direction of unit RMS.
            ok: int32 scalar tensor; 0 skips the step.
            control: as in `update_moment`.
        """
        raise NotImplementedError


def fixed_point_gains(factors: np.ndarray, bits: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Return gains and shifts such that positive factors are gain / 2**shift, with `bits` bits.

    Raises:
        ValueError: a factor is too large.
    """
    mantissas, exponents = np.frexp(factors)
    gains, shifts = np.rint(mantissas * (1 << bits)), bits - exponents
    if shifts.min() < 0:
        raise ValueError(f"a step of {factors.max()} times the direction overflows")
    return np.where(shifts <= 31, gains, 0), np.minimum(shifts, 31)


def blend_gains(factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return gains below 1024 and shifts of factors of a direction in the moment.

    Raises:
        ValueError: a factor is too large.
    """
    gains, shifts = fixed_point_gains(factors, bits=10)
    full = gains == 1024  # a mantissa just below 1, rounded up
    return np.where(full, 512, gains), shifts - full
