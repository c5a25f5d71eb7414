"""The parameters of the updates of a step, on the device.

Seed, step and learning rate are integers on the device, so that a captured step can be replayed
with new values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from arbcli.kernels.update.random_bits import stream_keys
from arbcli.model.moment_boosts import MomentBoosts
from arbcli.model.optimizers.base import State
from arbcli.model.packed import TernaryTensor
from arbcli.model.rules.base import MOMENT, NUM_STREAMS, TRIT, StepControl
from arbcli.model.step_parameters import Pace, StepLayout, step_values


def pace_of(tensor: TernaryTensor) -> Pace:
    """Return the pace of a tensor, which its rule may change."""
    return Pace(tensor.lr_factor, tensor.rule.radix, tensor.rule.blend_units)


class StepControls:
    """Selects the parameters of each update, as views of those of its step.

    Args:
        tensors: the tensors that are stepped, always in the same order.
        seed: seed of the stochastic rounding, 0..2**31-1.
        weight_decay: weight decay, multiplied by the learning rate; see `DECAY_OF_LR`.
        horizon: time constant of the weights' averages in steps; 0 if there are none.
    """

    def __init__(
        self, tensors: Sequence[TernaryTensor], seed: int, weight_decay: float, horizon: int
    ) -> None:
        self.weight_decay, self.horizon = weight_decay, horizon
        matrices = [tensor for tensor in tensors for _ in range(tensor.matrices)]
        self.num_matrices, device = len(matrices), tensors[0].trits.device
        self._host_seed = torch.tensor(seed, dtype=torch.int32, device="cpu")
        self.seed = self._host_seed.to(device)
        self._paces = sorted({pace_of(tensor) for tensor in tensors})
        self._layout = StepLayout(self.num_matrices, len(self._paces))
        self._pace_indices = torch.tensor(
            [self._paces.index(pace_of(t)) for t in matrices], device=device
        )
        """Index of the pace of each matrix."""
        self.steady_keys = self._keys_of(range(1)).view(-1, NUM_STREAMS).to(device)
        """(matrices, NUM_STREAMS) int32, keys that are the same in all steps."""
        self._zero = torch.zeros_like(self.seed)
        # one counter for each matrix, so that merged launches do not conflict
        self.flips = torch.zeros(self.num_matrices, dtype=torch.int64, device=device)
        """Number of changed trits of each matrix."""
        self.boosts = MomentBoosts(tensors)
        self._blend_gains: Tensor | None = None
        """(matrices, 2) int32, boosted gains; None with a single micro-batch."""
        self._slope_sums: dict[int, Tensor] = {}
        """Weighted sums of the slopes of the step so far, by index of the matrix."""

    def parameters(
        self, steps: range, rates: list[float], accumulation: int, counts: Sequence[int] | None
    ) -> Tensor:
        """Return the parameters of consecutive steps: see `Updater.step_parameters`."""
        shares = [1] * accumulation if counts is None else counts
        values = step_values(self._paces, self.weight_decay, steps, rates, shares, self.horizon)
        ticks = range(steps.start * accumulation, steps.stop * accumulation)
        keys = self._keys_of(ticks).view(len(steps), accumulation, -1, NUM_STREAMS)
        return self._layout.pack({**values, "keys": keys}, len(steps), accumulation).flatten(1)

    def _keys_of(self, ticks: range) -> Tensor:
        """Return the keys of all matrices, (updates, matrices * NUM_STREAMS), on the host."""
        numbers = torch.arange(ticks.start, ticks.stop, device="cpu").to(torch.int32)
        return stream_keys(self._host_seed, numbers, self.num_matrices, NUM_STREAMS).flatten(1)

    def begin_step(self, parameters: Tensor, accumulation: int) -> None:
        """Begin a step: see `Updater.begin_step`."""
        self.accumulation = accumulation
        self._rows = parameters.view(accumulation, -1)

    def begin_micro(self, micro: int) -> None:
        """Select the parameters of micro-batch `micro`, from 0."""
        self.first, self.last = micro == 0, micro == self.accumulation - 1
        row = self._rows[micro]
        field = {name: self._layout.view(row, name) for name in self._layout.fields}
        self._squares, self.keys = field["squares"], field["keys"]
        if micro == 0:  # set by the first of all gradients that is not finite
            self.nonfinite = field["nonfinite"][0]
        self.step, self._weight = field["step"][0], field["weight"][0]
        self._turn, self._micro_turn = field["turn"][0], field["micro_turn"][0]
        self.average_rate, self.average_turn = field["average_rate"][0], field["average_turn"][0]
        self._sizes = dict(zip(self._paces, self._layout.sizes(row), strict=True))
        self._blend_gains = None
        if self.accumulation > 1:
            if micro == 0:
                self._slope_sums.clear()  # of a step that was aborted
                self.boosts.measure(field["largest_boost"][0])
            gains = field["blend_gain"][self._pace_indices]
            self._blend_gains = self.boosts.multiply(gains, self.accumulation)

    def select(
        self,
        tensor: TernaryTensor,
        state: State,
        index: int,
        each_micro: bool = False,
        share: Tensor | None = None,
    ) -> StepControl:
        """Return the parameters of an update of a matrix.

        Args:
            tensor: the tensor that contains it.
            state: its state.
            index: its index among all matrices.
            each_micro: whether it steps after each micro-batch, by its share of the step.
            share: share of the rows that have a gradient, a float32 scalar tensor; None for all.
        """
        each_micro = each_micro or (self.first and self.last)
        first, last = (True, True) if each_micro else (self.first, self.last)
        rule, sizes = tensor.rule, self._sizes[pace_of(tensor)]
        keys, turn, moment_turn = list(self.keys[index].unbind()), None, None
        if rule.turns_bits:  # offset for each step, or for each micro-batch
            turn, moment_turn = self._micro_turn if each_micro else self._turn, self._micro_turn
            for stream in (TRIT, MOMENT):
                keys[stream] = self.steady_keys[index, stream]
        scale_gain, slopes = sizes.micro_scale_gain, None
        if tensor.fixed_scales:
            scale_gain = self._zero, self._zero
        elif not each_micro and rule.has_fraction:
            scale_gain, slopes = sizes.step_scale_gain, self._slope_sums.pop(index, None)
            if slopes is None:
                slopes = torch.zeros_like(state["exponent"], dtype=torch.int16)
            if not last:
                self._slope_sums[index] = slopes
        blend_gain = sizes.micro_blend_gain if each_micro else sizes.blend_gain
        if self._blend_gains is not None and not each_micro:
            blend_gain = self._blend_gains[index, 0], self._blend_gains[index, 1]
        limit = sizes.micro_limit if each_micro else sizes.limit
        by_share = each_micro or not rule.moment_range
        weight_decay = None
        if self.weight_decay and tensor.decays:
            weight_decay = sizes.micro_weight_decay if by_share else sizes.weight_decay
        return StepControl(
            step=self.step,
            turn=turn,
            moment_turn=moment_turn,
            keys=tuple(keys),
            scale_gain=scale_gain,
            weight=self._weight,
            slopes=slopes,
            gain=sizes.micro_gain if by_share else sizes.step_gain,
            blend_gain=blend_gain,
            step_size=sizes.micro_step_size if by_share else sizes.step_size,
            limit=limit if share is None else sizes.row_limit,
            weight_decay=weight_decay,
            flips=self.flips[index],
            squares=self._squares[index],
            share=share,
            first=first,
            last=last,
        )
