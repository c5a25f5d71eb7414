"""Verification of `arbcli.kernels.rows.table_rows`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.rows.table_rows import (
    gather_rows,
    scatter_rows_,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Timing, Verification, nothing


def gather_rows_reference(buffer: Tensor, rows: Tensor) -> Tensor:
    """Compute the reference result of `gather_rows`, one row at a time."""
    table = buffer.tolist()
    gathered = [table[v] if 0 <= v < len(table) else [0] * buffer.shape[1] for v in rows.tolist()]
    shape = (len(rows), buffer.shape[1])
    return torch.tensor(gathered, dtype=buffer.dtype, device=buffer.device).reshape(shape)


def scatter_rows_reference(buffer: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Compute the buffer after `scatter_rows_`, one row at a time."""
    for r, v in enumerate(rows.tolist()):
        if 0 <= v < len(buffer):
            buffer[v] = values[r]
    return buffer


def _draw(
    num_rows: int, num_bytes: int, generator: torch.Generator, dtype: torch.dtype = torch.int8
) -> Tensor:
    size = (num_rows, num_bytes)
    drawn = torch.randint(0, 256, size, generator=generator, device=generator.device)
    return drawn.to(torch.uint8).view(dtype)


TABLES = ((5_000_000, 64, 76), (5_000_000, 13, 76), (131_072, 1024, 8))
"""(V, bytes per row, V divided by the number of touched rows)."""


def _production_rows(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Draw (label, distant rows of a large table, these rows in random order).

    So the roofline counts the touched bytes, not the table.
    """
    for num_rows, num_bytes, apart in TABLES:
        buffer = _draw(num_rows, num_bytes, torch.Generator(device))[::apart]
        label = f"{len(buffer)} of {num_rows}x{num_bytes}"
        yield label, buffer, torch.randperm(len(buffer), device=device)


def _gather_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    for label, buffer, rows in _production_rows(device):
        peer = partial(torch.index_select, buffer, 0, rows)
        yield Timing(label, (buffer, rows), peer=peer)


def _scatter_timings(device: torch.device, _group_size: int) -> Iterator[Timing]:
    def run(*inputs: Tensor) -> tuple:
        scatter_rows_.triton(*inputs)
        return ()  # the inputs include the buffer

    for label, buffer, rows in _production_rows(device):
        num_rows, num_bytes = buffer.shape
        values = _draw(num_rows, num_bytes, torch.Generator(device))
        peer = partial(buffer.index_copy_, 0, rows, values)
        yield Timing(label, (buffer, rows, values), run=run, peer=peer)


_CHANGED: dict[str, dict[str, Any]] = {
    "far outside": {"rows": lambda x: torch.where(x % 3 == 0, (x - 1) << 40, x)},
    "empty table": {"buffer": nothing},
}
gather_rows_verification = Verification(
    gather_rows, gather_rows_reference,
    changed=_CHANGED | {"no rows": {"rows": nothing}, "no bytes": {"buffer": lambda x: x[:, :0]}},
    sizes={"V": "n", "B": "k", "R": "m"},
    timings=_gather_timings, values={"rows": (-1, "V")},
)  # fmt: skip


def _draw_scattered(rng: CaseGenerator, group_size: int, m: int, n: int, k: int) -> tuple:
    buffer, _ = gather_rows_verification.drawn(rng, group_size, m, n, k)
    rows = torch.randperm(n, generator=rng.generator, device=rng.device)[:m]
    rows = torch.where(rng.integers(0, 3, len(rows)) == 0, n, rows)  # a quarter is out of range
    limits = torch.iinfo(buffer.dtype)
    values = rng.integers(limits.min, limits.max, len(rows), k, dtype=buffer.dtype)
    return buffer, rng.view(rows), values


scatter_rows_verification = Verification(
    scatter_rows_, scatter_rows_reference,
    changed=_CHANGED | {
        "no rows": {"rows": nothing, "values": nothing},
        "no bytes": {"buffer": lambda x: x[:, :0], "values": lambda x: x[:, :0]},
    }, draw=_draw_scattered, needs_rows=True,
    timings=_scatter_timings,
)  # fmt: skip
