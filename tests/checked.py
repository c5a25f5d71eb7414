"""Checks of kernels as `arb verify-kernels` makes them, in this process."""

from typing import Any

from arbcli.kernels.runtime.arguments import Array, Number
from arbcli.verify.check_kernels import KernelResult, check_kernel, kernel_jobs
from arbcli.verify.verification import Verification


def checked(*args: Any, **kwargs: Any) -> list[KernelResult]:
    """Run the checks that `kernel_jobs` lists."""
    return [result for job in kernel_jobs(*args, **kwargs) for result in check_kernel(job)]


def has_one_layout(spec: Verification) -> bool:
    """Return whether no input that is always there may have other strides than a new tensor's."""
    tensors = [
        kind for kind in spec.arguments.values()
        if not isinstance(kind, Number) and not kind.optional
    ]  # fmt: skip
    return all(
        isinstance(kind, Array) and (kind.dense or kind.one or not kind.sizes) for kind in tensors
    )
