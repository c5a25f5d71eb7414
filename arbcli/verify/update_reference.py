"""Packed tensors and their update again, in float64 and plain torch, written from the formulas."""

import math

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_digits import decode_digits_torch
from arbcli.kernels.codec.packing import unpack_trits_torch
from arbcli.model.packed import TernaryTensor
from arbcli.verify.kernels.codec.decode_digits import decode_digits_reference
from arbcli.verify.kernels.codec.packing import unpack_trits_reference
from arbcli.verify.kernels.update.gradient_gains import statistic_value_reference

SLOW_WEIGHTS = 1 << 17
"""Larger matrices are decoded by the torch backend, not a weight at a time."""


def reference_weight(tensor: TernaryTensor) -> Tensor:
    """Decode a packed tensor to (N, K) float64."""
    if tensor.num_weights > SLOW_WEIGHTS:
        return decode_digits_torch(tensor.packed, torch.float32).double()
    return decode_digits_reference(tensor.packed).double()


def state_values(tensor: TernaryTensor) -> dict[str, Tensor]:
    """Read the values that a packed tensor stores, as float64.

    Returns:
        By name: `z` = T P + A, (N, K); `v` = 128 E + F, (N, groups); `m`, (N, K), the moment in
        root-mean-squares of the direction; and `rows`, (N,), and `columns`, (K,), the running mean
        squares, 0 where there is none yet, if the tensor has them.
    """
    rule, slow = tensor.rule, tensor.num_weights > SLOW_WEIGHTS
    unpack = unpack_trits_torch if slow else unpack_trits_reference
    trits = unpack(tensor.trits, tensor.in_features).double()
    low = tensor.remainder.double()
    moment = getattr(tensor, "moment", torch.zeros_like(low)).double()
    share_a_byte = bool(rule.moment_range) and not hasattr(tensor, "moment")
    if share_a_byte:
        moment = torch.floor(low / 16)
        low = low - 16 * moment
        low = torch.where(low > 7, low - 16, low)
    largest = 7 if share_a_byte else 127
    values = {
        "z": trits * rule.radix + low,
        "v": tensor.exponent.double() * 128 + tensor.fraction.double(),
        "m": moment * rule.moment_range / largest,  # of gradients, or of directions
    }
    if hasattr(tensor, "row_statistic"):
        values["rows"] = statistic_value_reference(tensor.row_statistic)
        values["columns"] = statistic_value_reference(tensor.column_statistic)
    return values


def reference_direction(grad: Tensor, direction: str, before: dict[str, Tensor]) -> Tensor:
    """Compute the direction of a step, (N, K) float64, of unit root-mean-square.

    Args:
        grad: (N, K).
        direction: name of the direction.
        before: result of `state_values` before the step.
    """
    grad = grad.double()
    if direction == "sign":
        u = grad.sign()
    elif direction == "factored":
        rows = _running_mean(before["rows"], grad.square().mean(dim=1))
        columns = _running_mean(before["columns"], grad.square().mean(dim=0))
        u = grad / torch.sqrt(rows[:, None] * columns / rows.mean())
    else:
        u = _approximate_polar(grad) if grad.device.type == "cpu" else _newton_schulz(grad)
        length = u.norm(dim=1, keepdim=True)
        u = torch.where(length > 0, u / length, 0)
    return u / _rms(u)


def _newton_schulz(grad: Tensor) -> Tensor:
    u = grad / grad.norm()
    for _ in range(5):
        gram = u @ u.T
        u = 3.4445 * u + (-4.7750 * gram + 2.0315 * gram @ gram) @ u
    return u


def _approximate_polar(grad: Tensor) -> Tensor:
    """Apply the rational function that a CPU has for it to the singular values themselves."""
    left, s, right = torch.linalg.svd(grad, full_matrices=False)
    s = s / (s**4).sum() ** 0.25
    factor = 0.961939909 + 0.00921883 / (s**2 + 1.8960818e-5)
    return left * (s * (factor + 0.18527752 / (s**2 + 9.18605963e-3))) @ right


