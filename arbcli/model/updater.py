"""The updater: steps each matrix in place as soon as its gradient is available, and frees it.

Large matrices step immediately. Gradients of small ones are held, up to `HELD_BYTES`, and step
together in merged launches, with the same results as one by one. So do small matrices of a stack,
which share a gradient.

From the direction on, which kernels compute in int32 fixed point, all arithmetic is on integers, so
that all backends agree bitwise. The gradient is read in several passes. The only other tensor of a
matrix's shape is the orthogonalised gradient.

A dense model uses `set_step`, `begin_micro`, `__call__`, `_update_matrix`, `_step_along` and
`finish`. The other methods are for several micro-batches, stacked matrices, rows of tables, scales
that only some losses step, and averages.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from arbcli.base.errors import ArbError, quoted
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.backend import LARGE_ELEMENTS, uses_triton
from arbcli.kernels.update.gradient_gains import GradientGains, gradient_gains
from arbcli.kernels.update.gradient_statistics import (
    GradientStatistics,
    SignGradient,
    gradient_statistics,
)
from arbcli.kernels.update.moment_squares import moment_squares
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.model.optimizers.base import Direction, FactoredUpdate
from arbcli.model.packed import TernaryTensor
from arbcli.model.rules.base import COLUMN, NUM_STREAMS, ROW, TRIT, Gradient, State, StepControl
from arbcli.model.step_parameters import BOOST_UNIT, Pace, StepLayout, loaded, step_values

if TYPE_CHECKING:
    from arbcli.kernels.rows.table_rows import TouchedRows

LARGEST_RATIO = 1 << 16
"""Ratio of squares that is large enough for all numbers of micro-batches."""
HELD_BYTES = 2**25
"""Maximum size of held gradients."""
AVERAGE_SEED = 0x2545F491
"""XORed with keys, so that averages are rounded with other random bits than updates."""


class _Target(NamedTuple):
    """A matrix to update by a gradient."""

    tensor: TernaryTensor
    """The tensor that contains the matrix."""
    state: State
    number: int
    """Index of the matrix for keys and counters."""
    refused: Tensor
    """Counter of rejected gradients."""
    first: bool
    """Whether this is the first gradient of the step, before which the moment decays."""
    last: bool
    """Whether this is the last gradient of the step, after which the weights step."""
    share: Tensor | None = None
    """Share of rows with a gradient; None for all."""


class _Unstepped(NamedTuple):
    """A matrix whose moment is updated, and whose weights have yet to step along it."""

    tensor: TernaryTensor
    direction: Direction
    state: State
    gains: GradientGains
    control: StepControl


def _pace(tensor: TernaryTensor) -> Pace:
    """Return the pace of a tensor, which its rule may change."""
    return Pace(tensor.lr_factor, tensor.rule.radix, tensor.rule.blend_units)


def _step_one(unstepped: _Unstepped, values: Tensor) -> None:
    """Step a matrix along the direction computed from its moment, (N, K)."""
    tensor, direction, state, gains, control = unstepped
    factors = direction.factors(values, gains, control.share)
    tensor.rule.step_along_direction(state, factors, gains.ok, control)


def _gathered(tensor: TernaryTensor, rows: Tensor) -> State:
    """Copy the state of rows, (R,) int64; rows out of range are zero."""
    from arbcli.kernels.rows.table_rows import gather_rows  # only tables have such rows

    return {
        name: part if name == "column_statistic" else gather_rows(part, rows)
        for name, part in tensor.state.items()
    }


class Updater:
    """Steps the packed weights of a model in the backward, as the `sink` of its tensors.

    `begin` sets the parameters of the next backward's updates. Seed, step and learning rate are
    integers on the device, so that a captured step can be replayed with new values.

    Args:
        tensors: the packed tensors of the model, always in the same order.
        seed: seed of the stochastic rounding, 0..2**31-1.
        dtype: dtype of the Newton-Schulz products.
        held_bytes: maximum size of held gradients; 0 steps each matrix immediately.
        weight_decay: weight decay, multiplied by the learning rate; see `DECAY_OF_LR`.
        horizon: time constant of the weights' averages in steps; 0 if there are none.
    """

    def __init__(
        self,
        tensors: Iterable[TernaryTensor],
        seed: int,
        dtype: torch.dtype,
        held_bytes: int = 0,
        weight_decay: float = 0.0,
        horizon: int = 0,
    ) -> None:
        self.tensors = [tensor for tensor in tensors if not tensor.frozen]
        first = [0, *itertools.accumulate(tensor.matrices for tensor in self.tensors)]
        self._num_matrices = first[-1]
        self.dtype, self.weight_decay, self.horizon = dtype, weight_decay, horizon
        self.device = self.tensors[0].trits.device
        self._host_seed = torch.tensor(seed, dtype=torch.int32, device="cpu")
        self.seed = self._host_seed.to(self.device)
        self._index = {
            id(tensor): index for tensor, index in zip(self.tensors, first[:-1], strict=True)
        }
        self.num_weights = sum(tensor.num_weights for tensor in self.tensors)
        self._paces = sorted({_pace(tensor) for tensor in self.tensors})
        self._layout = StepLayout(self._num_matrices, len(self._paces))
        self._parameters = torch.empty(0, dtype=torch.int64, device=self.device)
        """Parameters of the step on the device, if `set_step` wrote them."""
        first_keys = self._keys_of(range(1)).view(-1, NUM_STREAMS)
        self._steady_keys = first_keys[:, TRIT].to(self.seed, copy=True)
        self._no_turn = torch.zeros_like(self.seed)
        # one counter for each matrix, so that merged launches do not conflict
        counter: TensorOptions = {"dtype": torch.int64, "device": self.device}
        self._flips, self._refused = (torch.zeros(self._num_matrices, **counter) for _ in range(2))
        self._held_bytes = held_bytes
        self._held: list[tuple[TernaryTensor, Tensor]] = []
        self._unused = torch.zeros(self._num_matrices, **counter)
        self._nonfinite_steps = torch.zeros((), **counter)
        self._finding: frozenset[str] | None = None
        """Areas whose slopes are being computed; None in normal updates."""
        self._routed: frozenset[str] = frozenset()
        """Areas whose scales are stepped by the computed slopes."""
        self._slopes: dict[int, tuple[Tensor, Tensor]] = {}
        """Computed slopes and their squares, by index of the matrix."""
        self._slope_sums: dict[int, Tensor] = {}
        """Weighted sums of the slopes of the step so far, by index of the matrix."""
        self._gradient_moments = [
            (index, tensor)
            for tensor, index in zip(self.tensors, first[:-1], strict=True)
            if tensor.rule.moment_range and self._steps_once(tensor)
        ]
        """Tensors whose moments average the gradients of a step, with indices of their matrices."""
        places = [self._paces.index(_pace(t)) for t in self.tensors for _ in range(t.matrices)]
        self._places = torch.tensor(places, device=self.device)
        """Index of the pace of each matrix."""
        squares = [
            round(t.rule.expected_square * t.matrix_rows * t.in_features * BOOST_UNIT)
            for t in self.tensors
            for _ in range(t.matrices)
        ]
        self._expected = torch.tensor(squares, **counter)
        """Expected sum of the squares of each moment, in units of 1 / BOOST_UNIT."""
        self._boosts = self._expected
        self._blend_gains: Tensor | None = None

    takes_signs = True
    """Whether gradients may be passed as signs, for rules that read no more."""
    weighs_micro_batches = True
    """Each gradient is weighted by its share of the step: see `set_step`."""
    normalises = True
    """Each gradient is normalised, so that factors of a loss have no effect."""

    def begin(self, step: int, lr: float, micro: int = 0, accumulation: int = 1) -> None:
        """Prepare for the backward of one micro-batch: `set_step`, then `begin_micro`."""
        self.set_step(step, lr, accumulation)
        self.begin_micro(micro)

    def set_step(
        self, step: int, lr: float, accumulation: int = 1, counts: Sequence[int] | None = None
    ) -> None:
        """Write the parameters of a step to the device.

        Args:
            step: number of the step, from 0.
            lr: learning rate.
            accumulation: number of micro-batches. The moment decays before the first gradient and
                averages all; scales and weights step after the last. Weights without a moment step
                by a share after each gradient.
            counts: number of learnt symbols of each micro-batch, which are their weights in
                averages; None if all are equal.
        """
        parameters = self.step_parameters(range(step, step + 1), [lr], accumulation, counts)[0]
        self._parameters = loaded(parameters, self._parameters)
        self.begin_step(self._parameters, accumulation)

    def begin_step(self, parameters: Tensor, accumulation: int) -> None:
        """Begin a step: see `set_step`.

        Args:
            parameters: a row of `step_parameters` on the device, into which updates also write.
            accumulation: number of micro-batches.
        """
        self._held.clear()  # gradients of a step that was aborted
        self.accumulation = accumulation
        self._control = parameters.view(accumulation, -1)

    def step_parameters(
        self,
        steps: range,
        rates: list[float],
        accumulation: int,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the parameters of consecutive steps, in about the time of a single step.

        Args:
            steps: numbers of the steps.
            rates: their learning rates.
            accumulation: number of micro-batches in each.
            counts: number of learnt symbols of each micro-batch, the same in all steps; None if
                all are equal.

        Returns:
            (steps, numbers) int64 on the host.
        """
        shares = [1] * accumulation if counts is None else counts
        values = step_values(self._paces, self.weight_decay, steps, rates, shares, self.horizon)
        ticks = range(steps.start * accumulation, steps.stop * accumulation)
        keys = self._keys_of(ticks).view(len(steps), accumulation, -1, NUM_STREAMS)
        return self._layout.pack({**values, "keys": keys}, len(steps), accumulation).flatten(1)

    def _keys_of(self, ticks: range) -> Tensor:
        """Return the keys of all matrices, (updates, matrices * NUM_STREAMS), on the host."""
        numbers = torch.arange(ticks.start, ticks.stop, device="cpu").to(torch.int32)
        return stream_keys(self._host_seed, numbers, self._num_matrices, NUM_STREAMS).flatten(1)

    def begin_micro(self, micro: int) -> None:
        """Prepare for the backward of micro-batch `micro`, from 0, on the device."""
        self.step_held()
        self.first, self.last = micro == 0, micro == self.accumulation - 1
        row = self._control[micro]
        field = {name: self._layout.view(row, name) for name in self._layout.fields}
        self._squares, self.keys = field["squares"], field["keys"]
        if micro == 0:  # set by the first of all gradients that is not finite
            self._nonfinite = field["nonfinite"][0]
        self._step, self._turn, self._micro_turn, self._average_rate, self._average_turn = (
            field[name][0]
            for name in ("step", "turn", "micro_turn", "average_rate", "average_turn")
        )
        self._weight = field["weight"][0]
        self._sizes = dict(zip(self._paces, self._layout.sizes(row), strict=True))
        self._blend_gains = None
        if self.accumulation > 1:
            if micro == 0:
                self._slope_sums.clear()  # of a step that was aborted
                self._boosts = self._compute_boosts(field["largest_boost"][0])
            self._blend_gains = self._boosted(field["blend_gain"])

    @torch.no_grad()
    def _compute_boosts(self, largest: Tensor) -> Tensor:
        """Compute a factor of gradients in the moment of each matrix, (matrices,) int64.

        The average of n gradients of unit RMS has an RMS from 1, if they are equal, to 1 / sqrt(n),
        if they are independent, and rounding to the moment must be small beside it. The factor is
        r**2, within 1..sqrt(n), for the ratio r of the expected mean square of the moment to its
        mean square before the step. With a decay of 0.9, the moment settles fastest with this
        exponent.

        Returns:
            Factors in units of 1 / BOOST_UNIT.
        """
        squares = torch.zeros_like(self._expected)
        for index, tensor in self._gradient_moments:
            for number in range(tensor.matrices):
                moment = tensor.rule.moment_bytes(tensor.matrix(number))
                moment_squares(moment, squares[index + number], tensor.rule.share_a_byte)
        ratios = torch.div(self._expected, squares.clamp_(min=1), rounding_mode="floor")
        ratios.clamp_(max=LARGEST_RATIO)
        boosts = ratios.square_().floor_divide_(BOOST_UNIT).clamp_(min=BOOST_UNIT)
        return boosts.minimum(largest)

    def _boosted(self, gains: Tensor) -> Tensor:
        """Multiply gains and shifts of paces, (paces, 2), by boosts: (matrices, 2) int32."""
        gains, shifts = gains[self._places].unbind(1)
        bits = (self.accumulation - 1).bit_length() + 1 >> 1  # so that gains stay below 1024
        boosted = torch.div(self._boosts * gains, BOOST_UNIT << bits, rounding_mode="floor")
        return torch.stack((boosted.to(torch.int32), shifts - bits), dim=1)

    @staticmethod
    def _steps_once(tensor: TernaryTensor) -> bool:
        """Return whether a tensor steps after the last gradient of a step, not after each."""
        return tensor.matrices == 1 or tensor.always_has_gradients

    def finish(self, maximum: Callable[[Tensor], Tensor] = lambda flag: flag) -> None:
        """Finish a step: average the weights, and count it if a gradient was not finite.

        Args:
            maximum: maximum of an integer tensor over all processes.
        """
        self.step_held()
        if self.horizon:
            self._average_weights()
        self._slopes.clear()
        self._routed = frozenset()
        self._nonfinite_steps += maximum(self._nonfinite)

    @torch.no_grad()
    def _average_weights(self) -> None:
        from arbcli.model.averages import move_averages  # most runs have none

        keys = self._steady_keys ^ AVERAGE_SEED
        for merge in (True, False):
            tensors = [tensor for tensor in self.tensors if self._merges(tensor) == merge]
            parts = move_averages(
                tensors, lambda tensor: keys[self.index_of(tensor)], self._average_turn,
                self._average_rate,
            )  # fmt: skip
            self._run(parts, merge=merge)

    @torch.no_grad()
    def __call__(
        self,
        tensor: TernaryTensor,
        grad: Tensor | SignGradient,
        where: "range | TouchedRows | None" = None,
    ) -> None:
        """Update a tensor from its gradient, immediately or with others; bad ones are ignored.

        Experts and rows of tables may have no gradient in a micro-batch. They step after each
        gradient, by its share of the step, rather than after the last micro-batch.

        Args:
            tensor: one of the updater's tensors.
            grad: (N, K) float32 or bfloat16, or signs for a rule that `reads_signs`. It is bad if
                the sum of its squares is not in 2**-120 .. 2**120, as if it is not finite or zero.
            where: range of stacked matrices that the gradient belongs to, with grad (n, N, K); or
                the touched rows, so that only these decay and step, and RMS values are over them.
                None is the complete tensor.
        """
        index = self._index[id(tensor)]
        if self._finding is not None:
            if tensor.area in self._finding:
                self._keep_slopes(tensor, grad, index, where)
        elif where is None and not isinstance(grad, SignGradient) and self._merges(tensor):
            self._held.append((tensor, grad))
            if sum(held.nbytes for _, held in self._held) >= self._held_bytes:
                self.step_held()
        elif where is None:
            self._update_whole(tensor, grad)
        elif isinstance(grad, SignGradient):
            raise ValueError("signs are only supported for tensors with one matrix")
        elif isinstance(where, range):
            self._update_stack(tensor, grad, where)
        else:
            from arbcli.kernels.rows.table_rows import scatter_rows_

            rows = _gathered(tensor, where.rows)
            share = where.count.clamp(min=1) / len(where.rows)
            target = _Target(tensor, rows, index, self._unused[index], True, True, share)
            self._step_along(self._update_matrix(target, grad))
            for name, part in rows.items():
                if name != "column_statistic":
                    scatter_rows_(tensor.state[name], where.rows, part)

    @property
    def counts_rows(self) -> bool:
        """Whether tables should not count uses, as while slopes are computed."""
        return self._finding is not None

    @contextmanager
    def finding_slopes(self, areas: frozenset[str]) -> Iterator[None]:
        """Only compute slopes of areas' scales from the gradients in the block.

        The next gradients of these areas step scales by the computed slopes; scales without one do
        not step.
        """
        self._finding, self._routed = areas, self._routed | areas
        try:
            yield
        finally:
            self._finding = None

    def _keep_slopes(
        self,
        tensor: TernaryTensor,
        grad: Tensor | SignGradient,
        index: int,
        where: "range | TouchedRows | None",
    ) -> None:
        if isinstance(grad, SignGradient):
            self._slopes[index] = grad.statistics.slope, grad.statistics.slope_squares
            return
        if isinstance(where, range):
            parts = [(index + n, tensor.matrix(n), grad[i]) for i, n in enumerate(where)]
        else:
            state = tensor.matrix(0) if where is None else _gathered(tensor, where.rows)
            parts = [(index, state, grad)]
        for number, state, values in parts:
            packed, signs = tensor.packed_of(state), tensor.rule.steps_by_signs
            statistics = gradient_statistics(values, packed, factored=False, signs=signs)
            self._slopes[number] = statistics.slope, statistics.slope_squares

    def _replace_slope(
        self, tensor: TernaryTensor, statistics: GradientStatistics, index: int
    ) -> GradientStatistics:
        """Replace the slopes of a routed matrix by the computed ones, or by zero."""
        if tensor.area not in self._routed:
            return statistics
        if index in self._slopes:
            slope, squares = self._slopes[index]
        else:
            slope, squares = map(torch.zeros_like, statistics[:2])
        return statistics._replace(slope=slope, slope_squares=squares)

    def _merges(self, tensor: TernaryTensor) -> bool:
        """Return whether matrices of a tensor step in merged launches: small ones on a GPU."""
        small = tensor.matrix_rows * tensor.in_features < LARGE_ELEMENTS
        return small and tensor.rule.merges and self._held_bytes > 0 and uses_triton(tensor.trits)

    @torch.no_grad()
    def step_held(self) -> None:
        """Update the tensors of all held gradients in merged launches."""
        held, self._held = self._held, []
        values = self._values_of(
            [(None if tensor.gradient_moment else tensor.direction, grad) for tensor, grad in held]
        )
        unstepped: list[_Unstepped] = []

        def begin(tensor: TernaryTensor, grad: Tensor, part: Tensor) -> None:
            unstepped.extend(self._update_only_matrix(tensor, grad, part))

        self._run(
            (
                partial(begin, tensor, grad, part)
                for (tensor, grad), part in zip(held, values, strict=True)
            ),
            merge=True,
        )
        held.clear()
        self._step_along(unstepped)

    def _run(self, parts: Iterable[Callable[[], None]], *, merge: bool) -> None:
        """Run functions that only launch kernels, one by one or with merged launches."""
        parts = list(parts)
        if merge and len(parts) > 1:
            from arbcli.kernels.runtime.merged import merge_launches  # on a GPU

            merge_launches(parts, self.device)
        else:
            for part in parts:
                part()

    def _step_along(self, unstepped: list[_Unstepped]) -> None:
        """Step weights along the directions of their updated moments."""
        moments = [matrix.tensor.rule.digits(matrix.state)["moment"][0] for matrix in unstepped]
        directions = [matrix.direction for matrix in unstepped]
        squares = [matrix.control.squares for matrix in unstepped]
        transformed = self._values_of(list(zip(directions, moments, strict=True)), squares)
        pairs = zip(unstepped, transformed, strict=True)
        merge = all(self._merges(matrix.tensor) for matrix in unstepped)
        self._run((partial(_step_one, matrix, values) for matrix, values in pairs), merge=merge)

    def _values_of(
        self, pairs: list[tuple[Direction | None, Tensor]], squares: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Transform matrices by their directions; matrices without one are unchanged.

        Args:
            pairs: directions and matrices.
            squares: sum of squares of each matrix, if they are moments.
        """
        values = [matrix for _, matrix in pairs]
        for direction in dict.fromkeys(direction for direction, _ in pairs):
            if direction is None:
                continue
            places = [i for i, (other, _) in enumerate(pairs) if other is direction]
            sums = None if squares is None else [squares[i] for i in places]
            transformed = direction.values_of([pairs[i][1] for i in places], self.dtype, sums)
            for i, part in zip(places, transformed, strict=True):
                values[i] = part
        return values

    def _update_whole(self, tensor: TernaryTensor, grad: Tensor | SignGradient) -> None:
        """Update a tensor with one matrix."""
        self._step_along(self._update_only_matrix(tensor, grad))

    def _update_stack(self, tensor: TernaryTensor, grad: Tensor, where: range) -> None:
        """Update a range of the matrices of a stack."""
        index, direction, values = self._index[id(tensor)], tensor.direction, grad
        if direction is not None and not tensor.gradient_moment:
            values = direction.values(grad, self.dtype)
        always = tensor.always_has_gradients
        first, last = (self.first, self.last) if always else (True, True)
        refused = self._refused if always else self._unused
        unstepped: list[_Unstepped] = []

        def begin(part: int, number: int) -> None:
            state, at = tensor.matrix(number), index + number
            target = _Target(tensor, state, at, refused[at], first, last)
            unstepped.extend(self._update_matrix(target, grad[part], values[part]))

        self._run(
            (partial(begin, *place) for place in enumerate(where)), merge=self._merges(tensor)
        )
        self._step_along(unstepped)

    def _update_only_matrix(
        self, tensor: TernaryTensor, grad: Tensor | SignGradient, values: Tensor | None = None
    ) -> list[_Unstepped]:
        index = self._index[id(tensor)]
        refused = self._refused[index]
        target = _Target(tensor, tensor.matrix(0), index, refused, self.first, self.last)
        return self._update_matrix(target, grad, values)

    def _update_matrix(
        self, target: _Target, grad: Tensor | SignGradient, values: Tensor | None = None
    ) -> list[_Unstepped]:
        """Update a matrix, or only its moment if the direction is that of the moment.

        Args:
            target: the matrix.
            grad: its gradient.
            values: the gradient transformed by the direction, if it is known.

        Returns:
            The matrix, if its weights have yet to step: see `_step_along`.
        """
        tensor, state, index, refused, _, last, share = target
        tensor.updates += 1
        keys, rule, direction = self.keys[index].unbind(), tensor.rule, tensor.direction
        packed = tensor.packed_of(state)
        factored = direction is not None and direction.keeps_statistics
        if isinstance(grad, SignGradient):
            grad, statistics = grad
        else:
            statistics = gradient_statistics(
                grad, packed, factored=factored, signs=rule.steps_by_signs
            )
        statistics = self._replace_slope(tensor, statistics, index)
        if share is not None:
            statistics = statistics._replace(
                slope_squares=statistics.slope_squares / share, columns=statistics.columns / share
            )
        running = state.get("row_statistic"), state.get("column_statistic")
        counters = refused, self._nonfinite
        gains = gradient_gains(statistics, *running, keys[ROW], keys[COLUMN], *counters)
        factors = None
        if direction is not None and tensor.gradient_moment:
            unit = gains.unit if share is None else gains.unit * share.sqrt()
            factors = FactoredUpdate(grad, unit.expand(len(grad)), None)
        elif direction is not None:
            values = direction.values(grad, self.dtype) if values is None else values
            factors = direction.factors(values, gains, share)
        control = self._control_of(target)
        gradient = Gradient(grad, packed, statistics, gains, factors)
        if direction is None or not tensor.gradient_moment:
            rule.step(state, gradient, control)
            return []
        rule.update_moment(state, gradient, control)
        return [_Unstepped(tensor, direction, state, gains, control)] if last else []

    def _control_of(self, target: _Target) -> StepControl:
        """Return the parameters of an update of a matrix."""
        tensor, state, index, _, first, last, share = target
        each_micro, rule, sizes = first and last, tensor.rule, self._sizes[_pace(tensor)]
        keys, turn = self.keys[index].unbind(), self._no_turn
        if rule.turns_bits:  # offset for each step, or for each micro-batch
            turn = self._micro_turn if each_micro else self._turn
            keys = (*keys[:TRIT], self._steady_keys[index], *keys[TRIT + 1 :])
        scale_gain, slopes = sizes.micro_scale_gain, None
        if tensor.fixed_scales:
            scale_gain = self._no_turn, self._no_turn
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
            step=self._step,
            turn=turn,
            keys=keys,
            scale_gain=scale_gain,
            weight=self._weight,
            slopes=slopes,
            gain=sizes.micro_gain if by_share else sizes.step_gain,
            blend_gain=blend_gain,
            step_size=sizes.micro_step_size if by_share else sizes.step_size,
            limit=limit if share is None else sizes.row_limit,
            weight_decay=weight_decay,
            flips=self._flips[index],
            squares=self._squares[index],
            share=share,
            first=first,
            last=last,
        )

    @contextmanager
    def late(self) -> Iterator[None]:
        """Take the gradients in the block as the first of their tensors in a later micro-batch.

        Their moments decay before them; their weights step in `end_early`, or after a later
        gradient of the step.
        """
        self.step_held()
        flags = self.first, self.last
        self.first, self.last = True, False
        try:
            yield
            self.step_held()
        finally:
            self.first, self.last = flags

    def end_early(self, tensors: Iterable[TernaryTensor]) -> None:
        """Step weights whose step ends before its last micro-batch, along their moments.

        Args:
            tensors: those that had a gradient in the step.
        """
        self.step_held()
        for tensor in tensors:
            if not self._steps_once(tensor):
                continue  # its matrices have stepped with each gradient
            for number in range(tensor.matrices):
                state, index = tensor.matrix(number), self._index[id(tensor)] + number
                target = _Target(tensor, state, index, self._unused[index], False, True)
                ok, control = torch.ones_like(self._step), self._control_of(target)
                tensor.updates += 1
                tensor.rule.end_scales(state, control)
                if not tensor.rule.moment_range:
                    continue  # its weights have stepped with each gradient
                squares = control.squares.zero_()  # of its last gradient, maybe an earlier one
                moment_squares(tensor.rule.moment_bytes(state), squares, tensor.rule.share_a_byte)
                if tensor.direction is None or not tensor.gradient_moment:
                    tensor.rule.step_along_moment(state, ok, control)
                    continue
                gains = GradientGains(ok, *[torch.empty(0, device=self.device)] * 4)
                self._step_along([_Unstepped(tensor, tensor.direction, state, gains, control)])

    def index_of(self, tensor: TernaryTensor) -> int:
        """Return the index of a tensor's first matrix among all matrices."""
        return self._index[id(tensor)]

    @property
    def flips(self) -> Tensor:
        """Number of trits changed since the updater was built, an int64 scalar on the device."""
        return self._flips.sum()

    @property
    def nonfinite_steps(self) -> int:
        """Number of steps with a gradient that was not finite; synchronises with the device."""
        return int(self._nonfinite_steps)

    def counters(self) -> dict[str, int]:
        """Return counters of rejected gradients since the start; synchronises with the device.

        Returns:
            nonfinite_steps: see the property.
            refused: number of gradients that were not finite or zero, and were ignored.
        """
        return {"nonfinite_steps": self.nonfinite_steps, "refused": int(self._refused.sum())}

    def restore(self, counters: dict[str, int]) -> None:
        """Restore the counters of a checkpoint.

        Raises:
            ArbError: the names of the counters differ.
        """
        if counters.keys() != self.counters().keys():
            names = quoted(counters)
            raise ArbError(
                f"the checkpoint has different counters: {names or 'none'}",
                "it is of another version of arb, or was modified: use another one",
            )
        self._nonfinite_steps.fill_(counters["nonfinite_steps"])
        self._refused.zero_()
        self._refused[0] = counters["refused"]
