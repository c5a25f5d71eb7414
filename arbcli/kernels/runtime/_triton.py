"""Triton, or a stub in its place, so that other backends work where triton is missing."""

import os
from collections.abc import Callable
from functools import update_wrapper
from types import SimpleNamespace
from typing import Any

from arbcli.errors import ArbError

# triton 3.9 warns at every start unless it is told; results here do not depend on it
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class TritonMissing(ArbError):
    """Raised where Triton is needed and not installed.

    Args:
        what: needs it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs Triton, which is not installed",
            hint="install it (Linux only): `pip install triton`; or use `--backend torch`",
        )


class _Constant(int):
    """A number that kernels read, as `triton.language.constexpr` holds it."""

    @property
    def value(self) -> int:
        """The number."""
        return int(self)


class _Unlaunchable:
    """A kernel's definition, which can be read and not be launched."""

    def __init__(self, function: Callable) -> None:
        update_wrapper(self, function)  # type: ignore[arg-type]
        self.fn = function

    def __getitem__(self, grid: object) -> Any:
        raise TritonMissing(f"the kernel `{self.fn.__name__}`")


class _Stub(SimpleNamespace):
    """Just enough for kernels to be defined."""

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

# triton reads this when a kernel is defined, so this module's import is the last chance to set it
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
