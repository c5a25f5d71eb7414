"""Drawn cases of a kernel: random ones, and matrices of production sizes.

Each is for a matrix of N outputs by K inputs and M rows of activations, from a generator that also
decides strides, offsets, types and states. A plain one leaves those plain.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from arbcli.verify.verification import ROW_TILES, TILES, Case, CaseGenerator, Verification

LARGE_MATRIX = (11264, 2048)
"""(N, K) of the largest matrix of the preset `1b`."""
PRODUCTION_ROWS = (1, 64, 2048)


def random_cases(
    spec: Verification, device: torch.device, group_size: int, seeds: Iterable[int]
) -> Iterator[Case]:
    """Draw one random case of a kernel from each seed."""
    for seed in seeds:
        rng = CaseGenerator(seed, device)
        m, n, k = rng.sizes(ROW_TILES, TILES, TILES)
        case = spec.drawn_case(f"seed {seed}: ", rng, group_size, m, n, k)
        # two rows of some matrix at a time, or about half of one
        chunk = rng.pick((None, 1, n * k // 2, m * k // 2))
        label = case.label if chunk is None else f"{case.label} by {chunk}"
        yield replace(case, label=label, chunk_elements=chunk)


def production_cases(
    spec: Verification, device: torch.device, group_size: int, shape: tuple[int, int] = LARGE_MATRIX
) -> Iterator[Case]:
    """Draw cases of a kernel for a matrix (N, K) of a preset, and few and many rows."""
    for m in PRODUCTION_ROWS if spec.needs_rows else PRODUCTION_ROWS[:1]:
        yield spec.drawn_case("", CaseGenerator(0, device, torch.bfloat16), group_size, m, *shape)
