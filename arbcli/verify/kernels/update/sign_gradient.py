"""Verification of `arbcli.kernels.update.sign_gradient`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.update.gradient_statistics import gradient_statistics
from arbcli.kernels.update.sign_gradient import (
    SignGradient,
    sign_gradient,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.decode_digits import digits_large, digits_reference
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.kernels.update.gradient_statistics import gradient_statistics_reference
from arbcli.verify.verification import Case, Gate, Timing, Verification


def sign_gradient_reference(
    grad_y: Tensor, x: Tensor, packed: Packed, *, digits: Callable = digits_reference
) -> tuple[Tensor, ...]:
    """Compute the reference result of `sign_gradient`, in float64, and sums in one part each."""
    grad = grad_y.double().T @ x.double()
    results = gradient_statistics_reference(grad, packed, False, True, digits=digits)
    return torch.sign(grad).to(torch.int8), *results[:3]


def _scale_path(group_size: int) -> bool:
    """Return whether the lanes of groups are all of them."""
    return group_size & (group_size - 1) == 0


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw small integers, whose sums are exact in any order, so that no sign is an accident."""
    return torch.randint(-4, 5, shape, generator=generator).float()


def _cases(device: torch.device, group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1, 1), (5, 33, 41), (17, 3, 165), (3, 65, 7), (33, 2, 1311)]
    dtypes = [torch.float32]
    if device.type == "cuda":  # the interpreter's bf16 arithmetic is wrong
        shapes += [(300, 260, 776)]
        dtypes += [torch.bfloat16]
    for length, rows, columns in shapes:
        packed = random_packed(rows, columns, group_size, generator, spread=8).to(device)
        grad_y, x = (_draw(generator, length, width).to(device) for width in (rows, columns))
        for dtype in dtypes:
            label = f"{length}x{rows}x{columns}" + " bf16" * (dtype == torch.bfloat16)
            yield Case(label, (grad_y.to(dtype), x.to(dtype), packed))
    grad_y, x = _draw(generator, 5, 9), _draw(generator, 5, 40)
    packed = random_packed(9, 40, group_size, generator, spread=8).to(device)
    grad_y, x = grad_y.to(device), x.to(device)
    yield Case("5x9x40 whole octaves", (grad_y, x, packed._replace(fraction=None)))
    yield Case("5x9x40 zeros", (torch.zeros_like(grad_y), x, packed))
    yield Case("0x9x40 empty", (grad_y[:0], x[:0], packed))
    wide_y, wide_x = (_draw(generator, 10, 2 * width).to(device) for width in (9, 40))
    yield Case("5x9x40 strided", (wide_y[::2, ::2], wide_x[1::2, 1::2], packed))


def _timings(device: torch.device, group_size: int) -> Iterator[Timing]:
    length, rows, columns = 8192, 11264, 2048
    packed = random_packed(rows, columns, group_size, torch.Generator(device), spread=8)
    grad_y, x = (
        torch.randn(length, width, device=device, dtype=torch.bfloat16) for width in (rows, columns)
    )
    yield Timing(
        f"{length}x{rows}x{columns}", (grad_y, x, packed),
        peer=lambda: gradient_statistics(grad_y.T @ x, packed, signs=True),
        peer_name="cuBLAS, then statistics", flops=2 * length * rows * columns,
    )  # fmt: skip


def _sum_parts(_inputs: tuple, results: SignGradient) -> tuple[Tensor, ...]:
    """Add parts up, in float64."""
    signs, (slope, *sums, _, _) = results
    return signs, slope, *(part.double().sum() for part in sums)


def _draw_small(rng: CaseGenerator, *shape: int) -> Tensor:
    """Draw integers, so that sums are exact and no sign is an accident of their order."""
    return rng.view(rng.integers(-4, 4, *shape).to(rng.dtype))


sign_gradient_verification = Verification(
    sign_gradient, sign_gradient_reference, _cases,
    Gate(
        relative=4e-6,
        reason="signs equal; float32 sums over a group, and products in float32 in either type",
    ),
    compared=_sum_parts, large_reference=partial(sign_gradient_reference, digits=digits_large),
    scale_path=_scale_path, timings=_timings,
    values={"grad_y": _draw_small, "x": _draw_small, "packed": {"digits": "trit"}},
)  # fmt: skip
