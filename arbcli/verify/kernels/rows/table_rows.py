"""Verification of `arbcli.kernels.rows.table_rows`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.rows.table_rows import (
    gather_rows,
    scatter_rows_,
)
from arbcli.verify.case_generator import CaseGenerator
from arbcli.verify.verification import Case, Timing, Verification


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


def _distinct_cases(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Draw (label, buffer, rows) with awkward layouts and indices; rows in range are distinct."""
    generator = torch.Generator().manual_seed(0)

    def case(label: str, buffer: Tensor, rows: list[int]) -> tuple[str, Tensor, Tensor]:
        shape = "x".join(map(str, buffer.shape))
        return f"{len(rows)} of {shape} {label}", buffer.to(device), torch.tensor(rows).to(device)

    yield case("uint8", _draw(9, 13, generator, torch.uint8), [8, 0, 3])
    yield case("ragged", _draw(7, 323, generator), [5, 6])
    yield case("one byte", _draw(200, 1, generator), [*range(199, 0, -1)])
    yield case("outside", _draw(5, 33, generator), [4, -1, 5, 5, 2, 1 << 40, -(1 << 40)])
    yield case("none inside", _draw(4, 64, generator), [4] * 3)
    yield case("rows strided", _draw(18, 66, generator).to(device)[1::2], [0, 8, 4])
    yield case("columns strided", _draw(6, 66, generator).to(device)[:, ::2], [5, 1])
    yield case("transposed", _draw(40, 7, generator).to(device).T, [2, 6, 0])
    _, buffer, rows = case("", _draw(9, 40, generator), [7, 1, 3, 2, 0, 8])
    yield "3 of 9x40 rows taken of every other", buffer, rows[::2]
    yield "0 of 9x40 no rows", buffer, rows[:0]
    yield "6 of 0x40 empty table", buffer[:0], rows
    yield "6 of 9x0 no bytes", buffer[:, :0], rows


def _gather_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    for label, buffer, rows in _distinct_cases(device):
        yield Case(label, (buffer, rows))
    buffer = _draw(9, 40, torch.Generator().manual_seed(1)).to(device)
    rows = torch.tensor([3, 3, 0, 3], device=device)
    yield Case("4 of 9x40 duplicates", (buffer, rows))


def _scatter_cases(device: torch.device, _group_size: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for label, buffer, rows in _distinct_cases(device):
        values = _draw(len(rows), buffer.shape[1], generator, buffer.dtype)
        yield Case(label, (buffer, rows, values.to(device)))
    values = _draw(64, 6, generator).to(device).T[::2]
    rows = torch.tensor([2, -1, 0], device=device)
    yield Case("3 of 5x64 strided values", (_draw(5, 64, generator).to(device), rows, values))


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


gather_rows_verification = Verification(
    gather_rows, gather_rows_reference, _gather_cases, sizes={"V": "n", "B": "k", "R": "m"},
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
    scatter_rows_, scatter_rows_reference, _scatter_cases, draw=_draw_scattered, needs_rows=True,
    timings=_scatter_timings,
)  # fmt: skip
