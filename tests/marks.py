"""Marks of tests: which parameters tell most, which are left to `make test-all`, and GPUs."""

from collections.abc import Callable, Iterable

import pytest
import torch

from arbcli.kernels.runtime._triton import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def mostly_slow(values: Iterable, quick: Callable[..., bool]) -> list:
    """Make parameters, a tuple for several arguments; those that are not `quick` are slow."""
    parameters = []
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*parts, marks=() if quick(*parts) else pytest.mark.slow))
    return parameters


def on_gpus(size: int) -> list[pytest.MarkDecorator]:
    """Make the marks of what needs so many GPUs."""
    there = torch.cuda.device_count()
    missing = pytest.mark.skipif(there < size, reason=f"needs {size} GPUs, and there are {there}")
    return [pytest.mark.gpu, missing]
