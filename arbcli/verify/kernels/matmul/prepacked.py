"""References and random inputs for `arbcli.kernels.matmul.prepacked`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.codec.decode_weight import decode_weight
from arbcli.kernels.codec.layout import PLANE
from arbcli.kernels.matmul.prepacked import (
    BLOCK,
    CODE_BYTES,
    COLUMNS,
    Prepacked,
    decode_prepacked,
    prepack,
)
from arbcli.kernels.runtime.arguments import TensorOptions, dtype_name
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.kernels.codec.packed import random_packed
from arbcli.verify.kernels.matmul.swizzled import multiply_densely, tiles_reference
from arbcli.verify.verification import Case, Timing


def draw_prepacked(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    """Draw rows, a prepacked matrix, and the optional norm, gate and sum."""
    gated, size = rng.below(2) == 1, PLANE * max(1, group_size // PLANE)
    n, k = n + n % 2, -(-k // 8) * 8
    weight = prepack(rng.packed(n, k, size, digits="trit"), gated)
    x = rng.reals(m, k, dtype=torch.bfloat16).contiguous()
    added = rng.reals(m, weight.out_features).contiguous() if rng.below(2) else None
    return x, *weight, rng.pick((None, 1e-6)), added, rng.dtype


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


def prepack_drawn(
    rows: int, in_features: int, group_size: int, gated: bool, generator: torch.Generator
) -> Prepacked:
    """Draw a prepacked matrix."""
    return prepack(random_packed(rows, in_features, group_size, generator, spread=8), gated)


def prepacked_cases(
    shapes: Sequence[tuple], device: torch.device, _group_size: int, *,
    draw: Callable[..., Any] = prepack_drawn,
) -> Iterator[Case]:  # fmt: skip
    """Draw the cases of a kernel for prepacked matrices.

    Args:
        shapes: (M, rows, K, G, gated, eps, with `added`) of each case.
        device: device of the tensors.
        draw: function of (rows, K, G, gated, generator) that returns a prepacked matrix.
    """
    generator = torch.Generator().manual_seed(0)
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    for m, rows, in_features, group_size, gated, eps, adds in shapes:
        weight = draw(rows, in_features, group_size, gated, generator)
        x = torch.randn(m, in_features, generator=generator)
        x *= 2.0 ** torch.randint(-3, 4, x.shape, generator=generator)
        added = torch.randn(m, weight.out_features, generator=generator)
        parts = [part.to(device) if isinstance(part, Tensor) else part for part in weight]
        for dtype in dtypes:  # the tolerance of bf16 results is coarser
            label = f"{m}x{rows}x{in_features}{' gate' * gated}{' norm' * (eps is not None)}"
            yield Case(
                f"{label}{' sum' * adds} {dtype_name(dtype)}",
                (x.to(device, torch.bfloat16), *parts, eps,
                 added.to(device, dtype) if adds else None, dtype),
            )  # fmt: skip


def prepacked_timings(
    shapes: Sequence[tuple], device: torch.device, _group_size: int
) -> Iterator[Timing]:
    """Draw the timings of a kernel for prepacked matrices; shapes are (M, rows, K, gated)."""
    generator = torch.Generator(device)
    half: TensorOptions = {"device": device, "dtype": torch.bfloat16}
    for m, rows, in_features, gated in shapes:
        packed = random_packed(rows, in_features, 32, generator, spread=8)
        weight = prepack(packed, gated)
        x, added = torch.randn(m, in_features, **half), torch.randn(m, weight.out_features, **half)
        yield Timing(
            f"{m}x{rows}x{in_features}{' gate' * gated}",
            (x, *weight, 1e-6, added, x.dtype),
            peer=partial(multiply_densely, x, decode_weight(packed), gated, added),
            peer_name="torch and cuBLAS bf16",
            flops=2 * m * rows * in_features,
        )
