"""Calls of the `native` backend's loops, which are in `native.c`.

torch's own operations read and write a matrix some forty times where one pass over its rows is
enough. Without a compiler there is the `torch` backend.
"""

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor  # as torch's warning says
from torch.utils._python_dispatch import TorchDispatchMode

RECORDED = {"attend_position", "count", "look_up", "multiply_rows"}
"""Loops that a `Recording` can replay: their whole work is divided among threads."""
NUMBERS = (int, float)
"""Types of arguments that are passed to a loop unchanged."""
ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.new_empty}
"""Torch operations besides views that compute nothing."""
MIN_ELEMENTS = 1 << 16
"""Size of a matrix in elements above which rows are shared among threads."""


_functions: dict[str, Callable[..., int]] = {}
"""Cache of the library's functions by name."""


def available() -> bool:
    """Return whether the loops can run here; the first call may compile them.

    Raises:
        ArbError: `ARB_NATIVE_LEVEL` names a level that this CPU does not have.
    """
    return _library()[0] is not None


def why_not() -> str:
    """Return the reason why the loops cannot run here."""
    return _library()[1]


@cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    from arbcli.kernels.runtime.native_library import MissingLibrary, load_library

    _functions.clear()
    try:
        return load_library(), ""
    except (MissingLibrary, OSError) as error:
        return None, str(error)


def _loaded() -> ctypes.CDLL:
    library, reason = _library()
    if library is None:
        raise RuntimeError(reason)
    return library


def call(name: str, *arguments: Tensor | float | None) -> int:
    """Call a loop.

    Args:
        name: name of the function in `native.c`.
        arguments: arguments of its prototype. A tensor is passed as the address of its first
            element. If a tensor has no memory, nothing is called.

    Returns:
        The function's return value; undefined if it is void.
    """
    if _recording is not None:
        _recording.take(name, arguments)
    values: list[float | None] = []
    for argument in arguments:
        if argument is None or isinstance(argument, NUMBERS):
            values.append(argument)
        elif argument.is_meta or isinstance(argument, FakeTensor):
            return 0
        else:
            values.append(argument.data_ptr())
    if name not in _functions:
        _functions[name] = _find(name, arguments)
    return _functions[name](*values)


class NotRecorded(Exception):
    """An operation was called that cannot be recorded."""


class _Watch(TorchDispatchMode):
    """Refuse operations of torch that do more than allocate or view a tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as True would import torch's compiler, which takes 2 s."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not func.is_view and func.overloadpacket not in ALLOCATIONS:
            raise NotRecorded(str(func))
        return func(*args, **(kwargs or {}))


class Recording:
    """Recording of the loops that run inside `with`, to replay on the same tensors in one call.

    Torch operations cannot be recorded and raise an error.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        """Tensors whose addresses were recorded."""
        self._library = _loaded()
        self._made = ctypes.c_void_p()
        self._threads = torch.get_num_threads()

    def __enter__(self) -> None:
        global _recording
        self._watch = _Watch()
        self._watch.__enter__()
        _recording = self
        self._library.begin_recording()

    def __exit__(self, *raised: object) -> None:
        global _recording
        library, _recording = self._library, None
        library.end_recording.restype = ctypes.c_void_p
        self._made = ctypes.c_void_p(library.end_recording())
        self._close = weakref.finalize(self, library.forget_recording, self._made)
        self._watch.__exit__(*raised)

    def take(self, name: str, arguments: tuple) -> None:
        """Keep the tensors that a loop is called with.

        Raises:
            NotRecorded: the loop cannot be recorded.
        """
        if name not in RECORDED:
            raise NotRecorded(name)
        self._tensors += [part for part in arguments if isinstance(part, Tensor)]

    def replay(self) -> None:
        """Run all recorded loops again."""
        self._library.replay(self._made, ctypes.c_int64(self._threads))


_recording: Recording | None = None
"""The active recording."""


def _find(name: str, arguments: tuple) -> Callable[..., int]:
    """Look up a function by name, and declare its argument types to ctypes."""
    kinds = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_double}
    function = getattr(_loaded(), name)
    function.restype = ctypes.c_int64
    function.argtypes = [kinds.get(type(argument), ctypes.c_void_p) for argument in arguments]
    return function


def threads_for(elements: int) -> int:
    """Choose the number of threads for a matrix with a given number of elements."""
    return torch.get_num_threads() if elements >= MIN_ELEMENTS else 1


def dense_rows(x: Tensor) -> Tensor:
    """Return (..., D) as rows, (M, D), with adjacent columns: a view, or a copy."""
    return as_rows(x.reshape(-1, x.shape[-1]))


def has_dense_rows(matrix: Tensor) -> bool:
    """Return whether the columns of a matrix, (N, K), are adjacent in memory, as loops need."""
    return matrix.shape[1] <= 1 or matrix.stride(1) == 1


def as_rows(matrix: Tensor) -> Tensor:
    """Return a matrix, (N, K), with adjacent columns: itself, or a copy."""
    return matrix if has_dense_rows(matrix) else matrix.contiguous()
