"""The updater: steps each matrix in place as soon as its gradient is available, and frees it.

The path of a gradient, in the order of a step:

1. `set_step` and `begin_micro` set seed, step number and learning rate, of which `StepControls`
   selects the parameters of each update.
2. `__call__` receives the gradient of a tensor from its layer in the backward. Large matrices step
   immediately. Gradients of small ones are held, up to `HELD_BYTES`, and step together in merged
   launches (`step_held`), with the same results as one by one.
3. `_update_matrix` computes statistics and direction of the gradient, and calls the rule, whose
   kernels step the integers. If the direction is that of the moment, the rule only updates this,
   and after the last gradient of a step `_step_along` steps the weights.
4. `finish` ends the step.

Other files have features that most runs do not use: `moment_boosts.py` several micro-batches,
`routed_slopes.py` scales that only some losses step, `averages.py` averages of weights. Two
subclasses prepare gradients in another way: `SharedUpdater` in several processes, `ModuleUpdater`
in modules of other libraries.

From the direction on, which kernels compute in int32 fixed point, all arithmetic is on integers, so
that all backends agree bitwise. The gradient is read in several passes. The only other tensor of a
matrix's shape is the orthogonalised gradient.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from arbcli.base.errors import ArbError, quoted
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.runtime.backend import LARGE_ELEMENTS, backend_of
from arbcli.kernels.update.gradient_gains import GradientGains, gradient_gains
from arbcli.kernels.update.gradient_statistics import SignGradient, gradient_statistics
from arbcli.model.optimizers.base import Direction, FactoredUpdate, transform
from arbcli.model.packed import TernaryTensor
from arbcli.model.rules.base import COLUMN, ROW, TRIT, Gradient, State, StepControl
from arbcli.model.step_controls import StepControls
from arbcli.model.step_parameters import loaded

if TYPE_CHECKING:
    from arbcli.kernels.rows.table_rows import TouchedRows
    from arbcli.model.routed_slopes import RoutedSlopes

HELD_BYTES = 2**25
"""Maximum size of held gradients."""
AVERAGE_SEED = 0x2545F491
"""XORed with keys, so that averages are rounded with other random bits than updates."""


class Matrix(NamedTuple):
    """A matrix to update."""

    tensor: TernaryTensor
    """The tensor that contains it."""
    state: State
    number: int
    """Index among all matrices, for keys and counters."""
    each_micro: bool = False
    """Whether it steps after each micro-batch, by its share of the step, rather than after the
    last: experts and rows of tables may have no gradient in a micro-batch."""
    share: Tensor | None = None
    """Share of rows with a gradient; None for all."""


class Unstepped(NamedTuple):
    """A matrix whose moment is updated, and whose weights have yet to step along it."""

    tensor: TernaryTensor
    direction: Direction
    state: State
    gains: GradientGains
    control: StepControl


class Updater:
    """Steps the packed weights of a model in the backward, as the `sink` of its tensors.

    Args:
        tensors: the packed tensors of the model, always in the same order.
        seed: seed of the stochastic rounding, 0..2**31-1.
        dtype: dtype of the Newton-Schulz products.
        held_bytes: maximum size of held gradients; 0 steps each matrix immediately.
        weight_decay: weight decay, multiplied by the learning rate; see `DECAY_OF_LR`.
        horizon: time constant of the weights' averages in steps; 0 if there are none.
    """

    takes_signs = True
    """Whether gradients may be passed as signs, for rules that read no more."""
    weighs_micro_batches = True
    """Each gradient is weighted by its share of the step: see `set_step`."""
    normalises = True
    """Each gradient is normalised, so that factors of a loss have no effect."""

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
        self.dtype, self.device = dtype, self.tensors[0].trits.device
        self.num_weights = sum(tensor.num_weights for tensor in self.tensors)
        first = itertools.accumulate((tensor.matrices for tensor in self.tensors), initial=0)
        self._index = dict(zip(map(id, self.tensors), first, strict=False))
        """Index of the first matrix by the `id` of a tensor."""
        self.controls = StepControls(self.tensors, seed, weight_decay, horizon)
        self._routed: RoutedSlopes | None = None
        """Slopes of scales that only some losses step; None if all losses step all scales."""
        self._parameters = torch.empty(0, dtype=torch.int64, device=self.device)
        """Parameters of the step on the device, if `set_step` wrote them."""
        self._held_bytes = held_bytes
        self._held: list[tuple[TernaryTensor, Tensor]] = []
        # one counter for each matrix, so that merged launches do not conflict
        counter: TensorOptions = {"dtype": torch.int64, "device": self.device}
        self._refused, self._uncounted = (
            torch.zeros(self.controls.num_matrices, **counter) for _ in range(2)
        )
        self._nonfinite_steps = torch.zeros((), **counter)

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
        return self.controls.parameters(steps, rates, accumulation, counts)

    def begin_step(self, parameters: Tensor, accumulation: int) -> None:
        """Begin a step: see `set_step`.

        Args:
            parameters: a row of `step_parameters` on the device, into which updates also write.
            accumulation: number of micro-batches.
        """
        self._held.clear()  # gradients of a step that was aborted
        self.controls.begin_step(parameters, accumulation)

    def begin_micro(self, micro: int) -> None:
        """Prepare for the backward of micro-batch `micro`, from 0, on the device."""
        self.step_held()
        self.controls.begin_micro(micro)

    @torch.no_grad()
    def __call__(
        self,
        tensor: TernaryTensor,
        grad: Tensor | SignGradient,
        where: "range | TouchedRows | None" = None,
    ) -> None:
        """Update a tensor from its gradient, immediately or with others; bad ones are ignored.

        Args:
            tensor: one of the updater's tensors.
            grad: (N, K) float32 or bfloat16, or signs for a rule that `reads_signs`. It is bad if
                the sum of its squares is not in 2**-120 .. 2**120, as if it is not finite or zero.
            where: range of stacked matrices that the gradient belongs to, with grad (n, N, K); or
                the touched rows, so that only these decay and step, and RMS values are over them.
                None is the complete tensor.
        """
        index = self._index[id(tensor)]
        if self._routed and self._routed.finding:
            self._routed.keep(tensor, grad, index, where)
        elif where is None and not isinstance(grad, SignGradient) and self._merges(tensor):
            self._held.append((tensor, grad))
            if sum(held.nbytes for _, held in self._held) >= self._held_bytes:
                self.step_held()
        elif where is None:
            self._step_along(self._update_matrix(Matrix(tensor, tensor.matrix(0), index), grad))
        elif isinstance(grad, SignGradient):
            raise ValueError("signs are only supported for tensors with one matrix")
        elif isinstance(where, range):
            self._update_stack(tensor, grad, where)
        else:
            state = tensor.gather(where.rows)
            share = where.count.clamp(min=1).float() / len(where.rows)
            rows = Matrix(tensor, state, index, each_micro=True, share=share)
            self._step_along(self._update_matrix(rows, grad))
            tensor.scatter_(where.rows, state)

    def _merges(self, tensor: TernaryTensor) -> bool:
        """Return whether matrices of a tensor step in merged launches: small ones on a GPU."""
        small = tensor.matrix_rows * tensor.in_features < LARGE_ELEMENTS
        return (
            small
            and tensor.rule.merges
            and self._held_bytes > 0
            and backend_of(tensor.trits) == "triton"
        )

    @torch.no_grad()
    def step_held(self) -> None:
        """Update the tensors of all held gradients in merged launches."""
        held, self._held = self._held, []
        values = transform(
            [(None if tensor.gradient_moment else tensor.direction, grad) for tensor, grad in held],
            self.dtype,
        )
        matrices = [Matrix(tensor, tensor.matrix(0), self._index[id(tensor)]) for tensor, _ in held]
        grads = (grad for _, grad in held)
        self._step_along(self._update(zip(matrices, grads, values, strict=True), merge=True))

    def _update_stack(self, tensor: TernaryTensor, grad: Tensor, where: range) -> None:
        """Update a range of the matrices of a stack."""
        index, direction, values = self._index[id(tensor)], tensor.direction, grad
        if direction is not None and not tensor.gradient_moment:
            values = direction.values(grad, self.dtype)
        each_micro = not tensor.always_has_gradients
        matrices = [Matrix(tensor, tensor.matrix(n), index + n, each_micro) for n in where]
        updates = zip(matrices, grad, values, strict=True)
        self._step_along(self._update(updates, merge=self._merges(tensor)))

    def _update(
        self, updates: Iterable[tuple[Matrix, Tensor, Tensor]], *, merge: bool
    ) -> list[Unstepped]:
        """Run `_update_matrix` for several matrices; return those that have yet to step."""
        unstepped: list[Unstepped] = []

        def update(*arguments: Any) -> None:
            unstepped.extend(self._update_matrix(*arguments))

        self._run([partial(update, *arguments) for arguments in updates], merge=merge)
        return unstepped

    def _update_matrix(
        self, matrix: Matrix, grad: Tensor | SignGradient, values: Tensor | None = None
    ) -> list[Unstepped]:
        """Update a matrix, or only its moment if the direction is that of the moment.

        Args:
            matrix: the matrix.
            grad: its gradient.
            values: the gradient transformed by the direction, if it is known.

        Returns:
            The matrix, if its weights have yet to step: see `_step_along`.
        """
        tensor, state, number, each_micro, share = matrix
        tensor.updates += 1
        keys, rule, direction = self.controls.keys[number].unbind(), tensor.rule, tensor.direction
        packed = tensor.packed_of(state)
        factored = direction is not None and direction.keeps_statistics
        if isinstance(grad, SignGradient):
            grad, statistics = grad
        else:
            statistics = gradient_statistics(
                grad, packed, factored=factored, signs=rule.steps_by_signs
            )
        if self._routed:
            statistics = self._routed.replace(tensor, statistics, number)
        if share is not None:
            statistics = statistics._replace(
                slope_squares=statistics.slope_squares / share, columns=statistics.columns / share
            )
        running = state.get("row_statistic"), state.get("column_statistic")
        refused = (self._uncounted if each_micro else self._refused)[number]
        counters = refused, self.controls.nonfinite
        gains = gradient_gains(statistics, *running, keys[ROW], keys[COLUMN], *counters)
        factors = None
        if direction is not None and tensor.gradient_moment:
            unit = gains.unit if share is None else gains.unit * share.sqrt()
            factors = FactoredUpdate(grad, unit.expand(len(grad)), None)
        elif direction is not None:
            values = direction.values(grad, self.dtype) if values is None else values
            factors = direction.factors(values, gains, share)
        control = self.controls.select(tensor, state, number, each_micro, share)
        gradient = Gradient(grad, packed, statistics, gains, factors)
        if direction is None or not tensor.gradient_moment:
            rule.step(state, gradient, control)
            return []
        rule.update_moment(state, gradient, control)
        return [Unstepped(tensor, direction, state, gains, control)] if control.last else []

    def _step_along(self, unstepped: list[Unstepped]) -> None:
        """Step weights along the directions of their updated moments."""
        pairs = [
            (matrix.direction, matrix.tensor.rule.digits(matrix.state)["moment"][0])
            for matrix in unstepped
        ]
        transformed = transform(pairs, self.dtype, [matrix.control.squares for matrix in unstepped])

        def step(matrix: Unstepped, values: Tensor) -> None:
            tensor, direction, state, gains, control = matrix
            factors = direction.factors(values, gains, control.share)
            tensor.rule.step_along_direction(state, factors, gains.ok, control)

        parts = zip(unstepped, transformed, strict=True)
        merge = all(self._merges(matrix.tensor) for matrix in unstepped)
        self._run([partial(step, *part) for part in parts], merge=merge)

    def _run(self, parts: list[Callable[[], None]], *, merge: bool) -> None:
        """Run functions that only launch kernels, one by one or with merged launches."""
        if merge and len(parts) > 1:
            from arbcli.kernels.runtime.merged import merge_launches  # on a GPU

            merge_launches(parts, self.device)
        else:
            for part in parts:
                part()

    def finish(self) -> None:
        """Finish a step: average the weights, and count it if a gradient was not finite."""
        self.step_held()
        if self.controls.horizon:
            self._average_weights()
        if self._routed:
            self._routed.clear()
        self._nonfinite_steps += self._largest(self.controls.nonfinite)

    def _largest(self, flag: Tensor) -> Tensor:
        """Return the maximum of an integer tensor over all processes."""
        return flag

    @torch.no_grad()
    def _average_weights(self) -> None:
        from arbcli.model.averages import move_averages  # most runs have none

        keys = self.controls.steady_keys[:, TRIT] ^ AVERAGE_SEED
        for merge in (True, False):
            tensors = [tensor for tensor in self.tensors if self._merges(tensor) == merge]
            parts = move_averages(
                tensors, lambda tensor: keys[self.index_of(tensor)], self.controls.average_turn,
                self.controls.average_rate,
            )  # fmt: skip
            self._run(parts, merge=merge)

    @property
    def counts_rows(self) -> bool:
        """Whether tables leave the counting of uses to this sink, which counts none for slopes."""
        return bool(self._routed and self._routed.finding)

    def finding_slopes(self, areas: frozenset[str]) -> AbstractContextManager[None]:
        """Only compute slopes of areas' scales in the block: see `RoutedSlopes.find`."""
        if self._routed is None:
            from arbcli.model.routed_slopes import RoutedSlopes  # most runs have none

            self._routed = RoutedSlopes()
        return self._routed.find(areas)

    def index_of(self, tensor: TernaryTensor) -> int:
        """Return the index of a tensor's first matrix among all matrices."""
        return self._index[id(tensor)]

    @property
    def flips(self) -> Tensor:
        """Number of trits changed since the updater was built, an int64 scalar on the device."""
        return self.controls.flips.sum()

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
                "it was written by another version of arb, or modified: use another checkpoint",
            )
        self._nonfinite_steps.fill_(counters["nonfinite_steps"])
        self._refused.zero_()
        self._refused[0] = counters["refused"]
