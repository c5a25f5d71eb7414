"""Horizontal fusion of launches: the same kernels on many matrices run as one launch.

A kernel on a small matrix takes less time than its launch. So the launches for each of many
matrices are recorded first. Then the first launches of all matrices run as one launch, then the
second ones, and so on. A program of a merged launch reads the arguments of its part from a table
and runs the original kernel, so results have the same bits.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbcli.kernels.runtime._triton import HAS_TRITON, tl, triton
from arbcli.kernels.runtime.launches import replaced_launches

ALIGNMENT = 16
"""Divisibility of addresses and integers that compilers specialise on."""
POINTERS = {
    getattr(torch, name): getattr(tl, name)
    for name in ("uint8", "int8", "int32", "int64", "bfloat16", "float32", "float64")
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


@triton.jit
def _merged_kernel(
    table_ptr, shared, constants, KERNEL: tl.constexpr, WIDTH: tl.constexpr,
    HOW: tl.constexpr, TYPES: tl.constexpr, WHERE: tl.constexpr,
):  # fmt: skip
    """Run one program of a part: load its arguments and call the kernel."""
    row = table_ptr + tl.program_id(1) * WIDTH
    if tl.program_id(0) >= tl.load(row):
        return
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


def merge_launches(parts: Iterable[Callable[[], None]], device: torch.device) -> None:
    """Run several functions with their launches of the same kernels merged.

    A function may launch kernels on grids of one axis whose first parameters are not constants. It
    must compute nothing else of what they write, as they run when all functions have returned, and
    nothing that another function's kernels write.

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
    waves: list[list[Launch]] = []
    for turn in range(max(map(len, recorded), default=0)):
        kinds: dict[tuple, list[Launch]] = {}
        for launches in recorded:
            if turn < len(launches):
                kinds.setdefault(launches[turn].kind, []).append(launches[turn])
        waves += kinds.values()
    tables = [_tabulated(wave) for wave in waves]
    flat = [number for table in tables for row in table.columns for number in row]
    on_device, begin = TABLES.bring(flat, device), 0
    for wave, table in zip(waves, tables, strict=True):
        end = begin + sum(map(len, table.columns))
        _launch(wave, table, on_device[begin:end])
        begin = end


def _described(kernel: Any, grid: tuple[int, ...], args: tuple, kwargs: dict[str, Any]) -> Launch:
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constant = [name for name in kernel.arg_names if name in _constant_names(kernel)]
    varying = [name for name in kernel.arg_names if name not in constant]
    if len(grid) != 1 or [*kernel.arg_names] != varying + constant:
        raise ValueError(f"{kernel.__name__} cannot be merged: a grid of one axis, constants last")
    options = {name: value for name, value in given.items() if name not in kernel.arg_names}
    return Launch(
        kernel,
        grid[0],
        tuple(given[name] for name in varying),
        tuple(given[name] for name in constant),
        tuple(sorted(options.items())),
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


def _launch(wave: list[Launch], table: Table, on_device: Tensor) -> None:
    if len(wave) == 1:
        (launch,) = wave
        options = dict(launch.options)
        launch.kernel[(launch.programs,)](*launch.arguments, *launch.constants, **options)
        return
    how, types, where = zip(*table.plan, strict=True)
    _merged_kernel[(max(launch.programs for launch in wave), len(wave))](
        on_device, table.shared, tuple(map(tl.constexpr, wave[0].constants)),
        KERNEL=wave[0].kernel, WIDTH=len(table.columns[0]), HOW=how, TYPES=types, WHERE=where,
        **dict(wave[0].options),
    )  # fmt: skip


def _on_host(numbers: list[int], device: torch.device) -> Tensor:
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
        """Copy integers to the device; for captured launches, only reserve memory.

        Raises:
            RuntimeError: captured integers exceed the reserved memory.
        """
        self.brought += len(numbers)
        if self._room is None:
            return _on_host(numbers, device).to(device, non_blocking=True)
        begin = len(self._numbers)
        self._numbers += numbers
        if len(self._numbers) > len(self._room):
            raise RuntimeError("a captured step merges more launches than the step before it")
        return self._room[begin : begin + len(numbers)]

    @contextmanager
    def captured(self, numbers: int, device: torch.device) -> Iterator[Tensor]:
        """Keep the tables of launches captured inside the context, and write them at its end.

        A graph reuses its own memory, and data written to it once would be lost, so the tables
        are outside of it. Its addresses never change.

        Args:
            numbers: maximum number of integers.
            device: device of the tables.

        Yields:
            The tables, which must live as long as the graph.
        """
        self._room = room = torch.zeros(numbers, dtype=torch.int64, device=device)
        self._numbers = []
        try:
            yield room
            written = _on_host(self._numbers, device)
            room[: len(written)].copy_(written, non_blocking=True)
        finally:
            self._room = None


TABLES = Tables()
"""Shared instance: launches are sequential."""
