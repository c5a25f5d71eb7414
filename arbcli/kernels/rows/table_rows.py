"""Copy rows of an int8 or uint8 table to a compact matrix, and write them back in place.

A step that touches few rows of a large table works on a compact matrix of these rows. The kernels
copy bytes. Out-of-range row indices read zeros and are not written, so lists of rows can be padded.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from arbcli.kernels.dice import Dice
from arbcli.kernels.runtime._triton import tl, triton
from arbcli.kernels.runtime.arguments import INT64, Array
from arbcli.kernels.runtime.operation import Case, Operation, Timing


def gather_rows_reference(buffer: Tensor, rows: Tensor) -> Tensor:
    """Compute the reference result of `gather_rows`, one row at a time."""
    table = buffer.tolist()
    found = [table[v] if 0 <= v < len(table) else [0] * buffer.shape[1] for v in rows.tolist()]
    shape = (len(rows), buffer.shape[1])
    return torch.tensor(found, dtype=buffer.dtype, device=buffer.device).reshape(shape)


def scatter_rows_reference(buffer: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Compute the buffer after `scatter_rows_`, one row at a time."""
    for r, v in enumerate(rows.tolist()):
        if 0 <= v < len(buffer):
            buffer[v] = values[r]
    return buffer


def _gather_rows_torch(buffer: Tensor, rows: Tensor) -> Tensor:
    num_rows = len(buffer)
    if num_rows == 0:
        return buffer.new_zeros(len(rows), buffer.shape[1])
    outside = (rows < 0) | (rows >= num_rows)
    found = buffer.index_select(0, rows.clamp(0, num_rows - 1))
    return found.masked_fill_(outside[:, None], 0)


def _scatter_rows_torch(buffer: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    inside = (rows >= 0) & (rows < len(buffer))
    return buffer.index_copy_(0, rows[inside], values[inside])


@triton.jit
def _gather_rows_kernel(
    buffer_ptr, rows_ptr, values_ptr,
    R, V, B,
    stride_r, stride_bv, stride_bb,
    BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    offs_r = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    offs_b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
    mask_r = offs_r < R
    v = tl.load(rows_ptr + offs_r * stride_r, mask=mask_r, other=-1)  # [BLOCK_R, 1] int64
    inside = (v >= 0) & (v < V)
    buffer_ptrs = buffer_ptr + v * stride_bv + offs_b.to(tl.int64) * stride_bb
    byte = tl.load(buffer_ptrs, mask=inside & (offs_b < B), other=0)  # [BLOCK_R, BLOCK_B]
    tl.store(values_ptr + offs_r * B + offs_b, byte, mask=mask_r & (offs_b < B))


@triton.jit
def _scatter_rows_kernel(
    buffer_ptr, rows_ptr, values_ptr,
    R, V, B,
    stride_r, stride_bv, stride_bb, stride_vr, stride_vb,
    BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    offs_r = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    offs_b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
    v = tl.load(rows_ptr + offs_r * stride_r, mask=offs_r < R, other=-1)  # [BLOCK_R, 1] int64
    mask = (v >= 0) & (v < V) & (offs_b < B)
    columns = offs_b.to(tl.int64)
    byte = tl.load(values_ptr + offs_r * stride_vr + columns * stride_vb, mask=mask, other=0)
    tl.store(buffer_ptr + v * stride_bv + columns * stride_bb, byte, mask=mask)


def _tiles(num_rows: int, num_bytes: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Choose the programs and tiles that cover (num_rows, num_bytes)."""
    block_b = min(256, triton.next_power_of_2(num_bytes))
    block_r = min(128, 2048 // block_b)
    grid = (triton.cdiv(num_rows, block_r), triton.cdiv(num_bytes, block_b))
    return grid, {"BLOCK_R": block_r, "BLOCK_B": block_b}


def _gather_rows_triton(buffer: Tensor, rows: Tensor) -> Tensor:
    (num_rows, num_bytes), count = buffer.shape, len(rows)
    values = torch.empty(count, num_bytes, dtype=buffer.dtype, device=buffer.device)
    if values.numel():
        grid, blocks = _tiles(count, num_bytes)
        _gather_rows_kernel[grid](
            buffer, rows, values, count, num_rows, num_bytes, rows.stride(0), *buffer.stride(),
            **blocks,
        )  # fmt: skip
    return values


def _scatter_rows_triton(buffer: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    (num_rows, num_bytes), count = buffer.shape, len(rows)
    if values.numel():
        grid, blocks = _tiles(count, num_bytes)
        _scatter_rows_kernel[grid](
            buffer, rows, values, count, num_rows, num_bytes, rows.stride(0), *buffer.stride(),
            *values.stride(), **blocks,
        )  # fmt: skip
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
        _scatter_rows_triton(*inputs)
        return ()  # the inputs include the buffer

    for label, buffer, rows in _production_rows(device):
        num_rows, num_bytes = buffer.shape
        values = _draw(num_rows, num_bytes, torch.Generator(device))
        peer = partial(buffer.index_copy_, 0, rows, values)
        yield Timing(label, (buffer, rows, values), run=run, peer=peer)


_BUFFER = Array("V, B", (torch.int8, torch.uint8))

gather_rows = Operation(
    "gather_rows",
    _gather_rows_triton,
    _gather_rows_torch,
    gather_rows_reference,
    _gather_cases,
    arguments={"buffer": _BUFFER, "rows": Array("R", INT64, values=(-1, "V"))},
    sizes={"V": "n", "B": "k", "R": "m"},
    timings=_gather_timings,
)
"""Copy rows of a table.

Args:
    buffer: (V, B) int8 or uint8, any strides.
    rows: (R,) int64; may repeat.

Returns:
    (R, B) of the buffer's dtype, contiguous; zeros where rows[r] is outside 0..V-1.
"""


def _draw_scattered(dice: Dice, group_size: int, m: int, n: int, k: int) -> tuple:
    buffer, _ = gather_rows.drawn(dice, group_size, m, n, k)
    rows = torch.randperm(n, generator=dice.generator, device=dice.device)[:m]
    rows = torch.where(dice.integers(0, 3, len(rows)) == 0, n, rows)  # a quarter is out of range
    limits = torch.iinfo(buffer.dtype)
    values = dice.integers(limits.min, limits.max, len(rows), k, dtype=buffer.dtype)
    return buffer, dice.view(rows), values


scatter_rows_ = Operation(
    "scatter_rows", _scatter_rows_triton, _scatter_rows_torch, scatter_rows_reference,
    _scatter_cases,
    arguments={
        "buffer": _BUFFER, "rows": Array("R", INT64), "values": Array("R, B", _BUFFER.dtypes)
    },
    where=("values.dtype == buffer.dtype",), draw=_draw_scattered, needs_rows=True,
    timings=_scatter_timings,
)  # fmt: skip
"""Write rows of a table in place.

Args:
    buffer: (V, B) int8 or uint8, any strides.
    rows: (R,) int64; indices in 0..V-1 are distinct, others are ignored.
    values: (R, B) of the buffer's dtype, any strides.

Returns:
    `buffer`.
"""
