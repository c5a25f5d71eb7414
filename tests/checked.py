"""Checks of kernels as `arb verify-kernels` makes them, in this process."""

from typing import Any

from arbcli.verify.check_kernels import KernelResult, check_kernel, kernel_jobs


def checked(*args: Any, **kwargs: Any) -> list[KernelResult]:
    """Run the checks that `kernel_jobs` lists."""
    return [result for job in kernel_jobs(*args, **kwargs) for result in check_kernel(job)]
