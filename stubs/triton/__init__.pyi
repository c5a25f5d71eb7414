"""Triton for the type checker: kernels are written in another language, so they are not checked."""

from typing import Any
from typing import no_type_check as constexpr_function
from typing import no_type_check as jit

__all__ = ["constexpr_function", "jit"]

def __getattr__(name: str) -> Any: ...
