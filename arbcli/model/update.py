"""Update rules: from the gradient of one matrix to new trits, scales and digits, in place.

The direction u = direction(g) has unit root-mean-square over the matrix and is float. From u in
int32 fixed point on, all is integer arithmetic in the kernels: every backend agrees to the bit.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from arbcli.kernels.blend_moment import blend_moment, moment_max
from arbcli.kernels.cast_votes import cast_scale_votes, cast_trit_votes
from arbcli.kernels.factored_statistics import average_statistic, mean_squares
from arbcli.kernels.newton_schulz import gram, gram_polynomial
from arbcli.kernels.random_bits import stream_keys
from arbcli.kernels.scale_slope import scale_slope
from arbcli.kernels.step_scales import step_scales
from arbcli.kernels.step_trits import step_trits
from arbcli.model.config import RULES, ModelConfig
from arbcli.model.ternary import TernaryTensor

UNIT = 1 << 16
"""Fixed-point one: directions, slopes and steps have 16 fractional bits."""
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


def to_fixed_point(values: Tensor) -> Tensor:
    """Divide by the root-mean-square over the matrix and round to int32 units of 2**-16.

    Zeros stay zeros. All is scaled to at most 1 first, so that no square under- or overflows.
    """
    values = values.float()
    values = values / values.abs().amax().clamp(min=TINY)
    scaled = values * (UNIT / values.square().mean().sqrt().clamp(min=TINY))
    return scaled.round_().clamp_(-(2.0**30), 2.0**30).to(torch.int32)


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
        self._flips = torch.zeros((), dtype=torch.int64, device=self.device)
        self._refused = torch.zeros((), dtype=torch.int64, device=self.device)
        self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._nonfinite = torch.zeros((), dtype=torch.bool, device=self.device)

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
        self.no_shift = torch.zeros((), dtype=torch.int32, device=self.device)

    def finish(self) -> None:
        """End a step: count it if one of its gradients was not finite."""
        self._nonfinite_steps += self._nonfinite
        self._nonfinite.zero_()

    @torch.no_grad()
    def __call__(self, tensor: TernaryTensor, grad: Tensor) -> None:
        """Update one tensor from its gradient, (N, K) float32; a bad gradient changes nothing."""
        keys = self.keys[self._index[id(tensor)]].unbind()
        largest = grad.abs().amax()  # a NaN anywhere makes this one
        finite = torch.isfinite(largest)
        ok = (finite & (largest > 0)).to(torch.int32)
        self._nonfinite |= ~finite
        self._refused += 1 - ok
        if self.voting:
            slope = scale_slope(grad.sign(), tensor.trits, *tensor.scales, tensor.group_size)
            cast_scale_votes(tensor.exponent, tensor.scale_votes, slope, ok)
            self._flips += cast_trit_votes(tensor.trits, tensor.votes, grad, ok)
            return
        slope = scale_slope(grad, tensor.trits, *tensor.scales, tensor.group_size)
        direction = to_fixed_point(self._direction(tensor, grad, keys, ok, largest))
        del grad
        step_scales(*tensor.scales, to_fixed_point(slope), keys[_SCALE], *self.scale_gain, ok)
        if self.rule.moment_range:
            self._step_moment(tensor, direction, keys, ok)
        else:
            self._step(tensor, direction, keys, *self.carry_gain, ok)

    def _direction(
        self,
        tensor: TernaryTensor,
        grad: Tensor,
        keys: tuple[Tensor, ...],
        ok: Tensor,
        largest: Tensor,
    ) -> Tensor:
        if self.direction == "sign":
            return grad.sign()
        if self.direction == "orthogonal":
            return orthogonalise(grad / largest, self.dtype)
        rows, columns = mean_squares(grad)
        rows = average_statistic(tensor.row_statistic, rows, keys[_ROW], ok)
        columns = average_statistic(tensor.column_statistic, columns, keys[_COLUMN], ok)
        return grad * (rows.mean() / rows).sqrt_()[:, None] * columns.rsqrt()

    def _step_moment(
        self, tensor: TernaryTensor, direction: Tensor, keys: tuple[Tensor, ...], ok: Tensor
    ) -> None:
        rule = self.rule
        moment = tensor.remainder if rule.nibble else tensor.moment
        units = moment_max(rule.nibble) / rule.moment_range  # int8 units of one root-mean-square
        gain, shift = fixed_point_gain((1 - MOMENT_DECAY) * units / self.accumulation, bits=10)
        gain, shift = (gain, shift) if gain < 1024 else (gain >> 1, shift - 1)
        decay = round(MOMENT_DECAY * UNIT) if self.first else UNIT
        squares = blend_moment(
            moment, direction, keys[_MOMENT], ok, decay, gain, shift, rule.nibble
        )
        if not self.last:
            return
        mean_square = squares.to(torch.float64) / tensor.num_weights
        gain = self.step_size.to(torch.float64) * (UNIT / 2**32) / mean_square.sqrt()
        gain = gain.clamp_(max=2**23).round_().to(torch.int32)
        self._step(tensor, None if rule.nibble else moment, keys, gain, self.no_shift, ok)

    def _step(
        self,
        tensor: TernaryTensor,
        direction: Tensor | None,
        keys: tuple[Tensor, ...],
        gain: Tensor,
        shift: Tensor,
        ok: Tensor,
    ) -> None:
        self._flips += step_trits(
            tensor.trits,
            tensor.remainder,
            direction,
            keys[_TRIT],
            gain,
            shift,
            self.limit,
            ok,
            self.rule.radix,
            self.rule.remainder_max,
        )

    def take_flips(self) -> int:
        """Count the trits that changed since the last call; waits for the device."""
        flips = int(self._flips)
        self._flips.zero_()
        return flips

    def counters(self) -> dict[str, int]:
        """Count, since the start of the run, what went wrong; waits for the device.

        Returns:
            nonfinite_steps: steps in which a gradient was not finite.
            refused: gradients that were not finite or all zero, and so changed nothing.
        """
        return {"nonfinite_steps": int(self._nonfinite_steps), "refused": int(self._refused)}

    def restore(self, counters: dict[str, int]) -> None:
        """Continue the counters of an earlier run."""
        self._nonfinite_steps.fill_(counters["nonfinite_steps"])
        self._refused.fill_(counters["refused"])
