"""Horizontal fusion of launches: the same kernels on many matrices run as one launch.

A kernel on a small matrix takes less time than its launch. So the launches for each of many
matrices are recorded first. Then the first launches of all matrices run as one launch, then the
second ones, and so on. A program of a merged launch reads the arguments of its part from a table
and runs the original kernel, so results have the same bits. Launches of two kinds, such as those of
another dtype, run as one launch too: its kernel has the code of both.
"""

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import HAS_TRITON, replaced_launches, tl, triton

ALIGNMENT = 16
"""Divisibility of addresses and integers that compilers specialise on."""
POINTERS = {
    getattr(torch, name): getattr(tl, name)
    for name in ("uint8", "int8", "int16", "int32", "int64", "bfloat16", "float32", "float64")
    if HAS_TRITON
}
"""Triton element type of pointers in the table, by dtype of the tensor."""


class Launch(NamedTuple):
    """A recorded launch of a kernel with trailing constants, on a one-dimensional grid."""

    kernel: Any
    programs: int
    arguments: tuple
    constants: tuple
    options: tuple[tuple[str, Any], ...]
    """Compile options, such as the number of warps."""
    pairs: bool = True
    """Whether it may run in one launch with another kind: PTX declares names of a kernel once."""

    @property
    def kind(self) -> tuple:
        """Properties that launches must share to be merged."""
        types = tuple(x.dtype if isinstance(x, Tensor) else type(x) for x in self.arguments)
        return id(self.kernel), types, self.constants, self.options


class Table(NamedTuple):
    """Table of the arguments that differ between the parts of a merged launch."""

    columns: list[list[int]]
    """Integers per part; the first one is its number of programs."""
    shared: tuple
    """Arguments that are the same for all parts."""
    plan: tuple
    """How each argument is read, its element type, and its column or its index in `shared`."""


Arguments: TypeAlias = tuple[list[Launch], Table, Tensor]
"""Launches of one kind, the table of their arguments, and its numbers on the device."""


@triton.jit
def _run(
    row, shared, constants, KERNEL: tl.constexpr, HOW: tl.constexpr, TYPES: tl.constexpr,
    WHERE: tl.constexpr,
):  # fmt: skip
    """Run one program of a part: load its arguments from a row of the table and call the kernel."""
    arguments = ()
    for i in tl.static_range(len(HOW)):
        if HOW[i] == "shared":
            arguments = arguments + (shared[WHERE[i]],)  # noqa: RUF005 (triton knows no star)
        elif HOW[i] == "integer":
            value = tl.load(row + WHERE[i]).to(tl.int32)
            arguments = arguments + (value,)  # noqa: RUF005
        elif HOW[i] == "multiple":
            value = tl.multiple_of(tl.load(row + WHERE[i]).to(tl.int32), 16)
            arguments = arguments + (value,)  # noqa: RUF005
        elif HOW[i] == "float":
            value = tl.load(row + WHERE[i]).to(tl.int32).to(tl.float32, bitcast=True)
            arguments = arguments + (value,)  # noqa: RUF005
        elif HOW[i] == "aligned":
            value = tl.load(row + WHERE[i]).to(tl.pointer_type(TYPES[i]))
            arguments = arguments + (tl.multiple_of(value, 16),)  # noqa: RUF005
        else:
            value = tl.load(row + WHERE[i]).to(tl.pointer_type(TYPES[i]))
            arguments = arguments + (value,)  # noqa: RUF005
    KERNEL(*arguments, *constants)


@triton.jit
def _merged_kernel(
    table_ptr, shared, constants, KERNEL: tl.constexpr, WIDTH: tl.constexpr,
    HOW: tl.constexpr, TYPES: tl.constexpr, WHERE: tl.constexpr,
):  # fmt: skip
    """Run one program of a part."""
    row = table_ptr + tl.program_id(1) * WIDTH
    if tl.program_id(0) >= tl.load(row):
        return
    _run(row, shared, constants, KERNEL, HOW, TYPES, WHERE)


