"""Device of a run: selection, backend, dtype, determinism and memory."""

import gc
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from arbcli.base.environment import no_cuda_device
from arbcli.base.errors import ArbError, setting_error
from arbcli.kernels.runtime.backend import check_backend, default_backend

COMPUTE = {
    "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp8-backward": torch.bfloat16,
    "nvfp4": torch.bfloat16, "fp32": torch.float32,
}  # fmt: skip
"""Dtype of activations, by `--compute`."""
DEVICES = "use `cpu`, `cuda`, or `mps` on a Mac"
CONTAINER_MEMORY = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with a container's memory limit and usage, for cgroups v2 and v1."""
PEAK_TERAOPS = {
    "NVIDIA B200": 2250.0,
    "NVIDIA H200": 989.4, "NVIDIA H200 NVL": 835.5, "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 NVL": 835.5, "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H20": 148.0,
    "NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0, "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A30": 165.0, "NVIDIA A40": 149.7, "NVIDIA A10": 125.0,
    "NVIDIA L40S": 362.0, "NVIDIA L40": 181.0, "NVIDIA L4": 121.0,
    "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA GeForce RTX 3090": 71.0,
}  # fmt: skip
"""Peak dense bf16 throughput with float32 accumulation, in 10**12 operations per second, by torch's
name of the GPU. From data sheets, which may list twice as much, for sparse products."""
NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""CPU capabilities for bf16 products, by torch's names: two for x86, two for Arm."""
EAGER_STEPS = 3
"""Steps before a capture, in which kernels are compiled and libraries choose algorithms."""


def resolve_device(name: str | None) -> torch.device:
    """Return the device with this name; None selects the GPU if there is one, else the CPU.

    Raises:
        ArbError: the device does not exist or is not supported.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArbError(f"no device is named `{name}`", DEVICES) from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ArbError(f"`{name}` is not supported", DEVICES)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ArbError(f"there is no Apple GPU for `{name}`", "use `--device cpu`, or leave it out")
    if device.type == "mps":
        warnings.warn("`mps` was never tried: compare its losses with `cpu`", stacklevel=2)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise no_cuda_device(name)
    return device


def resolve_backend(name: str | None, device: torch.device) -> str:
    """Return the backend called `name`, or the default one, checked to support `device`.

    Raises:
        ArbError: the backend does not support the device.
    """
    backend = name or default_backend(device)
    check_backend(backend, device)
    return backend


def default_compute(device: torch.device) -> str:
    """Return the default dtype of activations: bf16 if the hardware supports bf16 products."""
    if device.type == "cuda":
        return "bf16"
    if device.type == "mps":  # some Apple GPUs lack bf16 products
        return "fp32"
    # oneDNN must support the CPU's instructions; torch for Apple CPUs is built without oneDNN
    onednn = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bf16" if onednn and multiplies_bf16(torch.cpu.get_capabilities()) else "fp32"


def multiplies_bf16(capabilities: Mapping[str, Any]) -> bool:
    """Return whether a CPU has instructions that multiply bf16.

    oneDNN claims support on any CPU with AVX-512; without native instructions it emulates bf16
    in float32, at less than half the speed of float32.

    Args:
        capabilities: result of `torch.cpu.get_capabilities`.
    """
    return any(capabilities.get(name, False) for name in NATIVE_BF16)


def check_compute(compute: str, device: torch.device) -> None:
    """Check that a GPU supports the dtype of products; a CPU computes all in float32.

    Raises:
        ArbError: the GPU lacks FP8 products.
    """
    if not compute.startswith("fp8"):
        return
    if device.type == "mps":
        raise setting_error(
            f"`compute={compute}` is not supported on Apple GPUs", "use `compute=fp32`"
        )
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise ArbError(
                f"`{torch.cuda.get_device_name(device)}` is sm_{major}{minor}, and"
                f" `compute={compute}` needs sm_89",
                "use `compute=bf16`, or a GPU of 2022 or later",
                fields=("compute",),
            )


def emulates_nvfp4(device: torch.device) -> bool:
    """Return whether products in four bits are emulated on this device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0)


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch's operations deterministic inside the context, as resuming requires.

    cuBLAS also needs `CUBLAS_WORKSPACE_CONFIG`, which the `arb` program sets before it starts.
    torch's compiler also needs `set_compiler_determinism`.
    """
    previous = torch.get_deterministic_debug_mode()
    filling: Any = torch.utils.deterministic
    fill = filling.fill_uninitialized_memory
    # `use_deterministic_algorithms` has the same effect, but loads a compiler in two seconds
    torch.set_deterministic_debug_mode("error")
    filling.fill_uninitialized_memory = False  # True would write every buffer twice
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward uses atomic adds
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(previous)
        filling.fill_uninitialized_memory = fill
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        torch.backends.cuda.enable_cudnn_sdp(True)


def set_compiler_determinism() -> None:
    """Make code compiled from now on as deterministic as torch's own operations are."""
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(
        torch.are_deterministic_algorithms_enabled(), warn_only=warn_only
    )


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Capture all launches inside as a CUDA graph, with the options of `torch.cuda.graph`.

    Garbage collection is disabled meanwhile: it could free another graph, which a capture forbids.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Set torch's number of CPU threads inside the context; it determines how sums are split."""
    previous = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@contextmanager
