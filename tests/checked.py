"""Checks of kernels as `arb verify-kernels` makes them, in this process."""

from typing import Any

import torch

from arbcli.kernels.runtime.arguments import Argument, Array, Number
from arbcli.verify.check_kernels import KernelResult, check_kernel, kernel_jobs
from arbcli.verify.compare import as_tuple, compare
from arbcli.verify.verification import Verification


def checked(*args: Any, **kwargs: Any) -> list[KernelResult]:
    """Run the checks that `kernel_jobs` lists."""
    return [result for job in kernel_jobs(*args, **kwargs) for result in check_kernel(job)]


def assert_as_wanted(spec: Verification, label: str, results: Any, wanted: Any) -> None:
    """Compare all results of a kernel, as its specification asks for."""
    for result, expected in zip(as_tuple(results), as_tuple(wanted), strict=True):
        compared = compare(spec, label, result, expected)
        assert compared.passed, compared


def has_one_layout(spec: Verification) -> bool:
    """Return whether no input that is always there may have other strides than a new tensor's."""
    tensors = [
        kind for kind in spec.arguments.values()
        if not isinstance(kind, Number) and not kind.optional
    ]  # fmt: skip
    return all(is_dense(kind) or (isinstance(kind, Array) and not kind.sizes) for kind in tensors)


def is_dense(kind: Argument) -> bool:
    """Return whether an argument is a tensor whose elements must lie one after the other."""
    return isinstance(kind, Array) and bool(kind.dense or kind.one)


def takes_bfloat16(spec: Verification) -> bool:
    """Return whether an input may be bfloat16."""
    return any(torch.bfloat16 in getattr(kind, "dtypes", ()) for kind in spec.arguments.values())
