"""Update rules: from the gradient of one matrix to new trits, scales and digits, in place.

The direction u = direction(g) has unit root-mean-square over the matrix: values in float, times
gains of rows and columns. From u in int32 fixed point on, which kernels form where they use it, all
is integer arithmetic: every backend agrees to the bit. The gradient is read in passes, and nothing
else of the shape of the matrix is made but the orthogonalised gradient.
"""

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from arbcli.config.model import RULES, ModelConfig
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.rows.weighted_rows import TouchedRows
from arbcli.kernels.update.blend_moment import blend_moment, moment_max
from arbcli.kernels.update.cast_votes import cast_scale_votes, cast_trit_votes
from arbcli.kernels.update.direction import UNIT
from arbcli.kernels.update.gradient_gains import GradientGains, gradient_gains
from arbcli.kernels.update.gradient_statistics import gradient_statistics
from arbcli.kernels.update.newton_schulz import gram, gram_polynomial
from arbcli.kernels.update.random_bits import stream_keys
from arbcli.kernels.update.step_scales import step_scales
from arbcli.kernels.update.step_trits import step_by_direction, step_by_moment
from arbcli.kernels.update.unit_gain import unit_gain
from arbcli.model.packed import Matrix, TernaryTensor

MOMENT_DECAY = 0.9
STEP_CLIP = 4
"""Largest step of a weight, in root-mean-squares of the direction."""
ROW_CLIP = 2
"""The same for a row of a table: the few that are read most have most of the direction, and were
seen to swing from one side to the other."""
STEP_OF_RADIX = 1 / 16
"""What a step of unit root-mean-square moves z at `lr` 1, in units of P."""
SCALE_STEP = 4
"""What a slope of unit root-mean-square moves v at `lr` 1."""
TINY = 1e-30
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_RUNS = (3, 2)
"""The same for wide matrices: steps that are composed before the matrix is multiplied by them."""
WIDE = 2
"""Smallest m / n of a wide matrix, (n, m). Composing saves three products x @ x.T and three p @ x,
for nine of (n, n) by (n, n); with symmetric products at half price that is even here."""
WIDE_PRODUCTS = 2**31
"""Smallest n * n * m, of all matrices of a stack; below, three more launches take what is saved."""

_MOMENT, _TRIT, _SCALE, _ROW, _COLUMN = range(5)
_NUM_STREAMS = 5


