"""Where a run computes: device, backend, dtype, determinism and peak memory."""

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from arbcli.environment import no_cuda_device
from arbcli.errors import ArbError
from arbcli.kernels.runtime.backend import check_backend, default_backend

COMPUTE = {
    "bf16": torch.bfloat16, "fp8": torch.bfloat16, "nvfp4": torch.bfloat16, "fp32": torch.float32,
}  # fmt: skip
"""Dtype of activations, by `--compute`."""
DEVICES = "use `cpu`, `cuda`, or `mps` on a Mac"
CONTAINER_MEMORY = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the limit of a container and what it uses, in the two versions of Linux's groups."""
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
"""Dense bf16 products with sums in float32, in 10**12 operations a second, by what torch calls a
GPU. They are those of its maker's data sheet, which may tell twice as many: of sparse ones."""
NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Capabilities with which a CPU multiplies bf16: two of x86, two of Arm, as torch names them."""


def resolve_device(name: str | None) -> torch.device:
    """Find the device called `name`; None is the GPU if there is one, else the CPU.

    Raises:
        ArbError: there is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArbError(f"no device is named `{name}`", hint=DEVICES) from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise ArbError(f"`{name}` is not supported", hint=DEVICES)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ArbError(
            f"there is no GPU of Apple for `{name}`", hint="use `--device cpu`, or leave it out"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise no_cuda_device(name)
    return device


def resolve_backend(name: str | None, device: torch.device) -> str:
    """Find the backend that will run on `device`, checked to be able to.

    Raises:
        ArbError: it is not.
    """
    backend = name or default_backend(device)
    check_backend(backend, device)
    return backend


def default_compute(device: torch.device) -> str:
    """Choose the dtype of activations: bf16 wherever the hardware multiplies it."""
    if device.type == "cuda":
        return "bf16"
    if device.type == "mps":  # not every one multiplies bf16
        return "fp32"
    # oneDNN has to know how to use what the CPU has: torch for an Apple CPU comes without oneDNN
    onednn = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    native = multiplies_bf16(torch.cpu.get_capabilities())
    return "bf16" if onednn and native else "fp32"


def multiplies_bf16(capabilities: Mapping[str, Any]) -> bool:
    """Return whether a CPU has instructions that multiply bf16.

    oneDNN alone cannot tell: it says yes on any CPU with AVX-512, and emulates bf16 in float32
    where there is no instruction, at less than half of float32's speed.

    Args:
        capabilities: what `torch.cpu.get_capabilities` returns.
    """
    return any(capabilities.get(name, False) for name in NATIVE_BF16)


def check_compute(compute: str, device: torch.device) -> None:
    """Refuse products in eight bits where the GPU has none; a CPU does them in float32.

    Raises:
        ArbError: it has none.
    """
    if compute == "fp8" and device.type == "mps":
        raise ArbError(
            "a GPU of Apple has no numbers of eight bits, and `compute=fp8` needs them",
            hint="use `compute=fp32`",
            fields=("compute",),
        )
    if compute == "fp8" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise ArbError(
                f"`{torch.cuda.get_device_name(device)}` is sm_{major}{minor}, and `compute=fp8`"
                " needs sm_89",
                hint="use `compute=bf16`, or a GPU of 2022 or later",
                fields=("compute",),
            )


def emulates_nvfp4(device: torch.device) -> bool:
    """Return whether products in four bits are emulated on this device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0)


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch's own operations give the same bits every time, as resuming needs.

    cuBLAS needs `CUBLAS_WORKSPACE_CONFIG` besides, which the `arb` program sets before it starts.
    torch's compiler has to be told by `tell_compiler`.
    """
    before = torch.get_deterministic_debug_mode()
    filling: Any = torch.utils.deterministic
    fill = filling.fill_uninitialized_memory
    # `use_deterministic_algorithms` does the same, but loads a compiler, which takes two seconds
    torch.set_deterministic_debug_mode("error")
    filling.fill_uninitialized_memory = False  # it would write every buffer twice
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        filling.fill_uninitialized_memory = fill
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        torch.backends.cuda.enable_cudnn_sdp(True)


def tell_compiler() -> None:
    """Let what is compiled from now on be as deterministic as torch's own operations are."""
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(
        torch.are_deterministic_algorithms_enabled(), warn_only=warn_only
    )


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """Record all launches inside as a CUDA graph, by `torch.cuda.graph` and its options.

    No garbage is collected meanwhile: a graph among it would be freed, which is not allowed here.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Compute with so many threads on the CPU: their number decides how sums are split."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def explained_out_of_memory(
    hint: str = "use a smaller `--batch`, `--ctx` or `--preset`; `arb audit-memory --budget`"
    " predicts the need",
) -> Iterator[None]:
    """Turn the allocator's complaint into an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ArbError("the GPU's memory is not enough for this model", hint=hint) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise  # torch has no kind of its own for this one
        raise ArbError("this machine's memory is not enough for this model", hint=hint) from error


def available_bytes() -> int | None:
    """Find how much memory this process can still take on the host; None where nothing tells.

    It is what Linux calls available, or what a container may still take; elsewhere all there is.
    """
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(ln.split()[1]) * 1024 for ln in lines if ln.startswith("MemAvailable:")]
    for limit, used in CONTAINER_MEMORY:
        with suppress(OSError, ValueError):  # a limit of `max` is none
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    if not found:
        with suppress(AttributeError, OSError, ValueError):  # Windows
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def spare_bytes(device: torch.device) -> int:
    """Find how much memory may be taken only to be faster: half of what is free on the host.

    On a GPU, and where nobody knows, it is none.
    """
    return (available_bytes() or 0) // 2 if device.type == "cpu" else 0


def free_bytes(device: torch.device) -> int | None:
    """Find how much memory a run can still take on a device; None where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return available_bytes()


def check_room(needed_bytes: int, what: str, hint: str, available: int | None = None) -> None:
    """Refuse what there is no memory for, before any of it is taken.

    Args:
        needed_bytes: at least.
        what: needs it.
        hint: what to do about it.
        available: bytes; None is what this process can take on the host.

    Raises:
        ArbError: it is not enough.
    """
    available = available_bytes() if available is None else available
    if available is not None and needed_bytes > available:
        need, have = (f"{size / 2**30:,.2f} GiB" for size in (needed_bytes, available))
        raise ArbError(f"{what} needs {need} of memory at least, and {have} are free", hint=hint)


def peak_operations(device: torch.device) -> float | None:
    """Find how many dense bf16 operations a second a GPU can do at most; None if nobody knows."""
    if device.type != "cuda":
        return None
    peak = PEAK_TERAOPS.get(torch.cuda.get_device_name(device))
    return None if peak is None else peak * 1e12


def peak_bytes(device: torch.device) -> int:
    """Measure the most memory held at once so far, by the GPU's allocator or the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":  # its allocator keeps what it took, and counts no peak
        return torch.mps.driver_allocated_memory()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
