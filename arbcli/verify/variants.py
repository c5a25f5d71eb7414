"""Read off a launch what Triton compiles for it: types, constants, and facts about arguments."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from arbcli.kernels.runtime._triton import TensorDescriptor, replaced_launches, tl, triton
from arbcli.kernels.runtime.arguments import dtype_name


class Launch(NamedTuple):
    """Launch that a launcher asked for."""

    function: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    """Arguments that it is compiled for: those declared so, and None."""
    options: dict[str, Any]
    """How it is compiled: warps, registers."""


class Variant(NamedTuple):
    """One compilation: a function with the types, constants and facts about its arguments."""

    function: Any
    signature: dict[str, str | tuple]
    constants: dict[str, Any]
    multiples: list[tuple[int, ...]]
    """Paths of arguments that are multiples of 16, or have such addresses."""
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """All that the compilation depends on; variants with the same key are compiled once."""
        return str((self.function.fn.__name__, *self[1:]))


def variant_of(launch: Launch, *, generally: bool = False) -> Variant:
    """Return the variant of a kernel, or of the `general` one, that a launch compiles.

    Triton compiles arguments of 1 as constants, and knows which are multiples of 16.
    """
    function, _, named, fixed, options = launch
    plain = {p.name for p in function.params if generally or p.do_not_specialize}
    integers = {
        key: value for key, value in named.items() if type(value) is int and key not in plain
    }
    constants = fixed | {key: 1 for key, value in integers.items() if value == 1}
    signature = {
        name: "constexpr" if name in constants else type_of(named[name])
        for name in function.arg_names
    }
    values = [
        None if signature[name] == "constexpr" else named[name] for name in function.arg_names
    ]
    multiples = [
        path
        for path, value in _flat(values)
        if function.arg_names[path[0]] not in plain and _is_multiple(value)
    ]
    return Variant(function, signature, constants, multiples, options)


def _is_multiple(value: Any) -> bool:
    """Whether Triton knows of an argument, or of its address, that it is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.itemsize % 16 == 0
    return type(value) is int and value % 16 == 0


def _flat(values: Iterable, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield the values of nested tuples, each with the path of its indices."""
    for index, value in enumerate(values):
        if isinstance(value, tuple):
            yield from _flat(value, (*path, index))
        else:
            yield (*path, index), value


def launch_of(function: Any, grid: tuple[int, ...], args: tuple, kwargs: dict[str, Any]) -> Launch:
    """Divide the arguments of a launch into values, constants and options of the compiler."""
    named = dict(zip(function.arg_names, args, strict=False)) | kwargs
    options = {key: named.pop(key) for key in [*named] if key not in function.arg_names}
    fixed = {p.name: named.pop(p.name) for p in function.params if p.is_constexpr}
    fixed |= {key: named.pop(key) for key in [*named] if named[key] is None}
    indices = {name: index for index, name in enumerate(function.arg_names)}
    inside = ((indices[key], value) for key, value in named.items() if isinstance(value, tuple))
    for index, values in inside:
        fixed |= {path: x for path, x in _flat(values, (index,)) if type_of(x) == "constexpr"}
    return Launch(function, grid, named, fixed, options)


@contextmanager
def recorded_launches(record: Callable[[Launch], None]) -> Iterator[None]:
    """Record kernel launches in the block instead of running them."""

    def note(function: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        record(launch_of(function, grid, args, kwargs))

    with replaced_launches(note):
        yield


@cache
def general(function: Any) -> Any:
    """Return a kernel that is not compiled anew for arguments of 1, or multiples of 16."""
    names = [p.name for p in function.params if not p.is_constexpr]
    jit: Any = triton.jit  # whose options the stub does not have
    return jit(function.fn, do_not_specialize=names, do_not_specialize_on_alignment=names)


@contextmanager
def general_launches() -> Iterator[None]:
    """Run the `general` kernels in launches in the block."""

    def launch(function: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
        return general(function).run(*args, grid=grid, warmup=False, **kwargs)

    with replaced_launches(launch):
        yield


@contextmanager
def compiled_share(index: int, number: int, *, generally: bool = False) -> Iterator[None]:
    """Compile a share of the kernels launched in the block for Triton's cache, and run none.

    Args:
        index: index of the share, from 0; each process has another one.
        number: number of shares.
        generally: whether to compile the `general` kernels.
    """
    seen: dict[str, int] = {}

    def compile_mine(function: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        function = general(function) if generally else function
        key = variant_of(launch_of(function, grid, args, kwargs)).key
        if key not in seen:
            seen[key] = len(seen)
            if seen[key] % number == index:
                function.run(*args, grid=grid, warmup=True, **kwargs)

    with replaced_launches(compile_mine):
        yield


def type_of(value: Any) -> str | tuple:
    """Name the type of a launch argument in the compiler's words."""
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    if isinstance(value, tl.constexpr):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        name = dtype_name(value.dtype)
        short = {
            "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "uint8": "u8",
            "float8_e4m3fn": "fp8e4nv",
        }  # fmt: skip
        return "*" + short.get(name, name.replace("int", "i"))
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{type_of(value.base)[1:]}{value.block_shape}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
