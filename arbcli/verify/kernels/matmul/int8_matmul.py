"""Verification of `arbcli.kernels.matmul.int8_matmul`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.matmul.int8_matmul import INT8_MATMUL, _weights_in_float32, prepack_int8
from arbcli.kernels.matmul.prepacked_rows import MAX_TEXTS
from arbcli.kernels.matmul.swizzled import tiles_torch
from arbcli.verify.kernels.matmul.swizzled import multiply_densely, tiles_reference
from arbcli.verify.verification import CaseGenerator, Gate, Verification


def int8_matmul_reference(
    x: Tensor, pieces: Tensor, scales: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `int8_matmul` in float64, one column at a time."""
    tiles, planes = pieces.shape[:2]
    weight = torch.zeros(tiles, 2, 8, 32 * planes, dtype=torch.float64, device=x.device)
    for k in range(in_features):
        code = pieces[:, k // 32, :, k // 8 % 4, :, k % 8].double()  # (T, 8, 2)
        z = code - (code >= 128) * (2 * code - 128)
        weight[..., k] = (z * scales[:, k // 32].double()).transpose(1, 2)
    return tiles_reference(x, weight[..., :in_features], out_features, gated, eps, added)


def _multiply_rounded_weights(
    x: Tensor, pieces: Tensor, scales: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `int8_matmul` with torch, with the weights that the kernel rounds to bf16."""
    weight = _weights_in_float32(pieces, scales)[:, :in_features].bfloat16().float()
    return tiles_torch(x, weight, out_features, gated, eps, added, dtype)


def _multiply_by_library(
    x: Tensor, pieces: Tensor, scales: Tensor, out_features: int, in_features: int, gated: bool,
    eps: float | None, added: Tensor | None, dtype: torch.dtype,
) -> Callable:  # fmt: skip
    """Multiply by torch and cuBLAS in bfloat16."""
    weight = _weights_in_float32(pieces, scales)[: out_features * (1 + gated), :in_features]
    return partial(multiply_densely, x, weight.bfloat16(), gated, eps, added)


def _any_codes(pieces: Tensor) -> Tensor:
    """Return all codes, also that of -0."""
    return (torch.arange(pieces.numel(), device=pieces.device) * 37).to(torch.uint8).view_as(pieces)


def _draw(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    gated, size = rng.integer(2) == 1, PLANE * max(1, group_size // PLANE)
    k = -(-k // 8) * 8
    packed = rng.packed(n + n % 2, k, size, digits="all")
    if packed.remainder is not None and not packed.nibble:  # |z| is at most 127
        packed = packed._replace(remainder=(packed.remainder // 2).clamp(min=-63))
    weight = prepack_int8(packed, gated)
    x = rng.reals(1 + (m - 1) % MAX_TEXTS, k, dtype=torch.bfloat16).contiguous()
    added = rng.reals(len(x), weight.out_features).contiguous() if rng.integer(2) else None
    return x, *weight, rng.pick((None, 1e-6)), added, rng.dtype


int8_matmul_verification = Verification(
    INT8_MATMUL, int8_matmul_reference,
    shapes=((1, 34, 1000), (8, 9, 2088), (2, 6, 4136)),
    changed={"any codes": {"pieces": _any_codes}},
    gate=Gate(
        relative=1e-4,
        peer_slack=0.1,
        reason="the native loop rounds x to 16 bits; in bf16 the peer rounds weights, as GPUs do"
    ),
    draw=_draw, peer=_multiply_rounded_weights, needs_rows=False,
    library=_multiply_by_library,
)  # fmt: skip
