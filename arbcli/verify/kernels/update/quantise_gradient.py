"""Verification of `arbcli.kernels.update.quantise_gradient`."""

import torch
from torch import Tensor

from arbcli.kernels.update.hadamard import block_of
from arbcli.kernels.update.quantise_gradient import NONE, quantise_gradient
from arbcli.verify.kernels.update.hadamard import mixed_reference
from arbcli.verify.kernels.update.random_bits import random_halves_reference
from arbcli.verify.verification import CaseGenerator, Verification


def quantise_gradient_reference(
    grad: Tensor, exponent: Tensor, key: Tensor, sums: Tensor, low: Tensor | None, fitting: Tensor,
    limit: int, block: int, add: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the reference result of `quantise_gradient` (`sums`, `low`, `fitting`)."""
    values = mixed_reference(grad.float(), block).double() if block > 1 else grad.double()
    e = exponent.long()[:, None]
    size = torch.where(values.abs() < torch.inf, values.abs(), 0) * torch.exp2(-e.double())
    size = torch.where(e == -128, 0, size.clamp(max=limit))
    parts = torch.floor(size * 65536).long()  # exact: below 2**53
    random = random_halves_reference(int(key), *grad.shape).to(grad.device)
    q = torch.sign(values).nan_to_num(0).long() * ((parts + random) // 65536).clamp(max=limit)
    octaves = []
    for row in values.abs():
        largest = float(row.max()) if bool(torch.isfinite(row).all()) else float("inf")
        fits = torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent.item()
        normal = 2.0**-126 <= largest < float("inf")
        octave = min(max(fits - limit.bit_length(), -100), 100) if normal else -128
        octaves.append(127 if largest == float("inf") else octave)
    new = torch.tensor(octaves, dtype=torch.int8, device=fitting.device)
    exponents = torch.maximum(fitting, new) if add else new
    if low is None:
        return (sums.long() + q if add else q).to(sums.dtype), exponents
    total = combine_planes_reference(sums, low) + q if add else q
    bits = torch.cat([total, total.new_zeros(len(total) % 2, total.shape[1])]) % 16
    high = torch.div(total, 16, rounding_mode="floor").to(torch.int8)
    return high, (bits[::2] + 16 * bits[1::2]).to(torch.uint8), exponents


def combine_planes_reference(sums: Tensor, low: Tensor | None) -> Tensor:
    """Combine the high and low planes of sums to (..., N, K) int64."""
    if low is None:
        return sums.long()
    bits = torch.stack([low.long() % 16, low.long() // 16], dim=-2)
    return 16 * sums.long() + bits.flatten(-3, -2)[..., : sums.shape[-2], :]


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    dtype = rng.pick((torch.int8, torch.int16, torch.int32))
    sums = torch.full((n, k), rng.integer(99), dtype=dtype, device=rng.device)
    exponent, fitting = (rng.integers(-9, 1, n).contiguous() for _ in range(2))
    if rng.chance(0.2):
        exponent[:: 1 + rng.integer(4)] = NONE
    low, room = None, 29  # in sums of int8
    if dtype == torch.int8 and rng.chance(0.5):
        low, room = rng.integers(0, 15, (n + 1) // 2, k).contiguous().view(torch.uint8), 450
    block = block_of(k) if rng.chance(0.9) else 1
    add = not rng.chance(0.4)
    max_sum = 2047 if low is not None else 127 if dtype == torch.int8 else 32767
    limit = 1 + rng.integer(room) if add else max_sum
    return rng.reals(n, k), exponent, rng.key(), sums, low, fitting, limit, block, add


def _set_nonfinite(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[1, 3], grad[2, 0], grad[3, -1] = torch.nan, torch.inf, -torch.inf
    return grad


def _round_to_halves(grad: Tensor) -> Tensor:
    return (8 * grad).round() / 16


quantise_gradient_verification = Verification(
    quantise_gradient, quantise_gradient_reference,
    changed={
        "zeros": {"grad": torch.zeros_like}, "clipped": {"grad": lambda x: x * 1e30},
        "tiny": {"grad": lambda x: x * 1e-33}, "not finite": {"grad": _set_nonfinite},
        "not finite, not mixed": {"grad": _set_nonfinite, "block": 1},
        "halfway": {"grad": _round_to_halves, "limit": 15, "block": 1},
    }, compared=("sums", "low", "fitting"),
    draw=_draw, needs_rows=False,
)  # fmt: skip
