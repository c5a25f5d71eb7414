"""The `native` backend's loops: `native.c`, compiled once on the machine that runs them.

torch's own operations read and write a matrix some forty times where one pass over its rows is
enough. A C compiler makes that pass in a second, for the instructions that this CPU has, or for
those of the level that `ARB_NATIVE_LEVEL` names. What it made is kept in the user's cache. Without
a compiler there is the `torch` backend.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor  # as torch's warning says
from torch.utils._python_dispatch import TorchDispatchMode

from arbcli.base.caches import cache_folder, read_cached, write_cached
from arbcli.base.errors import ArbError, quoted

SOURCE = Path(__file__).with_name("native.c")
COMPILERS = ("cc", "gcc", "clang")
"""Compilers that are looked for, unless the environment variable `CC` names one."""
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden",
    # every operation rounds once, integers wrap, and nothing asks how an operation ended
    "-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
TUNING = {"x86_64": "-march=native", "amd64": "-march=native"}
TUNING |= dict.fromkeys(("arm64", "aarch64"), "-mcpu=native")
"""Flags for all instructions of this CPU, by kind of machine."""
LEVEL = "ARB_NATIVE_LEVEL"
"""Environment variable that names a level to compile for, in place of this CPU."""
LEVELS = {
    "x86_64": {
        "x86-64": "",
        "x86-64-v2": "cx16 popcnt sse4_2 ssse3",
        "x86-64-v3": "avx2 bmi2 f16c fma movbe",
        "x86-64-v4": "avx512bw avx512cd avx512dq avx512vl",
    },
    "aarch64": {"armv8-a": ""},
}
"""Levels as compilers name them, by kind of machine, and the flags of a CPU that has each."""
LEVELS |= {"amd64": LEVELS["x86_64"], "arm64": LEVELS["aarch64"]}
COMPILE_SECONDS = 300
RECORDED = {"attend_position", "count", "look_up", "multiply_rows"}
"""Loops that a `Recording` can replay: their whole work is divided among threads."""
NUMBERS = (int, float)
"""Types of arguments that are passed to a loop unchanged."""
ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.new_empty}
"""Torch operations besides views that compute nothing."""
LEAST_ELEMENTS = 1 << 16
"""Size of a matrix in elements above which rows are shared among threads."""


_functions: dict[str, Callable[..., int]] = {}
"""Cache of the library's functions by name."""


class _Missing(Exception):
    """The library is missing, with the reason."""


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
    _functions.clear()
    try:
        return _load(), ""
    except (_Missing, OSError) as error:
        return None, str(error)


def _loaded() -> ctypes.CDLL:
    library, why = _library()
    if library is None:
        raise _Missing(why)
    return library


def _load() -> ctypes.CDLL:
    """Load the compiled library from the cache, or compile it and cache it if possible."""
    if os.name != "posix":
        raise _Missing("it is for Linux and macOS")
    level = _level()
    command = [*_compiler(), *FLAGS, *([f"-march={level}"] if level else _tuning())]
    about = "\0".join([SOURCE.read_text(), *command, "" if level else "\n".join(describe_cpu())])
    name = f"native-{hashlib.sha256(about.encode()).hexdigest()[:20]}.so"
    kept = cache_folder() / name
    with tempfile.TemporaryDirectory() as folder:  # other users cannot write to the loaded file
        library = Path(folder) / name
        if (content := read_cached(kept)) is not None:
            library.write_bytes(content)
            with suppress(OSError):  # built on a system with another linker
                return ctypes.CDLL(str(library))
        _compile([*command, str(SOURCE), "-o", str(library), "-lm"])
        loaded = ctypes.CDLL(str(library))
        with suppress(ArbError):  # it is compiled again in the next process
            write_cached(kept, [library.read_bytes()])
    return loaded


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CC", ""))
    for command in [given] if given else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise _Missing("no C compiler was found")


def _tuning() -> list[str]:
    flag = TUNING.get(platform.machine().lower())
    return [flag] if flag else []


def levels_here() -> list[str]:
    """List the levels that this CPU has, the lowest first."""
    flags = set(" ".join(describe_cpu()).split())
    known = LEVELS.get(platform.machine().lower(), {})
    return [name for name, needed in known.items() if flags.issuperset(needed.split())]


def _level() -> str | None:
    """Read the level to compile for; None is this CPU.

    Raises:
        ArbError: this CPU does not have it.
    """
    level = os.environ.get(LEVEL)
    if not level:
        return None
    if level not in (here := levels_here()):
        names = quoted(here) or "none"
        raise ArbError(
            f"`{LEVEL}` is `{level}`, and the levels of this CPU are: {names}",
            hint=f"set `{LEVEL}` to one of them, or unset it to use all instructions",
        )
    return level


def describe_cpu() -> list[str]:
    """List lines that identify this CPU: its model and flags."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
        return list(dict.fromkeys(about))
    return [platform.platform(), platform.processor()]


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        lines = done.stderr.strip().splitlines() or ["nothing was said"]
        complaint = f"failed: {lines[0]}" if done.returncode else None
    except subprocess.TimeoutExpired:
        complaint = f"took more than {COMPILE_SECONDS} seconds"
    if complaint is not None:
        raise _Missing(f"`{command[0]}` {complaint}")


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
        """Keep torch's compiler out: to tell it to leave this alone is to import it, for 2 s."""
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
    return torch.get_num_threads() if elements >= LEAST_ELEMENTS else 1


def dense_rows(x: Tensor) -> Tensor:
    """View, or copy, (..., D) as rows whose columns lie next to each other."""
    return as_rows(x.reshape(-1, x.shape[-1]))


def in_rows(matrix: Tensor) -> bool:
    """Return whether the columns of a matrix lie next to each other, as the loops need."""
    return matrix.shape[1] <= 1 or matrix.stride(1) == 1


def as_rows(matrix: Tensor) -> Tensor:
    """Copy a matrix whose columns do not lie next to each other."""
    return matrix if in_rows(matrix) else matrix.contiguous()