def _running_mean(before: Tensor, value: Tensor) -> Tensor:
    return torch.where(before == 0, value, 0.99 * before + 0.01 * value)


def reference_slope(grad: Tensor, weight: Tensor, group_size: int) -> Tensor:
    """Sum g * w over each group, then divide by the root-mean-square, in float64.

    Args:
        grad: (N, K).
        weight: (N, K) float64.
        group_size: number of weights per group.

    Returns:
        (N, groups) float64.
    """
    products = grad.double() * weight
    slope = torch.stack([part.sum(dim=1) for part in products.split(group_size, dim=1)], dim=1)
    return slope / _rms(slope)


RATES = {
    "trit": {"moment": 0.7, "nibble": 0.4, "carry": 1.0},
    "all": {"moment": 0.5, "nibble": 0.4, "carry": 0.25},
}
"""Learning rates of models with one rule."""


def reference_rate(rule: str, model_rule: str, digits: str) -> float:
    """Divide the rate of a rule by that of the model's rule, which `--lr` is meant for."""
    return 1.0 if rule == model_rule else RATES[digits][rule] / RATES[digits][model_rule]


def reference_step(
    tensor: TernaryTensor,
    before: dict[str, Tensor],
    stored_moment: Tensor,
    direction: Tensor,
    slopes: list[Tensor],
    lr: float,
    accumulation: int = 1,
    boost: float = 1.0,
    smoothed: Tensor | None = None,
    weight_decay: float = 0.0,
) -> dict[str, Tensor]:
    """Compute the state of a tensor after a micro-batch, without rounding.

    Args:
        tensor: tensor with its rule.
        before: result of `state_values` before the step.
        stored_moment: moment in its result after the step, as weights step by the stored moment.
        direction: (N, K), of unit RMS; the gradient itself if the moment averages gradients.
        slopes: (N, groups) of each micro-batch up to this one, of unit RMS.
        lr: learning rate of the step.
        accumulation: number of micro-batches of the step.
        boost: factor of gradients in the moment: see `reference_boost`.
        smoothed: (N, K), the direction of the stored moment, if weights step along it.
        weight_decay: at `lr` 1 weights shrink by a 128th of it in a step.
    """
    rule, largest = tensor.rule, tensor.rule.radix + tensor.rule.remainder_max
    size, z, m = lr * rule.radix / 16, before["z"], before["m"]
    v, micro = before["v"], len(slopes) - 1
    if micro == accumulation - 1:
        slope = torch.stack([slope.clamp(-16, 16) for slope in slopes]).mean(0)
        v = v - 4 * lr * (slope / (_rms(slope) if micro else 1)).clamp(-3, 3)
    shrunk = lr * weight_decay / 128 * z
    if not rule.moment_range:
        z = z - shrunk / accumulation - size / accumulation * direction.clamp(-4, 4)
    else:
        m = (0.9 if micro == 0 else 1.0) * m
        m = m + 0.1 * boost / accumulation * direction.clamp(-32, 32)
        if micro == accumulation - 1:
            along = stored_moment / _rms(stored_moment) if smoothed is None else smoothed
            z = z - shrunk - size * along.clamp(-4, 4)
    return {
        "z": z.clamp(-largest, largest),
        "v": v.clamp(-96 * 128, 31 * 128 + 127),
        "m": m.clamp(-rule.moment_range, rule.moment_range),
    }


def reference_boost(moment: Tensor, accumulation: int) -> float:
    """Compute the factor of gradients in a moment from its value before the step, (N, K) float64.

    Independent gradients of unit RMS have a moment with a mean square of 0.1**2 / (1 - 0.9**2).
    """
    square = float(moment.square().mean())
    ratio = 0.1**2 / (1 - 0.9**2) / square if square else math.inf
    return min(max(ratio**2, 1.0), math.sqrt(accumulation))


def unit_gradient(grad: Tensor) -> Tensor:
    """Divide a gradient (N, K) by its root-mean-square, in float64."""
    grad = grad.double()
    return grad / _rms(grad)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
