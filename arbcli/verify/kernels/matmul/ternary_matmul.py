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
from arbcli.verify.kernels.codec.decode_digits import (
    decode_digits_reference,
    decode_large,
)
from arbcli.verify.kernels.codec.packed import SPECIAL_WEIGHTS, random_packed
from arbcli.verify.verification import Gate, Timing, Verification, nothing


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
    ternary_matmul, ternary_matmul_reference, gate=GATE,
    changed=SPECIAL_WEIGHTS | {"empty": {"x": nothing}},
    large_reference=partial(ternary_matmul_reference, decode=decode_large), torch_is_peer=True,
    scale_path=has_planes,
    timings=partial(_timings, False),
)  # fmt: skip
ternary_matmul_grad_x_verification = Verification(
    ternary_matmul_grad_x, ternary_matmul_grad_x_reference, gate=GATE,
    changed=SPECIAL_WEIGHTS | {"empty": {"grad_y": nothing}},
    large_reference=partial(ternary_matmul_grad_x_reference, decode=decode_large),
    torch_is_peer=True, scale_path=has_planes, timings=partial(_timings, True),
)  # fmt: skip
