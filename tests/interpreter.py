"""Triton's interpreter at thrice its speed, with the same results: what it computes for nothing.

It patches the language anew at every call of a device function, checks integers for overflow and
drops what it finds, builds a table of all types for each that it looks up, and describes the type
and the shape of every tensor anew.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from unittest import mock

import numpy as np

try:
    from triton import language
    from triton.runtime import interpreter
except ImportError:  # whatever asks for them is skipped
    from arbcli.kernels.runtime._triton import tl as language
    from arbcli.kernels.runtime._triton import triton as interpreter


def quicken() -> None:
    """Leave out what has no effect; an interpreter that has none of it stays as it is."""
    _leave_out_unread_overflows()
    _patch_once_in_a_launch()
    _look_types_up_once()
    _describe_types_once()


def _leave_out_unread_overflows() -> None:
    options = interpreter.interpreter_builder.options
    if not options.debug:  # else an overflow is an error
        options = dataclasses.replace(options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = options


def _patch_once_in_a_launch() -> None:
    """Device functions see one language or two; what is patched stays so until the launch ends."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[bool, bool]] = set()

    @cache
    def seen_by(function: Callable) -> tuple[bool, bool]:
        values = [*function.__globals__.values()]
        return any(v is language for v in values), any(v is language.core for v in values)

    @wraps(patch)
    def patch_once(function: Callable) -> object:
        if (seen := seen_by(function)) in patched:
            return None
        patched.add(seen)
        return patch(function)

    @wraps(launch)
    def launch_anew(*args, **kwargs) -> None:
        patched.clear()
        launch(*args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


def _look_types_up_once() -> None:
    find = interpreter._get_np_dtype
    find_once = cache(find)

    @wraps(find)
    def find_type(of: language.dtype) -> type:
        scalar = of.scalar  # others than scalars have no hash
        return find_once(scalar) if type(scalar) is language.dtype else find(of)

    interpreter._get_np_dtype = find_type


def _describe_types_once() -> None:
    """Types of blocks that are alike share their attributes, and tensors of a type their shape."""
    block, tensor = language.core.block_type, language.core.tensor
    describe, make = block.__init__, tensor.__init__
    described: dict[tuple, dict] = {}

    @wraps(describe)
    def describe_once(self, element_ty: language.dtype, shape: Sequence) -> None:
        key = id(element_ty), *(getattr(size, "value", size) for size in shape)
        if key not in described:
            describe(self, element_ty, shape)
            described[key] = self.__dict__  # it holds the type of the elements, so its id stays
        self.__dict__ = described[key]

    @wraps(make)
    def make_alike(self, handle: object, type: language.dtype) -> None:
        found = type.__dict__.get("_of_tensors")
        if found is None:
            make(self, handle, type)
            type._of_tensors = {key: part for key, part in vars(self).items() if key != "handle"}
        else:
            self.__dict__.update(found, handle=handle)

    block.__init__, tensor.__init__ = describe_once, make_alike


@contextmanager
def within_arguments() -> Iterator[None]:
    """Fail where a kernel reads or writes outside of the memory of its arguments.

    A GPU may stop there; the interpreter reads what is there, and a mask may hide it from results.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    bounds: list[np.ndarray] = []

    def note_memory(prepare: Callable) -> Callable:
        @wraps(prepare)
        def prepared(self, args, kwargs):
            found = prepare(self, args, kwargs)
            tensors = [getattr(arg, "base", arg) for arg in found[0]]  # of descriptors
            parts = [x.untyped_storage() for x in tensors if hasattr(x, "untyped_storage")]
            pairs = sorted({(part.data_ptr(), part.data_ptr() + part.nbytes()) for part in parts})
            bounds[:] = np.array(pairs, np.uint64).reshape(-1, 2).T
            return found

        return prepared

    def check_first(access: Callable, first: int, place: int) -> Callable:
        @wraps(access)
        def checked(self, *args, **options):
            pointers, mask = args[first], args[first + place]
            address = pointers.data[mask.data]
            if address.size:
                begins, ends = bounds
                size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                which = np.searchsorted(begins, address, side="right") - 1
                inside = (which >= 0) & (address + np.uint64(size) <= ends[which])
                assert inside.all(), f"{(~inside).sum()} of {inside.size} elements are elsewhere"
            return access(self, *args, **options)

        return checked

    with ExitStack() as patched:
        noted = note_memory(executor._init_args_hst)
        patched.enter_context(mock.patch.object(executor, "_init_args_hst", noted))
        places = ("masked_load", 0, 1), ("masked_store", 0, 2), ("atomic_rmw", 1, 2)
        for name, first, place in places:
            checked = check_first(getattr(builder, f"create_{name}"), first, place)
            patched.enter_context(mock.patch.object(builder, f"create_{name}", checked))
        yield


@contextmanager
def barriers_where_needed() -> Iterator[None]:
    """Fail where a program's threads may meet what others of them do, with no barrier between.

    Here a program is one thread. On a GPU an element is one thread's in one tile of addresses and
    another's in the next, unless the tiles are alike: what one thread stores, another must neither
    read nor have read since the last barrier. A single element is read by all, and stored by one.
    A kernel that counts programs by an atomic sum, so that the last reads what others stored, needs
    a barrier before it: one thread adds, and others may not have stored yet.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    since: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"load": [], "store": []}
    untold: list[np.ndarray] = []

    def begin(run: Callable, *parts: list) -> Callable:
        @wraps(run)
        def begun(*args, **options):
            for part in parts:
                part.clear()
            return run(*args, **options)

        return begun

    def note(access: Callable, kind: str, against: str, first: int, place: int) -> Callable:
        @wraps(access)
        def noted(self, *args, **options):
            tile, mask = args[first].data, args[first + place].data
            address = tile[np.broadcast_to(mask, np.shape(tile))]
            for other, found in since[against]:
                alike = np.size(tile) > 1 and np.array_equal(other, tile)
                shared = not alike and np.isin(address, found).any()
                assert not shared, f"a {kind} meets a {against}, and no barrier is between"
            told = kind == "store" or not any(np.isin(address, part).any() for part in untold)
            assert told, "a semaphore was raised, and no barrier was between it and the stores"
            since[kind].append((tile, address))
            return access(self, *args, **options)

        return noted

    def semaphore(access: Callable) -> Callable:
        @wraps(access)
        def taken(self, *args, **options):
            untold.extend(address for _, address in since["store"])
            return access(self, *args, **options)

        return taken

    with ExitStack() as patched:
        for of, name, change in (
            (executor, "__call__", lambda run: begin(run, untold)),
            (builder, "set_grid_idx", lambda run: begin(run, *since.values())),
            (builder, "create_barrier", lambda run: begin(run, *since.values())),
            (builder, "create_masked_load", lambda access: note(access, "load", "store", 0, 1)),
            (builder, "create_masked_store", lambda access: note(access, "store", "load", 0, 2)),
            (builder, "create_atomic_rmw", semaphore),
        ):
            patched.enter_context(mock.patch.object(of, name, change(getattr(of, name))))
        yield


@contextmanager
def arguments_left_in_place() -> Iterator[None]:
    """Copy no argument onto itself after a launch: it may lie in more memory than there is."""
    with mock.patch.object(interpreter.GridExecutor, "_restore_args_dev"):
        yield
