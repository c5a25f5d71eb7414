"""Interface of update rules: buffers, their bytes and first values, and the step."""

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from arbcli.directions.base import Buffer, Ingredients, State
from arbcli.kernels.codec.packed import Packed, unit_of
from arbcli.kernels.update.gradient_gains import GradientGains
from arbcli.kernels.update.gradient_statistics import GradientStatistics
from arbcli.kernels.update.step_scales import step_scales
from arbcli.rules.start import root_mean_square, share_of_nonzero

STEP_CLIP = 4
"""Largest step of a weight, in root-mean-squares of the direction."""
STEP_OF_RADIX = 1 / 16
"""Change of z by a step of unit root-mean-square at `lr` 1, in units of P."""
SCALE_STEP = 4
"""Change of v by a slope of unit root-mean-square at `lr` 1."""

MOMENT, TRIT, SCALE, ROW, COLUMN = range(5)
"""Streams of random bits of a matrix: each kind of rounding has its own."""
NUM_STREAMS = 5


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient, and what was found of it before a rule steps."""

    values: Tensor
    """(N, K) float32 or bfloat16; int8 signs where the rule `reads_signs`."""
    packed: Packed
    """The weights that it is of, views of the state."""
    statistics: GradientStatistics
    gains: GradientGains
    direction: Ingredients | None
    """The direction of unit root-mean-square; None if the rule takes none."""

    @property
    def ingredients(self) -> Ingredients:
        """The direction, for a rule that takes one.

        Raises:
            ValueError: it was not found.
        """
        if self.direction is None:
            raise ValueError("the rule needs a direction, and none was found")
        return self.direction


@dataclass(frozen=True, slots=True)
class StepControl:
    """Inputs of a step of one matrix besides its state: scalars on the device, except for flags."""

    step: Tensor
    """Number of the step, from 0, int32."""
    turn: Tensor
    """Offset of the random bits of trits, int32; 0 unless the rule `turns_bits`."""
    keys: tuple[Tensor, ...]
    """NUM_STREAMS int32 scalars, of the streams of random bits."""
    scale_gain: tuple[Tensor, Tensor]
    """Factor of a slope, int32 gain and shift."""
    direct_gain: tuple[Tensor, Tensor]
    """Factor of a direction where z steps by it directly, int32 gain and shift."""
    whole_gain: tuple[Tensor, Tensor]
    """The same where z steps once for all gradients of the step."""
    step_size: Tensor
    """Factor of the moment, int64 in units of 2**-32 of z."""
    limit: Tensor
    """The largest step of z, int32 in units of 2**-16."""
    flips: Tensor
    """int64; trits that change are added to it."""
    squares: Tensor
    """int64; sums the squares of the moment."""
    share: Tensor | None
    """Share of the rows that take part; None is all."""
    first: bool
    """Whether this is the first gradient of the step: the moment decays."""
    last: bool
    """Whether this is the last gradient of the step: the weights step."""
    accumulation: int
    """Gradients of a step."""

    @property
    def alone(self) -> bool:
        """Whether the weights step by this gradient alone, by its share of the step."""
        return self.first and self.last


class Rule(ABC):
    """How a step changes packed weights. z = T * P + A is what trit and remainder are digits of."""

    averages_gradients: bool = False
    """Whether the moment is of gradients, and not of directions, where a direction is better taken
    of their average: see `Direction.takes_average`."""
    reads_all: bool = False
    """Whether the weights are all digits of z, and not the trit alone."""
    kept: Fraction = Fraction(1)
    """The share of the remainder that a weight counts."""
    fade_growth: float = 1.0
    """Growth of the learning rate until the weights have faded to the trit."""
    radix: int
    """P: what a trit is worth in units of the remainder."""
    remainder_max: int
    """Largest magnitude of the remainder above a trit; z is clipped to +-(P + this)."""
    moment_range: float = 0.0
    """The largest moment, in root-mean-squares of the direction; 0 where there is no moment."""
    spread: float = 1.25
    """Standard deviation of z at the start, in units of P: about 32 % of the trits are zero."""
    share_a_byte: bool = False
    """Whether remainder and moment share a byte, four bits each."""
    has_fraction: bool = True
    """Whether scales have a fraction of an octave."""
    merges: bool = True
    """Whether what kernels of its step write is read by kernels alone: launches may be merged."""
    turns_bits: bool = False
    """Whether the random bits of trits are turned from step to step, and not drawn anew."""
    steps_by_signs: bool = False
    """Whether slopes of the scales are of the signs of the gradient."""

    @property
    def reads_signs(self) -> bool:
        """Whether a step reads no more of a gradient than its signs, and slopes by them."""
        return False

    @abstractmethod
    def buffers(self, rows: int, columns: int, groups: int) -> dict[str, Buffer]:
        """Declare what is stored next to trits and scales of a matrix, all zero at first."""

    def start(self, state: State, rows: slice, remainder: Tensor) -> None:
        """Write the first remainders of some rows, (R, K) int8, if the rule keeps them."""
        if "remainder" in state:
            state["remainder"][rows] = remainder

    @abstractmethod
    def digits(self, state: State) -> dict[str, tuple[Tensor, int]]:
        """Read the digits below the trit, (N, K) int8 by name, and the largest magnitude of each.

        The first is the one that carries into the trit.
        """

    def read(self, packed: Packed, state: State) -> Packed:
        """Add to trits and scales what else the weights are made of."""
        if not self.reads_all:
            return packed
        below = state["remainder"]
        return packed._replace(
            remainder=below,
            radix=self.read_radix,
            low=self.kept.numerator,
            nibble=self.share_a_byte,
        )

    @property
    def read_radix(self) -> int:
        """Return the value of a trit in a weight: P, unless weights fade.

        Then a weight is (1 - t) z / U + t T, with 1 - t = n / d the share that is kept: all digits,
        and the trit alone, each by its share. It is (T * this + n A) / (d U) too.
        """
        kept, parts = self.kept.as_integer_ratio()
        return kept * self.radix + (parts - kept) * unit_of(self.radix)

    @property
    def fits_a_byte(self) -> bool:
        """Whether what a weight is made of is within a byte, its sign counted."""
        return not self.reads_all or (self.kept == 1 and self.radix + self.remainder_max <= 127)

    def faded(self, kept: Fraction) -> "Rule":
        """Make the same rule, for weights in which the remainder counts that share."""
        rule = copy.copy(self)
        rule.kept = kept
        return rule

    def without_digits(self) -> "Rule":
        """Make the same rule, for weights that are the trit alone."""
        rule = copy.copy(self)
        rule.reads_all = False
        return rule

    @property
    def unit_std(self) -> float:
        """Standard deviation of the weights at the start, in units of their scale."""
        if not self.reads_all:
            return math.sqrt(share_of_nonzero(self.radix, self.spread))
        largest = self.radix + self.remainder_max
        return root_mean_square(self.spread * self.radix, largest) / unit_of(self.radix)

    def move_scales(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Step the scales against their slopes."""
        slope = (gradient.statistics.slope, gradient.gains.slope)
        key, ok = control.keys[SCALE], gradient.gains.ok
        step_scales(state["exponent"], state["fraction"], *slope, key, *control.scale_gain, ok)

    @abstractmethod
    def step(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Change the state of one matrix, in place."""

    def average(self, state: State, gradient: Gradient, control: StepControl) -> None:
        """Step scales, and blend what stands for the direction into the moment."""
        raise NotImplementedError

    def step_along(
        self, state: State, direction: Ingredients, ok: Tensor, control: StepControl
    ) -> None:
        """Step weights along the direction of the moment, after the last gradient of a step.

        Args:
            state: of the matrix, in which `average` has been.
            direction: of unit root-mean-square.
            ok: int32 scalar tensor; where 0 nothing changes.
            control: as of `average`.
        """
        raise NotImplementedError


def fixed_point_gain(factor: float, bits: int = 12) -> tuple[int, int]:
    """Write a positive factor as gain / 2**shift with a gain of `bits` bits.

    Raises:
        ValueError: the factor is too large for a step.
    """
    mantissa, exponent = math.frexp(factor)
    gain, shift = round(mantissa * (1 << bits)), bits - exponent
    if shift < 0:
        raise ValueError(f"a step of {factor} times the direction overflows")
    return (gain, shift) if shift <= 31 else (0, 31)