@triton.jit
def _paired_kernel(
    table_ptr, shared, constants, second_table_ptr, second_shared, second_constants, parts,
    KERNEL: tl.constexpr, WIDTH: tl.constexpr, HOW: tl.constexpr, TYPES: tl.constexpr,
    WHERE: tl.constexpr, SECOND: tl.constexpr, SECOND_WIDTH: tl.constexpr,
    SECOND_HOW: tl.constexpr, SECOND_TYPES: tl.constexpr, SECOND_WHERE: tl.constexpr,
):  # fmt: skip
    """Run one program of a part of one of two kinds; the first kind has the first `parts`."""
    part = tl.program_id(1)
    if part < parts:
        row = table_ptr + part * WIDTH
        if tl.program_id(0) < tl.load(row):
            _run(row, shared, constants, KERNEL, HOW, TYPES, WHERE)
    else:
        row = second_table_ptr + (part - parts) * SECOND_WIDTH
        if tl.program_id(0) < tl.load(row):
            _run(
                row, second_shared, second_constants, SECOND, SECOND_HOW, SECOND_TYPES,
                SECOND_WHERE,
            )  # fmt: skip


def merge_launches(parts: Iterable[Callable[[], None]], device: torch.device) -> None:
    """Run several functions with their launches of the same kernels merged.

    A function may launch kernels on grids of one axis whose first parameters are not constants. It
    must not read their results, as the kernels run when all functions have returned. Its kernels
    must not read the results of another function's kernels.

    Args:
        parts: functions that launch the kernels.
        device: device of the tensors.
    """
    recorded: list[list[Launch]] = []

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        recorded[-1].append(_described(kernel, grid, args, kwargs))

    with replaced_launches(record):
        for part in parts:
            recorded.append([])
            part()
    groups = [*_groups(recorded)]
    tables = [[_tabulated(wave) for wave in group] for group in groups]
    all_tables = [table for group_tables in tables for table in group_tables]
    flat = [number for table in all_tables for row in table.columns for number in row]
    sizes = (sum(map(len, table.columns)) for table in all_tables)
    device_tables = iter(TABLES.bring(flat, device).split([*sizes]))
    for group, group_tables in zip(groups, tables, strict=True):
        _launch(*zip(group, group_tables, device_tables, strict=False))


def _groups(recorded: list[list[Launch]]) -> Iterator[list[list[Launch]]]:
    """Yield the launches to make, in order: one or two kinds each, and the parts of a kind.

    Args:
        recorded: launches of each function.
    """
    for turn in itertools.zip_longest(*recorded):
        kinds: dict[tuple, list[Launch]] = {}
        for launch in turn:
            if launch is not None:
                kinds.setdefault(launch.kind, []).append(launch)
        alike: dict[tuple, list[list[Launch]]] = {}
        for wave in kinds.values():
            first = wave[0]
            if first.pairs:
                alike.setdefault(first.options, []).append(wave)
            else:
                yield [wave]
        for waves in alike.values():
            yield from (waves[i : i + 2] for i in range(0, len(waves), 2))


def _described(kernel: Any, grid: tuple[int, ...], args: tuple, kwargs: dict[str, Any]) -> Launch:
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constant = [name for name in kernel.arg_names if name in _constant_names(kernel)]
    varying = [name for name in kernel.arg_names if name not in constant]
    if len(grid) != 1 or [*kernel.arg_names] != varying + constant:
        raise ValueError(f"{kernel.__name__} cannot be merged: a grid of one axis, constants last")
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
    return Launch(
        kernel,
        grid[0],
        tuple(arguments[name] for name in varying),
        tuple(arguments[name] for name in constant),
        tuple(sorted(options.items())),
        not arguments.get("PTX"),
    )


def _constant_names(kernel: Any) -> set[str]:
    annotations = kernel.fn.__annotations__
    return {name for name, kind in annotations.items() if kind in (tl.constexpr, "tl.constexpr")}


