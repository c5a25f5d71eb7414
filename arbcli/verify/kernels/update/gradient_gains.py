"""Verification of `arbcli.kernels.update.gradient_gains`."""

import math
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import num_groups
from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.update.gradient_gains import GRADIENT_GAINS
from arbcli.verify.kernels.update.random_bits import random_bits_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification, filled


def averaged_digits(whole: int, fraction: int, value: float, word: int) -> tuple[int, int]:
    """Average `value` into a statistic, rounded stochastically by the 16 random bits of `word`."""
    mean_square = value if whole == -128 else 0.99 * 2 ** (whole + fraction / 128) + 0.01 * value
    t = 128 * math.log2(mean_square) if mean_square > 0 else -math.inf
    t = min(max(t, -127 * 128), 127 * 128 + 127)
    return divmod(math.floor(t + word / 65536), 128)


def statistic_value_reference(statistic: Tensor) -> Tensor:
    """Decode (L, 2) int8 digits to (L,) float64: 2**(whole + fraction / 128), 0 where unset."""
    whole, fraction = statistic.to(torch.float64).unbind(dim=1)
    return torch.where(whole == -128, 0, 2 ** (whole + fraction / 128))


def gradient_gains_reference(
    slope: Tensor, slope_squares: Tensor, squares: Tensor, rows: Tensor, columns: Tensor,
    row_statistic: Tensor | None, column_statistic: Tensor | None, row_key: Tensor,
    column_key: Tensor, refused: Tensor, nonfinite: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the reference result of `gradient_gains` and its state, in float64."""
    total = float(squares.double().sum())
    ok = int(2.0**-120 <= total <= 2.0**120)
    refused += 1 - ok
    nonfinite |= int(not total <= 2.0**120)
    mean = float(slope_squares.sum()) / slope.numel()
    like: TensorOptions = {"device": squares.device, "dtype": torch.float64}
    gains = [torch.empty(0, **like)] * 2
    if row_statistic is not None and column_statistic is not None:
        num_rows, num_columns = rows.shape[1], columns.shape[1]
        _average_reference(row_statistic, rows.double().sum(0) / num_columns, row_key, ok)
        _average_reference(column_statistic, columns.double().sum(0) / num_rows, column_key, ok)
        gains = [
            factor / statistic_value_reference(statistic).clamp(min=1e-38).sqrt()
            for factor, statistic in (
                (math.sqrt(total / (num_rows * num_columns)), row_statistic),
                (1.0, column_statistic),
            )
        ]
    slope_gain = 2**16 / math.sqrt(mean) if mean > 0 else 0.0
    unit = 2**16 / math.sqrt(total / (rows.shape[1] * columns.shape[1])) if ok else 0.0
    scalars = torch.tensor(slope_gain, **like), torch.tensor([unit], **like)
    return torch.tensor(ok, device=squares.device), *scalars, *gains


def _average_reference(statistic: Tensor, value: Tensor, key: Tensor, ok: int) -> None:
    if ok:
        words = (random_bits_reference(int(key), 1, len(value))[0] % 65536).tolist()
        rows = zip(statistic.tolist(), (value + 2.0**-120).tolist(), words, strict=True)
        digits = [averaged_digits(high, low, new, word) for (high, low), new, word in rows]
        statistic.copy_(torch.tensor(digits, dtype=torch.int8).reshape(-1, 2))


def _append_state(inputs: tuple, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the result, counters and decoded statistics."""
    if int(results[0]) == 0:  # gains are not used then
        results = (results[0], *(torch.zeros_like(gain) for gain in results[1:]))
    running = [statistic_value_reference(x) for x in inputs[5:7] if x is not None]
    return *results, *running, *inputs[-2:]


def _reference_with_state(*inputs: Any) -> tuple[Tensor, ...]:
    return _append_state(inputs, gradient_gains_reference(*inputs))


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    def digits(length: int) -> Tensor:
        if rng.chance(0.15):
            return rng.view(rng.integers(30, 30, length, 2))
        whole = rng.integers(-128 if rng.chance(0.5) else -30, 30, length, 1)
        return rng.view(torch.cat([whole, rng.integers(0, 127, length, 1)], dim=1))

    def sums(*shape: int) -> Tensor:
        return rng.reals(*shape, dtype=torch.float32).mul(8).exp().contiguous()

    slope = torch.zeros(n, num_groups(k, group_size), device=rng.device)
    parts = sums(m), sums(m + 2, n), sums(m + 5, k)
    counters = [torch.zeros((), dtype=torch.int64, device=rng.device) for _ in range(2)]
    squares = parts[0] * rng.pick((1.0, 1.0, 2.0**140))
    state = (digits(n), digits(k)) if rng.integer(4) else (None, None)
    return slope, parts[0].double(), squares, *parts[1:], *state, rng.key(), rng.key(), *counters


gradient_gains_verification = Verification(
    GRADIENT_GAINS, _reference_with_state,
    changed={
        f"squares {x:g}": {"squares": filled(x)}
        for x in (0.0, 2.0**-121, 2.0**-120, 2.0**120, 2.0**121, torch.inf, torch.nan)
    } | {"no slope": {"slope_squares": torch.zeros_like}}, gate=Gate(
        relative=2 ** (1 / 128) - 1 + 1e-5,
        reason="a float log2 at a rounding boundary lands one step of 1/128, 0.54 %, to the side"
    ),
    compared=_append_state, draw=_draw, needs_rows=False,
)  # fmt: skip
