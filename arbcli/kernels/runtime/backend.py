"""Which implementation of the kernels runs: one choice, made once, named in every report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

import torch
from torch import Tensor

from arbcli.environment import interpreter_not_asked_for, no_gpu_for_triton
from arbcli.errors import ArbError
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import HAS_TRITON, INTERPRETED, TritonMissing

BACKENDS = ("triton", "native", "torch", "interpreter")

LARGE_ELEMENTS = 1 << 22
"""Size of a matrix in elements above which a program processes several tiles."""

_forced: str | None = None
_assumed: tuple[tuple[int, int], int] | None = None
_chunk_elements: int | None = None


def default_backend(device: torch.device) -> str:
    """Name the backend that runs on `device` unless one is forced.

    It is `triton` on a GPU, and on a CPU `native` if there is a C compiler; else `torch`.
    """
    if device.type == "cuda":
        return "triton"
    return "native" if device.type == "cpu" and native.available() else "torch"


def check_backend(name: str, device: torch.device) -> None:
    """Refuse a backend that cannot run on `device`; nothing else ever stands in for it.

    Raises:
        ArbError: the backend is unknown, or cannot run here.
    """
    if name not in BACKENDS:
        names = ", ".join(f"`{known}`" for known in BACKENDS)
        raise ArbError(f"no backend is named `{name}`", hint=f"choose one of: {names}")
    if name == "torch":
        return
    if name == "native":
        _check_native(device)
        return
    if name == "triton" and device.type != "cuda":
        raise no_gpu_for_triton(str(device))
    if not HAS_TRITON:
        raise TritonMissing(f"the `{name}` backend")
    if name == "interpreter":
        _check_interpreter()
    if name == "triton" and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        raise ArbError(
            f"`{torch.cuda.get_device_name(device)}` is sm_{major}{minor}; kernels need sm_80",
            hint="use `--backend torch`, or a GPU of 2020 or later",
        )


def _check_interpreter() -> None:
    if not INTERPRETED:
        raise interpreter_not_asked_for()
    triton, numpy = (version(name).split(".") for name in ("triton", "numpy"))
    if triton[:2] == ["3", "6"] and tuple(map(int, numpy[:2])) >= (2, 4):  # mended in Triton 3.7
        raise ArbError(
            "Triton 3.6 converts arrays of one element to numbers, which NumPy 2.4 refuses",
            hint="install `numpy<2.4` or a later Triton, or use `--backend torch`",
        )


def _check_native(device: torch.device) -> None:
    if device.type != "cpu":
        raise ArbError(
            f"the `native` backend needs a CPU, and this run is on `{device}`",
            hint="use `--backend torch`, or `--device cpu`",
        )
    if not native.available():
        raise ArbError(
            f"the `native` backend cannot run here: {native.why_not()}",
            hint="install a C compiler, such as gcc, or use `--backend torch`: the same, slower",
        )


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Force every kernel called inside onto one backend; `None` restores the default."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def uses_triton(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` launches a Triton kernel, compiled or interpreted."""
    return (_forced or default_backend(tensor.device)) in ("triton", "interpreter")


def uses_native(tensor: Tensor) -> bool:
    """Whether an operation on `tensor` is one of the `native` backend's loops, if it has one.

    Otherwise it is torch's operations, unless it launches a Triton kernel.
    """
    return (_forced or default_backend(tensor.device)) == "native"


def choose(tensor: Tensor, triton: Callable, torch: Callable, native: Callable) -> Callable:
    """Choose what runs an operation on `tensor` among what each backend has for it."""
    backend = _forced or default_backend(tensor.device)
    if backend == "native":
        return native
    return torch if backend == "torch" else triton


@contextmanager
def compile_for(capability: tuple[int, int], processors: int = 5) -> Iterator[None]:
    """Let launchers called inside choose as on a GPU of this compute capability.

    Processors are few unless said: interpreted one after another, some have several tiles to share.
    """
    global _assumed
    before, _assumed = _assumed, (capability, processors)
    try:
        yield
    finally:
        _assumed = before


def capability(tensor: Tensor) -> tuple[int, int]:
    """Find the compute capability compiled for, or that of a tensor's GPU; else (0, 0)."""
    if _assumed:
        return _assumed[0]
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (0, 0)


def num_processors(tensor: Tensor) -> int:
    """Count the multiprocessors of the GPU compiled for, or of a tensor's; else assume a few."""
    if _assumed:
        return _assumed[1]
    if tensor.is_cuda:
        return torch.cuda.get_device_properties(tensor.device).multi_processor_count
    return 5  # so few that a small case already gives several tiles to some of them


@contextmanager
def chunks_of(elements: int | None) -> Iterator[None]:
    """Let the torch backend work on parts of so many elements; `None` is as many as it likes."""
    global _chunk_elements
    before, _chunk_elements = _chunk_elements, elements
    try:
        yield
    finally:
        _chunk_elements = before


def chunk_elements(usual: int) -> int:
    """Say how many elements a part may have, that has `usual` ones unless told otherwise."""
    return usual if _chunk_elements is None else _chunk_elements


def tiles_of_a_program(matrix: Tensor, few: int, many: int) -> int:
    """Say how many tiles a program takes: few, so that a small matrix has programs enough."""
    return many if matrix.numel() >= LARGE_ELEMENTS else few


def row_chunks(matrix: Tensor, elements: int = 1 << 18) -> Iterator[slice]:
    """Split the rows of a matrix so that what the torch backend makes of a part stays in cache.

    Parts begin at even rows, as two rows share their random bits.
    """
    rows = matrix.shape[0]
    step = 2 * max(1, chunk_elements(elements) // max(1, 2 * matrix.shape[1]))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
