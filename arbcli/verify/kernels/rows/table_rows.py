"""Verification of `arbcli.kernels.rows.table_rows`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from arbcli.kernels.rows.table_rows import gather_rows, scatter_rows_
from arbcli.verify.verification import CaseGenerator, Verification, no_rows


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


TABLES = ((5_000_000, 64, 76), (5_000_000, 13, 76), (131_072, 1024, 8))
"""(V, bytes per row, V divided by the number of touched rows)."""


_CHANGED: dict[str, dict[str, Any]] = {
    "far outside": {"rows": lambda x: torch.where(x % 3 == 0, (x - 1) << 40, x)},
    "empty table": {"buffer": no_rows},
}
gather_rows_verification = Verification(
    gather_rows, gather_rows_reference,
    changed=_CHANGED | {"no rows": {"rows": no_rows}, "no bytes": {"buffer": lambda x: x[:, :0]}},
    sizes={"V": "n", "B": "k", "R": "m"},
    library=lambda buffer, rows: partial(
        torch.index_select, buffer, 0, rows.clamp(0, len(buffer) - 1)
    ),
    looked_up="buffer", values={"rows": (-1, "V")},
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
        "no rows": {"rows": no_rows, "values": no_rows},
        "no bytes": {"buffer": lambda x: x[:, :0], "values": lambda x: x[:, :0]},
    }, draw=_draw_scattered, needs_rows=True, looked_up="buffer",
)  # fmt: skip
