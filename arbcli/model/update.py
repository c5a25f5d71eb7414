"""Update rules: from the gradient of one matrix to new trits, scales and digits, in place.

The direction u = direction(g) has unit root-mean-square over the matrix: values in float, times
gains of rows and columns. From u in int32 fixed point on, which kernels form where they use it, all
is integer arithmetic: every backend agrees to the bit. The gradient is read in passes, and nothing
else of the shape of the matrix is made but the orthogonalised gradient.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from arbcli.kernels.blend_moment import blend_moment, moment_max
from arbcli.kernels.cast_votes import cast_scale_votes, cast_trit_votes
from arbcli.kernels.direction import UNIT
from arbcli.kernels.gradient_gains import GradientGains, gradient_gains
from arbcli.kernels.gradient_statistics import gradient_statistics
from arbcli.kernels.newton_schulz import gram, gram_polynomial
from arbcli.kernels.random_bits import stream_keys
from arbcli.kernels.step_scales import step_scales
from arbcli.kernels.step_trits import step_by_direction, step_by_moment
from arbcli.kernels.unit_gain import unit_gain
from arbcli.model.config import RULES, ModelConfig
from arbcli.model.ternary import TernaryTensor

MOMENT_DECAY = 0.9
STEP_CLIP = 4
"""Largest step of a weight, in root-mean-squares of the direction."""
STEP_OF_RADIX = 1 / 16
"""What a step of unit root-mean-square moves z at `lr` 1, in units of P."""
SCALE_STEP = 4
"""What a slope of unit root-mean-square moves v at `lr` 1."""
TINY = 1e-30
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5

_MOMENT, _TRIT, _SCALE, _ROW, _COLUMN = range(5)
_NUM_STREAMS = 5


def orthogonalise(grad: Tensor, dtype: torch.dtype, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """Push the singular values of a matrix towards 1 with Newton-Schulz iterations.

    X <- (a I + b A + c A A) X, A = X X.T, on the smaller side of the matrix.
    Source: K. Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/

    Args:
        grad: (N, K), or a stack (B, N, K), float32; each matrix finite and not all zero.
        dtype: of the products; bfloat16 is enough.
        steps: iterations.

    Returns:
        Like `grad`, of `dtype`.
    """
    tall = grad.shape[-2] > grad.shape[-1]
    x = grad.mT if tall else grad
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = torch.div(x, norm + TINY, out=torch.empty_like(x, dtype=dtype))
    for _ in range(steps):
        x = gram_polynomial(gram(x), *NEWTON_SCHULZ) @ x
    return x.mT if tall else x


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
        self.rule, self.direction, self.dtype = RULES[config.rule], config.direction, dtype
        self.voting = config.rule == "votes"
        self.device = self.tensors[0].trits.device
        self.seed = torch.tensor(seed, dtype=torch.int32, device=self.device)
        self._index = {id(tensor): index for index, tensor in enumerate(self.tensors)}
        self.num_weights = sum(tensor.num_weights for tensor in self.tensors)
        self._control = torch.empty(0, dtype=torch.int64, device=self.device)
        # one of each for every tensor, so that updates of several may run side by side
        counter = {"dtype": torch.int64, "device": self.device}
        self._flips, self._refused, self._nonfinite, self._squares = (
            torch.zeros(len(self.tensors), **counter) for _ in range(4)
        )
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
        self.keys = stream_keys(self.seed, tick, len(self.tensors), _NUM_STREAMS)
        self.scale_gain = (scale_gain, scale_shift)
        self.carry_gain = (gain, shift)
        self.step_size = control[6]
        self._squares.zero_()

    def finish(self) -> None:
        """End a step: count it if one of its gradients was not finite."""
        self._nonfinite_steps += self._nonfinite.amax()
        self._nonfinite.zero_()

    @torch.no_grad()
    def __call__(self, tensor: TernaryTensor, grad: Tensor) -> None:
        """Update one tensor from its gradient; a bad gradient changes nothing.

        Args:
            tensor: one of those the updater was made with.
            grad: (N, K) float32 or bfloat16. It is bad if the sum of its squares is not within
                2**-120 .. 2**120, and so if it is not finite, or all zero.
        """
        index = self._index[id(tensor)]
        keys, rule = self.keys[index].unbind(), self.rule
        statistics = gradient_statistics(
            grad, tensor.trits, *tensor.scales, tensor.group_size,
            factored=self.direction == "factored", signs=self.voting,
        )  # fmt: skip
        gains = gradient_gains(
            statistics, getattr(tensor, "row_statistic", None),
            getattr(tensor, "column_statistic", None), keys[_ROW], keys[_COLUMN],
            self._refused[index], self._nonfinite[index],
        )  # fmt: skip
        if self.voting:
            cast_scale_votes(tensor.exponent, tensor.scale_votes, statistics.slope, gains.ok)
            self._flips[index].add_(cast_trit_votes(tensor.trits, tensor.votes, grad, gains.ok))
            return
        direction = self._direction(grad, gains)
        slope = (statistics.slope, gains.slope)
        step_scales(*tensor.scales, *slope, keys[_SCALE], *self.scale_gain, gains.ok)
        if rule.moment_range:
            self._step_by_moment(tensor, direction, keys, gains.ok, index)
        else:
            step_by_direction(
                tensor.trits, tensor.remainder, *direction, keys[_TRIT], *self.carry_gain,
                self.limit, gains.ok, self._flips[index], rule.radix, rule.remainder_max,
            )  # fmt: skip

    def _direction(
        self, grad: Tensor, gains: GradientGains
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Find the direction's values and the gains of its rows and columns."""
        if self.direction == "sign":
            return grad, None, None
        if self.direction == "factored":
            return grad, unit_gain(grad, gains.rows, gains.columns, gains.ok), gains.columns
        values = orthogonalise(grad, self.dtype)
        return values, unit_gain(values, None, None, gains.ok), None

    def _step_by_moment(
        self,
        tensor: TernaryTensor,
        direction: tuple[Tensor, Tensor | None, Tensor | None],
        keys: tuple[Tensor, ...],
        ok: Tensor,
        index: int,
    ) -> None:
        rule, squares = self.rule, self._squares[index]
        moment = tensor.remainder if rule.nibble else tensor.moment
        units = moment_max(rule.nibble) / rule.moment_range  # int8 units of one root-mean-square
        gain, shift = fixed_point_gain((1 - MOMENT_DECAY) * units / self.accumulation, bits=10)
        gain, shift = (gain, shift) if gain < 1024 else (gain >> 1, shift - 1)
        decay = round(MOMENT_DECAY * UNIT) if self.first else UNIT
        blend = (decay, gain, shift, rule.nibble)
        blend_moment(moment, *direction, keys[_MOMENT], ok, squares, *blend)
        if self.last:
            step_by_moment(
                tensor.trits, tensor.remainder, None if rule.nibble else moment, keys[_TRIT],
                self.step_size, squares, self.limit, ok, self._flips[index],
                rule.radix, rule.remainder_max,
            )  # fmt: skip

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
