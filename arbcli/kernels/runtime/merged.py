"""Launches that wait for one another's like, and run as one: the same kernels on many matrices.

A kernel on a small matrix takes less time than its launch. So what would be launched for each of
many matrices is recorded first, and then the first launches of all of them run as one, then the
second ones, and so on. A program of such a launch finds in a table what its own launch would have
been given, and does what it would have done: not a bit of the results is another.
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
"""Compilers are told which addresses and integers this divides, and load words at once there."""
POINTERS = {
    getattr(torch, name): getattr(tl, name)
    for name in ("uint8", "int8", "int32", "int64", "bfloat16", "float32", "float64")
    if HAS_TRITON
}
"""Element type of a pointer in the table, by the dtype of its tensor."""


class Launch(NamedTuple):
    """One launch, of a kernel whose constants come last, on a grid of one axis."""

    kernel: Any
    programs: int
    arguments: tuple
    constants: tuple
    options: tuple[tuple[str, Any], ...]
    """How it is compiled: warps, fusion."""

    @property
    def kind(self) -> tuple:
        """Properties that launches must share to be merged."""
        types = tuple(x.dtype if isinstance(x, Tensor) else type(x) for x in self.arguments)
        return id(self.kernel), types, self.constants, self.options


class Table(NamedTuple):
    """Where a merged launch finds the arguments that differ between its parts."""

    columns: list[list[int]]
    """Integers by part, the first one its programs."""
    shared: tuple
    """Arguments that are the same for all parts."""
    plan: tuple
    """Of each argument how it is read, what it points to, and its column or place of `shared`."""


@triton.jit
def _merged_kernel(
    table_ptr, shared, constants, KERNEL: tl.constexpr, WIDTH: tl.constexpr,
    HOW: tl.constexpr, TYPES: tl.constexpr, WHERE: tl.constexpr,
):  # fmt: skip
    """Run one program of a part: gather its arguments, and do what the kernel does with them."""
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
    """Do what several functions do, with launches of the same kernel as one.

    A function may launch kernels on grids of one axis whose first parameters are not constants. It
    must compute nothing else of what they write, as they run when all functions have returned, and
    nothing that another function's kernels write.

    Args:
        parts: functions.
        device: of the tensors.
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
    """Put what differs between launches into columns."""
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
    """Write an argument as an integer: an address, a number, or the bits of a float32."""
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
    """Put integers where the host need not wait until `device` has them."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host


class Tables:
    """Brings tables to the device."""

    def __init__(self) -> None:
        self.brought = 0
        """Integers that were brought so far."""
        self._room: Tensor | None = None
        self._numbers: list[int] = []

    def bring(self, numbers: list[int], device: torch.device) -> Tensor:
        """Bring integers to the device; of launches that are captured, only find them a place.

        Raises:
            RuntimeError: more are captured than there is room for.
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
        """Keep the tables of launches that are captured inside, and write them at the end.

        A graph reuses its own memory, and what is written to it once would be lost, so the tables
        are outside of it. Its addresses never change.

        Args:
            numbers: integers that there will be, at most.
            device: where they are to be.

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
"""One for all: launches follow one another."""
