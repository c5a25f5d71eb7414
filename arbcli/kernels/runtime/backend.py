"""Selection of the backend that runs the kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TypeVar

import torch
from torch import Tensor

from arbcli.base.environment import BACKENDS, INTERPRET
from arbcli.base.errors import ArbError, quoted
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime._triton import HAS_TRITON, INTERPRETED, TritonMissing, tl, triton

Tiles = TypeVar("Tiles", int, tuple[int, ...])

LARGE_ELEMENTS = 1 << 22
"""Size of a matrix in elements above which a program processes several tiles."""

_forced: str | None = None
_assumed: tuple[tuple[int, int], int] | None = None
_chunk_elements: int | None = None


def default_backend(device: torch.device) -> str:
    """Return the default backend of `device`.

    It is `triton` on a GPU, and on a CPU `native` if there is a C compiler; else `torch`.
    """
    if device.type == "cuda":
        return "triton"
    return "native" if device.type == "cpu" and native.available() else "torch"


def check_backend(name: str, device: torch.device) -> None:
    """Check that a backend can run on `device`; there is no silent fallback.

    Raises:
        ArbError: the backend is unknown, or cannot run here.
    """
    if name not in BACKENDS:
        raise ArbError(f"no backend is named `{name}`", f"choose one of: {quoted(BACKENDS)}")
    if name == "torch":
        return
    if name == "native":
        _check_native(device)
        return
    if name == "triton" and device.type != "cuda":
        raise ArbError(
            f"the `triton` backend needs a CUDA device, and this run is on `{device}`",
            "use `--backend torch`, or `--device cuda` on a machine with an NVIDIA GPU",
        )
    if not HAS_TRITON:
        raise TritonMissing(f"the `{name}` backend")
    if name == "interpreter":
        _check_interpreter()
    if name == "triton" and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        raise ArbError(
            f"`{torch.cuda.get_device_name(device)}` is sm_{major}{minor}; kernels need sm_80",
            "use `--backend torch`, or a GPU of 2020 or later",
        )


def _check_interpreter() -> None:
    if not INTERPRETED:
        raise ArbError(
            "the `interpreter` backend was not asked for before the kernels were defined",
            f"set the environment variable `{INTERPRET}=1`",
        )
    triton, numpy = (version(name).split(".") for name in ("triton", "numpy"))
    if triton[:2] == ["3", "6"] and tuple(map(int, numpy[:2])) >= (2, 4):  # fixed in Triton 3.7
        raise ArbError(
            "Triton 3.6 converts arrays of one element to numbers, which NumPy 2.4 refuses",
            "install `numpy<2.4` or a later Triton, or use `--backend torch`",
        )


def _check_native(device: torch.device) -> None:
    if device.type != "cpu":
        raise ArbError(
            f"the `native` backend needs a CPU, and this run is on `{device}`",
            "use `--backend torch`, or `--device cpu`",
        )
    if not native.available():
        raise ArbError(
            f"the `native` backend cannot run here: {native.why_not()}",
            "install a C compiler, such as gcc, or use `--backend torch`: the same, slower",
        )


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run every kernel inside the context on one backend; `None` restores the default."""
    global _forced
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def backend_of(tensor: Tensor) -> str:
    """Return the backend of operations on `tensor`: `triton`, also if interpreted, or another.

    An operation without a loop of the `native` backend uses torch operations there.
    """
    backend = _forced or default_backend(tensor.device)
    return "triton" if backend == "interpreter" else backend


@contextmanager
def compile_for(capability: tuple[int, int], processors: int = 5) -> Iterator[None]:
    """Make launchers inside the context behave as on a GPU of this compute capability.

    The default number of multiprocessors is small, so that interpreted cases have shared tiles.
    """
    global _assumed
    previous, _assumed = _assumed, (capability, processors)
    try:
        yield
    finally:
        _assumed = previous


def capability(tensor: Tensor) -> tuple[int, int]:
    """Return the compute capability of `compile_for`, or of a tensor's GPU; otherwise (0, 0)."""
    if _assumed:
        return _assumed[0]
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (0, 0)


def num_processors(tensor: Tensor) -> int:
    """Return the multiprocessors of `compile_for` or of a tensor's GPU; otherwise a few."""
    if _assumed:
        return _assumed[1]
    if tensor.is_cuda:
        return torch.cuda.get_device_properties(tensor.device).multi_processor_count
    return 5  # few enough that small cases have several tiles per multiprocessor


def gpu_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return the compute capability and the multiprocessors of a GPU, for `compile_for`."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


@contextmanager
def chunks_of(elements: int | None) -> Iterator[None]:
    """Set the number of elements of the torch backend's parts; `None` restores the default."""
    global _chunk_elements
    previous, _chunk_elements = _chunk_elements, elements
    try:
        yield
    finally:
        _chunk_elements = previous


def chunk_elements(usual: int) -> int:
    """Return the number of elements per part, `usual` by default."""
    return usual if _chunk_elements is None else _chunk_elements


def tiles_of_a_program(matrix: Tensor, few: Tiles, many: Tiles) -> Tiles:
    """Return the number of tiles per program, or their sizes: few for small matrices."""
    return many if matrix.numel() >= LARGE_ELEMENTS else few


def count_tiles(rows: int, columns: int, block_n: int, block_k: int) -> int:
    """Count the tiles of `block_n` rows and `block_k` columns that cover a matrix."""
    return triton.cdiv(rows, block_n) * triton.cdiv(columns, block_k)


@triton.jit
def tile_of_program(N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute the rows, [BLOCK_N, 1], the columns, [1, BLOCK_K], and the mask of a program's tile.

    The grid has one axis, as merged launches need, and runs through each row of tiles.
    """
    tiles_k = tl.cdiv(K, BLOCK_K)
    n = (tl.program_id(0).to(tl.int64) // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = (tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    return n, k, (n < N) & (k < K)


def row_chunks(matrix: Tensor, elements: int = 1 << 18) -> Iterator[slice]:
    """Split the rows of a matrix such that the torch backend's temporaries of a part fit in cache.

    Parts begin at even rows, as pairs of rows share random words.
    """
    rows = matrix.shape[0]
    step = 2 * max(1, chunk_elements(elements) // max(1, 2 * matrix.shape[1]))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
