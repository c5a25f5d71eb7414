"""References and random inputs for `arbcli.kernels.matmul.prepacked`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.matmul.prepacked import BLOCK, CODE_BYTES, COLUMNS, decode_prepacked, prepack
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.matmul.swizzled import multiply_densely, tiles_reference


def draw_prepacked(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    """Draw rows, a prepacked matrix, and the optional norm, gate and sum."""
    gated, size = rng.integer(2) == 1, PLANE * max(1, group_size // PLANE)
    n, k = n + n % 2, -(-k // 8) * 8
    weight = prepack(rng.packed(n, k, size, digits="trit"), gated)
    x = rng.reals(m, k, dtype=torch.bfloat16).contiguous()
    added = rng.reals(m, weight.out_features).contiguous() if rng.integer(2) else None
    return x, *weight, rng.pick((None, 1e-6)), added, rng.dtype


def prepacked_by_library(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool, eps: float | None,
    added: Tensor | None, dtype: torch.dtype,
) -> Callable:  # fmt: skip
    """Multiply by torch and cuBLAS in bfloat16."""
    weight = decode_prepacked(pieces)[: out_features * (1 + gated), :in_features].bfloat16()
    return partial(multiply_densely, x, weight, gated, eps, added)


def prepacked_reference(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool, eps: float | None,
    added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `row_matmul` and `prepacked_rows` in float64, one plane at a time."""
    tiles, blocks = pieces.shape[:2]
    codes = pieces[..., :CODE_BYTES].unflatten(2, (4, 8, 2, 2, 4))
    scales = pieces[..., CODE_BYTES:].contiguous().view(torch.bfloat16).unflatten(2, (8, 2, 4))
    weight = torch.zeros(tiles, 2, 8, BLOCK * blocks, dtype=torch.float64, device=x.device)
    for b in range(blocks):
        for i in range(4):
            for j in range(4):
                for q in range(2):
                    k = BLOCK * b + PLANE * i + 8 * j + 4 * q
                    trit = codes[:, b, j, :, q].long() // 4**i % 4 - 1  # (T, 8, 2, 4)
                    four = trit[..., COLUMNS] * scales[:, b, :, :, i, None].double()
                    weight[..., k : k + 4] = four.transpose(1, 2)
    return tiles_reference(x, weight[..., :in_features], out_features, gated, eps, added)


def prepacked_in_float64(
    x: Tensor, pieces: Tensor, out_features: int, in_features: int, gated: bool, eps: float | None,
    added: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute `prepacked_reference` for large matrices."""
    weight = decode_prepacked(pieces).double().view(len(pieces), 2, 8, -1)
    return tiles_reference(x, weight[..., :in_features], out_features, gated, eps, added)
