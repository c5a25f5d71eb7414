"""Triton, or a stub if it is not installed, so that other backends work without it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from arbcli.base.errors import ArbError

# triton 3.9 warns at import unless this is set; results here do not depend on it
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class TritonMissing(ArbError):
    """Triton is required but not installed.

    Args:
        feature: the feature that requires it.
    """

    def __init__(self, feature: str) -> None:
        super().__init__(
            f"{feature} needs Triton, which is not installed",
            hint="install it (Linux only): `pip install triton`; or use `--backend torch`",
        )


class _Constant(int):
    """Stub of `triton.language.constexpr`."""

    @property
    def value(self) -> int:
        """Value of the constant."""
        return int(self)


class _Unlaunchable:
    """Stub of a kernel: it can be defined and inspected, but not launched."""

    def __init__(self, function: Callable) -> None:
        update_wrapper(self, function)  # type: ignore[arg-type]
        self.fn = function

    def __getitem__(self, grid: object) -> Any:
        raise TritonMissing(f"the kernel `{self.fn.__name__}`")


class _Stub(SimpleNamespace):
    """Stub of Triton with the names that definitions of kernels use."""

    def __getattr__(self, name: str) -> Any:
        special = name.startswith("__")
        raise AttributeError(name) if special else TritonMissing(f"`triton.{name}`")


def _define(function: Callable | None = None, **_: object) -> Any:
    return _Unlaunchable(function) if function else _define


try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    triton = _Stub(  # type: ignore[assignment]
        jit=_define, constexpr_function=lambda function: function
    )
    tl = _Stub(  # type: ignore[assignment]
        constexpr=lambda value: _Constant(value) if type(value) is int else value
    )
    TensorDescriptor = None

# triton reads this when a kernel is defined, which follows the import of this module
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def described(tensor: Tensor, tile: list[int]) -> "TensorDescriptor":
    """Create a TMA descriptor, with which the GPU's copy engine loads and stores whole tiles.

    The launch encodes it with the driver, which requires a current CUDA context. A thread has no
    context before its first runtime call, and this may be the first kernel of an autograd thread.
    So this queries whether a stream is being captured, a runtime call without side effects.

    Args:
        tensor: of any shape. Strides but the last one, which is 1, are multiples of 16 bytes, and
            so is its address.
        tile: shape of a tile.
    """
    if torch.cuda.is_initialized():
        torch.cuda.is_current_stream_capturing()
    return TensorDescriptor.from_tensor(tensor, tile)


@contextmanager
def replaced_launches(instead: Callable) -> Iterator[None]:
    """Call `instead(kernel, grid, *arguments, **options)` in place of every launch.

    Every kernel is launched as `kernel[grid](...)`, compiled or interpreted. Replacing this
    operator affects all kernels, also new ones.
    """
    if not HAS_TRITON:  # no kernel can be launched
        yield
        return
    from triton.runtime.jit import KernelInterface

    previous = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda kernel, grid: partial(instead, kernel, grid)
    try:
        yield
    finally:
        KernelInterface.__getitem__ = previous
