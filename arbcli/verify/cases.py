"""Drawn cases of a kernel: random ones, and matrices of production sizes.

Each is for a matrix of N outputs by K inputs and M rows of activations, from a generator that also
decides strides, offsets, types and states. A plain one leaves those plain.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Case, Verification

TILES = (16, 32, 64, 128, 160, 256, 320)
"""Boundaries of tiles, planes and blocks of weights."""
ROW_TILES = (8, 16, 32, 64, 128)
"""The same of rows of activations, which fused products take up to 64 of."""
LARGE_MATRIX = (11264, 2048)
"""(N, K) of the largest matrix of the preset `1b`."""
PRODUCTION_ROWS = (1, 64, 2048)


def random_cases(
    spec: Verification, device: torch.device, group_size: int, seeds: Iterable[int]
) -> Iterator[Case]:
    """Draw one random case of a kernel from each seed."""
    for seed in seeds:
        rng = CaseGenerator(seed, device)
        m, n, k = rng.near(ROW_TILES), rng.near(TILES), rng.near(TILES)
        if m * n < 64 or n * k < 64:  # so few sums can cancel to any relative error
            m, n, k = m + 64, n + 64, k + 5
        case = _draw(spec, f"seed {seed}: ", rng, group_size, m, n, k)
        # two rows of some matrix at a time, or about half of one
        chunk = rng.pick((None, 1, n * k // 2, m * k // 2))
        label = case.label if chunk is None else f"{case.label} by {chunk}"
        yield replace(case, label=label, chunk_elements=chunk)


def production_cases(
    spec: Verification,
    device: torch.device,
    group_size: int,
    shape: tuple[int, int] = LARGE_MATRIX,
) -> Iterator[Case]:
    """Draw cases of a kernel for a matrix (N, K) of a preset, and few and many rows."""
    for m in PRODUCTION_ROWS if spec.needs_rows else PRODUCTION_ROWS[:1]:
        rng = CaseGenerator(0, device, torch.bfloat16)
        yield _draw(spec, "", rng, group_size, m, *shape)


def _draw(
    spec: Verification, prefix: str, rng: CaseGenerator, group_size: int, m: int, n: int, k: int
) -> Case:
    inputs = spec.drawn(rng, group_size, m, n, k)
    size = f"{m}x{n}x{k}" if spec.needs_rows else f"{n}x{k}"
    low = rng.dtype == torch.bfloat16 and any(
        isinstance(value, Tensor) and value.is_floating_point() for value in inputs
    )
    return Case(f"{prefix}{size} bf16" if low else f"{prefix}{size}", inputs)