def _tabulated(wave: list[Launch]) -> Table:
    """Build the table columns of arguments that differ between launches."""
    columns = [[launch.programs for launch in wave]]
    shared: list[Any] = []
    plan: list[tuple[str, Any, int]] = []
    for values in zip(*(launch.arguments for launch in wave), strict=True):
        numbers = [*map(_as_integer, values)]
        if len(set(numbers)) == 1:
            plan.append(("shared", None, len(shared)))
            shared.append(values[0])
            continue
        aligned = all(number % ALIGNMENT == 0 for number in numbers)
        points_to = None
        if isinstance(values[0], Tensor):
            how, points_to = "aligned" if aligned else "pointer", POINTERS[values[0].dtype]
        elif isinstance(values[0], float):
            how = "float"
        else:
            how = "multiple" if aligned else "integer"
        plan.append((how, points_to, len(columns)))
        columns.append(numbers)
    return Table([*map(list, zip(*columns, strict=True))], tuple(shared), tuple(plan))


def _as_integer(value: Any) -> int:
    """Encode an argument as an integer: an address, a number, or the bits of a float32."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return struct.unpack("<i", struct.pack("<f", value))[0]
    return value


def _launch(first: Arguments, second: Arguments | None = None) -> None:
    """Launch a kind, or two kinds with the same options of the compiler."""
    wave, table, device_tables = first
    programs, options = max(launch.programs for launch in wave), dict(wave[0].options)
    if second is None and len(wave) == 1:
        (launch,) = wave
        launch.kernel[(launch.programs,)](*launch.arguments, *launch.constants, **options)
        return
    table_options = {"KERNEL": wave[0].kernel, "WIDTH": len(table.columns[0]), **_read(table)}
    constants = tuple(map(tl.constexpr, wave[0].constants))
    if second is None:
        grid = programs, len(wave)
        _merged_kernel[grid](device_tables, table.shared, constants, **table_options, **options)
        return
    other, their_table, theirs = second
    grid = max(programs, *(launch.programs for launch in other)), len(wave) + len(other)
    table_options |= {"SECOND": other[0].kernel, "SECOND_WIDTH": len(their_table.columns[0])}
    table_options |= {f"SECOND_{name}": value for name, value in _read(their_table).items()}
    their_constants = tuple(map(tl.constexpr, other[0].constants))
    _paired_kernel[grid](
        device_tables, table.shared, constants, theirs, their_table.shared, their_constants,
        len(wave), **table_options, **options,
    )  # fmt: skip


def _read(table: Table) -> dict[str, tuple]:
    """Return how a kernel reads the arguments of a table."""
    return dict(zip(("HOW", "TYPES", "WHERE"), zip(*table.plan, strict=True), strict=True))


def _pinned(numbers: list[int], device: torch.device) -> Tensor:
    """Copy integers to memory from which `device` can read without a wait of the host."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host


class Tables:
    """Copies tables to the device."""

    def __init__(self) -> None:
        self.brought = 0
        """Integers that have been copied so far."""
        self._room: Tensor | None = None
        self._numbers: list[int] = []

    def bring(self, numbers: list[int], device: torch.device) -> Tensor:
        """Copy integers to the device, (numbers,) int64; for captured launches, only reserve room.

        Raises:
            RuntimeError: captured integers exceed the reserved memory.
        """
        self.brought += len(numbers)
        if self._room is None:
            return _pinned(numbers, device).to(device, non_blocking=True)
        begin = len(self._numbers)
        self._numbers += numbers
        if len(self._numbers) > len(self._room):
            raise RuntimeError("a captured step merges more launches than the step before it")
        return self._room[begin : begin + len(numbers)]

    @contextmanager
    def captured(self, numbers: int, device: torch.device) -> Iterator[Tensor]:
        """Keep the tables of launches captured inside the context, and write them at its end.

        A graph reuses its own memory, and data written to it once would be lost, so the tables
        are outside of it. Their addresses never change.

        Args:
            numbers: maximum number of integers.
            device: device of the tables.

        Yields:
            The tables, (numbers,) int64, which must live as long as the graph.
        """
        self._room = room = torch.zeros(numbers, dtype=torch.int64, device=device)
        self._numbers = []
        try:
            yield room
            written = _pinned(self._numbers, device)
            room[: len(written)].copy_(written, non_blocking=True)
        finally:
            self._room = None


TABLES = Tables()
"""Shared instance: launches are sequential."""
