"""Verification of `arbcli.kernels.update.sum_gradients`."""

import torch
from torch import Tensor

from arbcli.kernels.runtime.arguments import TensorOptions
from arbcli.kernels.update.hadamard import block_of
from arbcli.kernels.update.quantise_gradient import NONE, NOT_FINITE
from arbcli.kernels.update.sum_gradients import sum_gradients
from arbcli.verify.kernels.update.hadamard import hadamard_matrix, signs_reference
from arbcli.verify.kernels.update.quantise_gradient import combine_planes_reference
from arbcli.verify.verification import CaseGenerator, Verification


def sum_gradients_reference(
    parts: Tensor, low: Tensor | None, exponent: Tensor, fitting: Tensor, block: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Compute the reference result of `sum_gradients`, in int64 and float64."""
    total = combine_planes_reference(parts, low).sum(0)
    integer: TensorOptions = {"dtype": torch.int64, "device": parts.device}
    if block > 1:
        mixer = torch.tensor(hadamard_matrix(block), **integer)
        blocks = total.reshape(-1, block, 1) * mixer  # a product of integers, on a GPU too
        signs = torch.tensor(signs_reference(total.shape[1]), **integer)
        total = blocks.sum(1).reshape(total.shape) * signs
    values = total.double() / block * torch.exp2(exponent.double())[:, None]
    values = torch.where((exponent == -128)[:, None], 0, values)
    return torch.where((fitting == 127).any(dim=0)[:, None], torch.inf, values).to(dtype)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    number, dtype = 1 + rng.integer(4), rng.pick((torch.int8, torch.int16, torch.int32))
    low = None
    if dtype == torch.int8 and rng.chance(0.5):
        halves = rng.integers(-128, 127, number, (n + 1) // 2 * k + rng.integer(3))
        low = halves.contiguous().view(torch.uint8)[:, : (n + 1) // 2 * k]
        low = low.unflatten(1, ((n + 1) // 2, k))
    room = torch.zeros(number, n * k + rng.integer(3), dtype=dtype, device=rng.device)
    parts = room[:, : n * k].unflatten(1, (n, k))
    parts.copy_(rng.integers(-127, 127, number, n, k))
    exponent, fitting = (rng.integers(-9, 9, *shape).contiguous() for shape in ((n,), (number, n)))
    return parts, low, exponent, fitting, block_of(k) if rng.chance(0.9) else 1


sum_gradients_verification = Verification(
    sum_gradients, sum_gradients_reference,
    changed={
        "none and not finite": {
            "exponent": lambda x: x.index_fill(0, torch.tensor([1, 5], device=x.device), NONE),
            "fitting": lambda x: x.index_fill(1, torch.tensor([2], device=x.device), NOT_FINITE),
        },
        "bf16": {"parts": lambda x: x.clamp(-9, 9), "low": None, "dtype": torch.bfloat16},
    }, draw=_draw, needs_rows=False,
)  # fmt: skip