def explained_out_of_memory(
    hint: str = "use a smaller `--batch`, `--ctx` or `--preset`; `arb audit-memory --budget`"
    " predicts the need",
) -> Iterator[None]:
    """Convert an allocator's out-of-memory error to an `ArbError` with a hint."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ArbError("the GPU's memory is not enough for this model", hint) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise  # torch has no exception class for the CPU allocator's errors
        raise ArbError("this machine's memory is not enough for this model", hint) from error


def available_bytes() -> int | None:
    """Return the host memory that this process can still allocate in bytes; None if unknown.

    On Linux the available memory, limited by the container; on other systems all memory.
    """
    limits = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(ln.split()[1]) * 1024 for ln in lines if ln.startswith("MemAvailable:")]
    for limit, used in CONTAINER_MEMORY:
        with suppress(OSError, ValueError):  # `max` means no limit
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    if not limits:
        with suppress(AttributeError, OSError, ValueError):  # Windows
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(limits)) if limits else None


def spare_bytes(device: torch.device) -> int:
    """Return the memory for optional buffers in bytes: half of the host's free memory.

    It is 0 on a GPU, or if the free memory is unknown.
    """
    return (available_bytes() or 0) // 2 if device.type == "cpu" else 0


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that a run can still allocate on a device in bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return available_bytes()


def check_room(needed_bytes: int, subject: str, hint: str, available: int | None = None) -> None:
    """Check that the available memory suffices, before any of it is allocated.

    Args:
        needed_bytes: lower bound of the memory needed.
        subject: subject of the error message, such as `a training step`.
        hint: hint of the error.
        available: available bytes; None is `available_bytes()`.

    Raises:
        ArbError: the memory is not enough.
    """
    available = available_bytes() if available is None else available
    if available is not None and needed_bytes > available:
        need, have = (f"{size / 2**30:,.2f} GiB" for size in (needed_bytes, available))
        raise ArbError(f"{subject} needs at least {need} of memory, and {have} are free", hint)


def peak_operations(device: torch.device) -> float | None:
    """Return a GPU's peak number of dense bf16 operations per second; None if unknown."""
    if device.type != "cuda":
        return None
    peak = PEAK_TERAOPS.get(torch.cuda.get_device_name(device))
    return None if peak is None else peak * 1e12


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far in bytes: of the GPU's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":  # its allocator never shrinks, and counts no peak
        return torch.mps.driver_allocated_memory()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
