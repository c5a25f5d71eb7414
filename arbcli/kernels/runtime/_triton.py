"""Triton, or a stub in its place, so that the `torch` backend works where triton is missing."""

import os
from types import SimpleNamespace

# triton 3.9 warns at every start unless it is told; results here do not depend on it
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    # just enough for the kernels' definitions to be read; none of them can be launched
    triton = SimpleNamespace(  # type: ignore[assignment]
        jit=lambda function=None, **_: function or triton.jit,
        constexpr_function=lambda function: function,
    )
    tl = SimpleNamespace(constexpr=lambda value: value)  # type: ignore[assignment]
    TensorDescriptor = None

# triton reads this when a kernel is defined, so this module's import is the last chance to set it
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
