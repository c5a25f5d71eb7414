"""Verification of `arbcli.kernels.matmul.ternary_matmul`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.packed import Packed
from arbcli.kernels.codec.packing import has_planes
from arbcli.kernels.matmul.ternary_matmul import (
    ternary_matmul,
    ternary_matmul_grad_x,
)
from arbcli.kernels.runtime.arguments import dtype_name, real_dtypes
from arbcli.verify.kernels.codec.decode_digits import (
    add_remainders,
    decode_digits_reference,
    decode_large,
)
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.verification import Case, Gate, Timing, Verification


def ternary_matmul_reference(
    x: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute the reference result of `ternary_matmul`, in float64."""
    return x.double() @ decode(packed).double().T


def ternary_matmul_grad_x_reference(
    grad_y: Tensor, packed: Packed, *, decode: Callable = decode_digits_reference
) -> Tensor:
    """Compute the reference result of `ternary_matmul_grad_x`, in float64."""
    return grad_y.double() @ decode(packed).double()


SHAPES = (
    (1, 1, 1), (3, 33, 123), (33, 17, 165), (5, 131, 33), (2, 5, 1311), (65, 33, 96)
)  # fmt: skip
"""(M, N, K)."""


def _inputs(
    device: torch.device, group_size: int, columns: str
) -> Iterator[tuple[str, Tensor, Packed]]:
    """Draw (label, activations, matrix); `columns` selects N or K columns of activations."""
    generator = torch.Generator().manual_seed(0)
    for rows, out_features, in_features in SHAPES:
        width = {"N": out_features, "K": in_features}[columns]
        source = torch.randn(rows, 2 * width, generator=generator).to(device)
        packed = random_packed(out_features, in_features, group_size, generator, spread=8)
        packed = packed.to(device)
        for dtype in real_dtypes(device):
            label = f"{rows}x{out_features}x{in_features} {dtype_name(dtype)}"
            yield label, source[:, :width].to(dtype), packed
    for name, all_digits in add_remainders(packed, generator):
        yield f"{label} {name}", source[:, :width].to(dtype), all_digits
    yield label + " strided", source.to(dtype)[:, ::2], packed
    few = source[:3, ::2].to(dtype)
    yield label + " whole octaves", few, packed._replace(fraction=None)
    yield label + " empty", source[:0, ::2].to(dtype), packed
    yield label + " zeros", few, packed._replace(trits=torch.full_like(packed.trits, 121))
    for end in (-96, 31):
        exponent = torch.full_like(packed.exponent, end)
        yield f"{label} E = {end}", few, packed._replace(exponent=exponent)


def _forward_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    for label, x, packed in _inputs(device, group_size, "K"):
        yield Case(label, (x, packed))


def _grad_x_cases(device: torch.device, group_size: int) -> Iterator[Case]:
    for label, grad_y, packed in _inputs(device, group_size, "N"):
        yield Case(label, (grad_y, packed))


TIMED = (*((m, size) for size in (8192, 16384) for m in (1, 8, 64)), (4096, 8192), (8192, 8192))
"""(M, N = K): few rows, bound by memory, and many rows, bound by compute."""


def _timings(grad_x: bool, device: torch.device, group_size: int) -> Iterator[Timing]:
    generator = torch.Generator(device)
    for rows, size in TIMED:
        packed = random_packed(size, size, group_size, generator, spread=8)
        source = torch.randn(rows, size, generator=generator, device=device, dtype=torch.bfloat16)
        # the same values, as their many zeros save power and so speed up the GPU
        dense = decode_weight(packed)
        yield Timing(
            f"{rows}x{size}x{size}",
            (source, packed),
            peer=partial(torch.matmul, source, dense if grad_x else dense.T),
            peer_name="cuBLAS bf16",
            flops=2 * rows * size * size,
        )


GATE = Gate(
    relative=1e-5, peer_slack=0.1,
    reason="float32 sums of up to 1311 products; in bf16 no worse than torch's product by 10 %",
)  # fmt: skip

ternary_matmul_verification = Verification(
    ternary_matmul, ternary_matmul_reference, _forward_cases, GATE,
    large_reference=partial(ternary_matmul_reference, decode=decode_large), torch_is_peer=True,
    scale_path=has_planes,
    timings=partial(_timings, False),
)  # fmt: skip
ternary_matmul_grad_x_verification = Verification(
    ternary_matmul_grad_x, ternary_matmul_grad_x_reference, _grad_x_cases, GATE,
    large_reference=partial(ternary_matmul_grad_x_reference, decode=decode_large),
    torch_is_peer=True, scale_path=has_planes, timings=partial(_timings, True),
)  # fmt: skip