def orthogonalise(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Push the singular values of a matrix towards 1 with Newton-Schulz iterations.

    On the smaller side of the matrix, X being (n, m) with n <= m:

        X_k+1 = P(A_k) X_k,  A_k = X_k X_k.T,  P(A) = alpha I + beta A + gamma A A

    So X_k = Q_k X_0, and Q_k, (n, n), is found from A_0 alone. For wide matrices the steps of a run
    are composed to one Q, and X is multiplied twice a run instead of twice a step. A has the
    squares of the singular values, though: small ones are lost in its rounding, may come back below
    zero, and are then multiplied by 12 with every step. Two or three steps do not show it, five
    diverge. So there are two runs, and the second restarts from the X of the first.

    Sources: K. Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/, and for runs and
    restart Dao-AILab, "Gram Newton-Schulz", https://dao-lab.ai/blog/2026/gram-newton-schulz

    Args:
        grad: (N, K), or a stack (B, N, K); each matrix finite. One of zeros stays so.
        dtype: of the products; bfloat16 is enough.

    Returns:
        Like `grad`, of `dtype`.
    """
    tall = grad.shape[-2] > grad.shape[-1]
    x = grad.mT if tall else grad
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = torch.div(x, norm + TINY, out=torch.empty_like(x, dtype=dtype))
    n, m = x.shape[-2:]
    wide = m >= WIDE * n and x.numel() * n >= WIDE_PRODUCTS
    for steps in NEWTON_SCHULZ_RUNS if wide else [1] * NEWTON_SCHULZ_STEPS:
        x = _compose(gram(x), steps) @ x
    return x.mT if tall else x


def _compose(square: Tensor, steps: int) -> Tensor:
    """Find the Q of so many Newton-Schulz steps in a row: A_k = Q_k A_0 Q_k.T, Q_k+1 = P(A_k) Q_k.

    Polynomials of A commute, rounded ones do not. In this order that does not matter: every A is of
    the X that Q gives, whatever Q is.

    Args:
        square: (n, n) or (B, n, n), A_0.
        steps: 1 or more.

    Returns:
        Like `square`.
    """
    q = gram_polynomial(square, *NEWTON_SCHULZ)
    for _ in range(steps - 1):
        q = gram_polynomial(q @ (square @ q.mT), *NEWTON_SCHULZ) @ q
    return q


def fixed_point_gain(factor: float, bits: int = 12) -> tuple[int, int]:
    """Write a positive factor as gain / 2**shift with a gain of `bits` bits."""
    mantissa, exponent = math.frexp(factor)
    gain, shift = round(mantissa * (1 << bits)), bits - exponent
    if shift < 0:
        raise ValueError(f"a step of {factor} times the direction overflows")
    return (gain, shift) if shift <= 31 else (0, 31)


class Updater:
    """Steps the weights of a model, each as soon as its gradient is there.

    Connect it as the `sink` of the model's tensors; `begin` sets what the next backward's updates
    use. Seed, number of the update and learning rate reach the kernels as integers on the device,
    so a captured step can be replayed with new ones.

    Args:
        tensors: the packed tensors of the model, in an order that never changes.
        config: names the rule and the direction.
        seed: of the stochastic rounding, 0..2**31-1.
        dtype: of the Newton-Schulz products.
    """

    def __init__(
        self, tensors: Iterable[TernaryTensor], config: ModelConfig, seed: int, dtype: torch.dtype
    ) -> None:
        self.tensors = [tensor for tensor in tensors if not tensor.frozen]
        first = [0, *itertools.accumulate(tensor.matrices for tensor in self.tensors)]
        self._num_matrices = first[-1]
        self.rule, self.direction, self.dtype = RULES[config.rule], config.direction, dtype
        self.voting, self.group_size = config.rule == "votes", config.group_size
        self.device = self.tensors[0].trits.device
        self.seed = torch.tensor(seed, dtype=torch.int32, device=self.device)
        self._index = {
            id(tensor): index for tensor, index in zip(self.tensors, first[:-1], strict=True)
        }
        self.num_weights = sum(tensor.num_weights for tensor in self.tensors)
        self._control = torch.empty(0, dtype=torch.int64, device=self.device)
        # one of each for every matrix, so that updates of several may run side by side
        counter = {"dtype": torch.int64, "device": self.device}
        self._flips, self._refused, self._nonfinite, self._squares = (
            torch.zeros(self._num_matrices, **counter) for _ in range(4)
        )
        self._unused = torch.zeros((), **counter)
        self._nonfinite_steps = torch.zeros((), **counter)

    def begin(self, step: int, lr: float, micro: int = 0, accumulation: int = 1) -> None:
        """Prepare for the backward of one micro-batch: `set_step`, then `begin_micro`."""
        self.set_step(step, lr, accumulation)
        self.begin_micro(micro)

    def set_step(self, step: int, lr: float, accumulation: int = 1) -> None:
        """Write what the updates of a step need to the device.

        Args:
            step: number of the step, from 0.
            lr: its learning rate.
            accumulation: micro-batches of a step. The moment decays with the first and takes a
                share of each; weights step with the last. Scales, and weights without a moment,
                step by a share with each.
        """
        self.accumulation = accumulation
        step_size = lr * self.rule.radix * STEP_OF_RADIX
        same = [
            *fixed_point_gain(lr * SCALE_STEP / accumulation),
            *fixed_point_gain(step_size / accumulation),
            min(round(STEP_CLIP * step_size * UNIT), 2**30),
            round(step_size * 2**32),
        ]
        rows = [[step * accumulation + micro, *same] for micro in range(accumulation)]
        control = torch.tensor(rows, dtype=torch.int64, device="cpu")
        if self._control.shape != control.shape:
            self._control = control.to(self.device)
        elif self.device.type == "cuda":
            self._control.copy_(control.pin_memory(), non_blocking=True)
        else:
            self._control.copy_(control)

    def begin_micro(self, micro: int) -> None:
        """Prepare for the backward of micro-batch `micro`, from 0, by work on the device alone."""
        self.first, self.last = micro == 0, micro == self.accumulation - 1
        control = self._control[micro]
        integers = control[:6].to(torch.int32).unbind()
        tick, scale_gain, scale_shift, gain, shift, self.limit = integers
        self.row_limit = self.limit * ROW_CLIP // STEP_CLIP
        self.keys = stream_keys(self.seed, tick, self._num_matrices, _NUM_STREAMS)
        self.scale_gain = (scale_gain, scale_shift)
        self.carry_gain = (gain, shift)
        self.step_size = control[6]
        self._squares.zero_()

    def finish(self) -> None:
        """End a step: count it if one of its gradients was not finite."""
        self._nonfinite_steps += self._nonfinite.amax()
        self._nonfinite.zero_()

    @torch.no_grad()
    def __call__(
        self, tensor: TernaryTensor, grad: Tensor, where: "range | TouchedRows | None" = None
    ) -> None:
        """Update one tensor from its gradient; a bad gradient changes nothing.

        Matrices that lie in one tensor, and rows of a table, may go without a gradient in a
        micro-batch. So they step with every one that they have, by a share of the step, and not
        with the last micro-batch alone.

        Args:
            tensor: one of those the updater was made with.
            grad: (N, K) float32 or bfloat16. It is bad if the sum of its squares is not within
                2**-120 .. 2**120, and so if it is not finite, or all zero.
            where: which of the tensor's matrices the gradient is of, a stack (n, N, K) then; or
                which rows, and then only they decay and step, and root-mean-squares are over them.
                None is all of it.
        """
        index = self._index[id(tensor)]
        if where is None:
            state = (tensor.matrix(0), grad, index, self._refused[index])
            self._update(*state, self.first, self.last)
        elif isinstance(where, range):
            values = self._values(grad)
            for part, number in enumerate(where):
                state = (tensor.matrix(number), grad[part], index + number, self._unused)
                self._update(*state, True, True, values=values[part])
        else:
            rows = tensor.gather(where.rows)
            share = where.count.clamp(min=1) / len(where.rows)
            self._update(rows, grad, index, self._unused, True, True, share)
            tensor.scatter(where.rows, rows)

    def _update(
        self,
        matrix: Matrix,
        grad: Tensor,
        index: int,
        refused: Tensor,
        first: bool,
        last: bool,
        share: Tensor | None = None,
        values: Tensor | None = None,
    ) -> None:
        """Update one matrix.

        Args:
            matrix: its state.
            grad: of all its rows.
            index: of its keys and counters.
            refused: counts bad gradients.
            first: whether the moment decays.
            last: whether the weights step.
            share: of the rows, those that take part; the others' gradient is zero. None is all.
            values: of the direction, if they are known.
        """
        keys, rule = self.keys[index].unbind(), self.rule
        limit = self.limit if share is None else self.row_limit
        packed = Packed(matrix.trits, *matrix.scales, grad.shape[1], self.group_size)
        statistics = gradient_statistics(
            grad, packed, factored=self.direction == "factored", signs=self.voting
        )
        if share is not None:
            statistics = statistics._replace(
                slope_squares=statistics.slope_squares / share, columns=statistics.columns / share
            )
        gains = gradient_gains(
            statistics, matrix.row_statistic, matrix.column_statistic,
            keys[_ROW], keys[_COLUMN], refused, self._nonfinite[index],
        )  # fmt: skip
        if self.voting:
            cast_scale_votes(matrix.exponent, matrix.scale_votes, statistics.slope, gains.ok)
            self._flips[index].add_(cast_trit_votes(matrix.trits, matrix.votes, grad, gains.ok))
            return
        values = self._values(grad) if values is None else values
        direction = self._direction(values, gains, share)
        slope = (statistics.slope, gains.slope)
        step_scales(*matrix.scales, *slope, keys[_SCALE], *self.scale_gain, gains.ok)
        if not rule.moment_range:
            step_by_direction(
                matrix.trits, matrix.remainder, *direction, keys[_TRIT], *self.carry_gain,
                limit, gains.ok, self._flips[index], rule.radix, rule.remainder_max,
            )  # fmt: skip
            return
        squares = self._squares[index]
        moment = matrix.remainder if rule.nibble else matrix.moment
        decay = round(MOMENT_DECAY * UNIT) if first else UNIT
        blend = (decay, *self._moment_gain(1 if first and last else self.accumulation), rule.nibble)
        blend_moment(moment, *direction, keys[_MOMENT], gains.ok, squares, *blend)
        if not last:
            return
        if share is not None:
            squares = (squares / share).to(torch.int64)
        step_size = self.step_size // self.accumulation if first else self.step_size
        step_by_moment(
            matrix.trits, matrix.remainder, None if rule.nibble else moment, keys[_TRIT],
            step_size, squares, limit, gains.ok, self._flips[index],
            rule.radix, rule.remainder_max,
        )  # fmt: skip

    def _moment_gain(self, accumulation: int) -> tuple[int, int]:
        """Find what a direction is blended into the moment with, in fixed point."""
        units = moment_max(self.rule.nibble) / self.rule.moment_range  # int8 units of one rms
        gain, shift = fixed_point_gain((1 - MOMENT_DECAY) * units / accumulation, bits=10)
        return (gain, shift) if gain < 1024 else (gain >> 1, shift - 1)

    def _values(self, grad: Tensor) -> Tensor:
        """Find what gains make a direction of, for one gradient or a stack."""
        return orthogonalise(grad, self.dtype) if self.direction == "orthogonal" else grad

    def _direction(
        self, values: Tensor, gains: GradientGains, share: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Find the gains of the direction's rows and columns."""
        if self.direction == "sign":
            return values, None, None
        rows, columns = (gain if gain.numel() else None for gain in (gains.rows, gains.columns))
        unit = unit_gain(values, rows, columns, gains.ok)
        return values, unit if share is None else unit * share.sqrt(), columns

    def take_flips(self) -> int:
        """Count the trits that changed since the last call; waits for the device."""
        flips = int(self._flips.sum())
        self._flips.zero_()
        return flips

    def counters(self) -> dict[str, int]:
        """Count, since the start of the run, what went wrong; waits for the device.

        Returns:
            nonfinite_steps: steps in which a gradient was not finite.
            refused: gradients that were not finite or all zero, and so changed nothing.
        """
        return {"nonfinite_steps": int(self._nonfinite_steps), "refused": int(self._refused.sum())}

    def restore(self, counters: dict[str, int]) -> None:
        """Continue the counters of an earlier run."""
        self._nonfinite_steps.fill_(counters["nonfinite_steps"])
        self._refused.zero_()
        self._refused[0] = counters["refused"]
