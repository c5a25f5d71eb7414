"""Parameters of a step on the device: their layout, and their values for consecutive steps.

A row of int64 has the parameters of a micro-batch, so that a step is one copy to the device. Fields
are views of the row, on the host and on the device.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arbcli.kernels.update.direction import UNIT
from arbcli.kernels.update.step_trits import GOLDEN_TURN, MAX_DECAY
from arbcli.model.rules.base import (
    DECAY_OF_LR,
    NUM_STREAMS,
    SCALE_STEP,
    STEP_CLIP,
    STEP_OF_RADIX,
    blend_gains,
    fixed_point_gains,
)

ROW_CLIP = 2
"""Maximum step of a weight in a row of a table, relative to the RMS of the direction. The most
frequent rows dominate the direction, and oscillate with a larger limit."""

SAMPLES = 16
"""Samples of the weights within the time constant of their average."""


class Pace(NamedTuple):
    """Factors that determine the step sizes of a tensor."""

    lr_factor: float
    """Factor of the learning rate."""
    radix: int
    """P of the rule."""
    blend_units: float
    """`blend_units` of the rule."""


class StepSizes(NamedTuple):
    """Fixed-point learning rates of slopes, directions and moments: see `StepControl`.

    Those named `micro_` apply where weights step after each micro-batch, by its share of the step,
    and the moment decays before each; the others where they step once for all gradients.
    """

    micro_scale_gain: tuple[Tensor, Tensor]
    micro_gain: tuple[Tensor, Tensor]
    step_scale_gain: tuple[Tensor, Tensor]
    step_gain: tuple[Tensor, Tensor]
    blend_gain: tuple[Tensor, Tensor]
    micro_blend_gain: tuple[Tensor, Tensor]
    limit: Tensor
    micro_limit: Tensor
    """Limit where weights step after each gradient, by its share of the step."""
    row_limit: Tensor
    """The same for rows of tables."""
    weight_decay: Tensor
    micro_weight_decay: Tensor
    step_size: Tensor
    micro_step_size: Tensor


GAINS = StepSizes._fields[:6]
"""Fields of `StepSizes` that are a gain and a shift."""

BOOST_UNIT = 256
"""Fixed point of the factors of gradients in moments: see `MomentBoosts`."""


class StepLayout:
    """Layout of the parameters of a micro-batch in a row of `width` int64.

    | field | dtype | shape | content |
    |---|---|---|---|
    | `squares` | int64 | matrices | sums of squares of moments, which updates add up |
    | `nonfinite` | int64 | | whether a gradient was not finite, which updates set |
    | `step_size`, `micro_step_size` | int64 | paces | see `StepControl` |
    | `weight` | int32 | | weight of the micro-batch in its step, in units of 2**-16 |
    | `GAINS` | int32 | paces, 2 | gain and shift of each |
    | `limit`, `micro_limit`, `row_limit` | int32 | paces | `StepSizes` |
    | `weight_decay`, `micro_weight_decay` | int32 | paces | `StepSizes` |
    | `largest_boost` | int32 | | largest factor of gradients in moments, see `BOOST_UNIT` |
    | `step` | int32 | | number of the step |
    | `average_rate`, `average_turn` | int32 | | see `average_rates` and `average_weights` |
    | `turn`, `micro_turn` | int32 | | offsets of a step, and of a micro-batch |
    | `keys` | int32 | matrices, NUM_STREAMS | keys of random bits |

    Args:
        matrices: number of matrices of all tensors.
        paces: number of paces.
    """

    def __init__(self, matrices: int, paces: int) -> None:
        wide, narrow = torch.int64, torch.int32
        self.fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "squares": (wide, (matrices,)),
            "nonfinite": (wide, (1,)),
            "step_size": (wide, (paces,)),
            "micro_step_size": (wide, (paces,)),
            **dict.fromkeys(GAINS, (narrow, (paces, 2))),
            **dict.fromkeys(("limit", "micro_limit", "row_limit"), (narrow, (paces,))),
            **dict.fromkeys(("weight_decay", "micro_weight_decay"), (narrow, (paces,))),
            **dict.fromkeys(("weight", "largest_boost"), (narrow, (1,))),
            **dict.fromkeys(("step", "turn", "micro_turn"), (narrow, (1,))),
            **dict.fromkeys(("average_rate", "average_turn"), (narrow, (1,))),
            "keys": (narrow, (matrices, NUM_STREAMS)),
        }
        self._slices: dict[str, slice] = {}
        begin = 0
        for name, (dtype, shape) in self.fields.items():
            end = begin + math.prod(shape) * dtype.itemsize // narrow.itemsize
            self._slices[name] = slice(begin, end)
            begin = end
        self.width = -(-begin // 2)

    def view(self, rows: Tensor, name: str) -> Tensor:
        """View a field of rows, (..., width) int64, as (..., *shape of the field)."""
        dtype, shape = self.fields[name]
        return rows.view(torch.int32)[..., self._slices[name]].view(dtype).unflatten(-1, shape)

    def sizes(self, row: Tensor) -> list[StepSizes]:
        """View the step sizes of each pace in a row, (width,) int64."""
        fields: dict[str, Any] = {name: self.view(row, name).unbind() for name in StepSizes._fields}
        fields |= {name: [tuple(pair.unbind()) for pair in fields[name]] for name in GAINS}
        return [StepSizes(*values) for values in zip(*fields.values(), strict=True)]

    def pack(self, values: dict[str, np.ndarray | Tensor], steps: int, micros: int) -> Tensor:
        """Write values of fields to rows, (steps, micros, width) int64 on the host.

        Args:
            values: by name, (steps, micros, *shape of the field), or broadcastable to it; fields
                without values are 0.
            steps: number of steps.
            micros: number of micro-batches of each.
        """
        rows = torch.zeros(steps, micros, self.width, dtype=torch.int64, device="cpu")
        for name, value in values.items():
            self.view(rows, name).copy_(torch.as_tensor(value))
        return rows


def step_limits(step_sizes: np.ndarray) -> np.ndarray:
    """Return the maximum steps of z in units of 2**-16, for steps with an RMS of `step_sizes`."""
    return np.minimum(np.rint(STEP_CLIP * step_sizes * UNIT), 2**30)


def sampling_interval(horizon: int) -> int:
    """Return the number of steps from one sample of averages of weights to the next."""
    return max(1, horizon // SAMPLES)


def average_rates(steps: range, horizon: int) -> np.ndarray:
    """Return the rates of averages of weights after steps, in units of 2**-16: (steps,) int64.

    The weights of every `horizon / SAMPLES` steps are averaged, so that rounding to int8 adds
    little noise. All have equal shares until there are `SAMPLES`, then the rate is constant.

    Args:
        steps: numbers of the steps.
        horizon: time constant of the average in steps; 0 averages nothing.
    """
    numbers = np.array(steps, np.int64) + 1
    if not horizon:
        return np.zeros_like(numbers)
    interval = sampling_interval(horizon)
    rates = np.maximum(UNIT * interval // horizon, UNIT // np.maximum(numbers // interval, 1))
    return np.where((numbers % interval == 0) | (numbers < interval), rates, 0)


def step_values(
    paces: Sequence[Pace],
    weight_decay: float,
    steps: range,
    rates: Sequence[float],
    counts: Sequence[int],
    horizon: int = 0,
) -> dict[str, np.ndarray]:
    """Compute the values of all fields of `StepLayout` but `keys`, for consecutive steps.

    Args:
        paces: paces of the tensors.
        weight_decay: weight decay, multiplied by the learning rate.
        steps: numbers of the steps.
        rates: their learning rates.
        counts: number of learnt symbols of each micro-batch, the same in all steps.
        horizon: see `average_rates`.
    """
    lr_factors, radices, units = np.array(paces).T
    weights = np.array(counts, np.int64)
    total = max(1, weights.sum())
    with np.errstate(divide="ignore"):  # a micro-batch without a loss has no share
        divisors = (total / weights)[:, None]
    lrs = (np.array(rates)[:, None] * lr_factors)[:, None]  # (steps, 1, paces)
    sizes = lrs * radices * STEP_OF_RADIX
    shape = len(steps), len(weights), len(paces)
    wholes = [lrs * SCALE_STEP, sizes]
    parts = [whole / divisors for whole in wholes] + wholes
    factors = np.stack([np.broadcast_to(part, shape) for part in parts])
    blends = units / np.stack([divisors, np.ones_like(divisors)])[:, None]
    blends = np.broadcast_to(blends, (2, *shape))
    gains = np.concatenate([fixed_point_gains(factors), blend_gains(blends)], axis=1)
    limits = step_limits(sizes)
    micro_limits = np.rint(limits / divisors)
    decays = np.minimum(np.rint(lrs * weight_decay * DECAY_OF_LR * 2**24), MAX_DECAY)
    moments = np.rint(sizes * 2**32).astype(np.int64)
    # whole and remainder apart, as the product with a count may overflow
    quotients, remainders = np.divmod(moments, total)
    numbers = np.array(steps)[:, None, None]
    updates = numbers * len(weights) + np.arange(len(weights))[:, None]
    return {
        "step_size": moments,
        "micro_step_size": quotients * weights[:, None] + remainders * weights[:, None] // total,
        "weight": np.rint(UNIT * weights / total)[:, None],
        **dict(zip(GAINS, np.moveaxis(gains, 0, -1), strict=True)),
        "limit": limits,
        "micro_limit": micro_limits,
        "row_limit": micro_limits * ROW_CLIP // STEP_CLIP,
        "weight_decay": decays,
        "micro_weight_decay": np.rint(decays / divisors),
        # by the root of the number of micro-batches, or of as many as unequal ones are worth
        "largest_boost": np.rint(BOOST_UNIT * total / np.sqrt(max(1, np.square(weights).sum()))),
        "step": numbers,
        "average_rate": average_rates(steps, horizon)[:, None, None],
        "average_turn": (numbers + 1) // sampling_interval(horizon) * GOLDEN_TURN % UNIT,
        "turn": numbers * GOLDEN_TURN % UNIT,
        "micro_turn": updates * GOLDEN_TURN % UNIT,
    }


def loaded(numbers: Tensor, buffer: Tensor) -> Tensor:
    """Copy the parameters of a step to the device, in place for captured steps.

    Args:
        numbers: parameters on the host, of any shape.
        buffer: parameters of the previous step on the device; overwritten if the shape is equal.

    Returns:
        The parameters on the device.
    """
    if buffer.shape != numbers.shape:
        return numbers.to(buffer.device)
    if buffer.device.type == "cuda":
        return buffer.copy_(numbers.pin_memory(), non_blocking=True)
    return buffer.copy_(numbers)
