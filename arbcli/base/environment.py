"""Environment variables that libraries read on import, and available processors and GPUs."""

import ctypes
import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from arbcli.base.errors import ArbError

SETTINGS = {
    # cuBLAS is only deterministic with a fixed workspace
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # silences start and stop messages of torch's profiler on stderr
    "KINETO_LOG_LEVEL": "8",
    # omits the C++ stack trace from the error of a lost process
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Set for every command."""
SPINS = {False: "12000", True: "2000"}
"""`GOMP_SPINCOUNT`, by whether other programs keep a processor busy.

Next to another program, a step of training took 24 s instead of 0.3 s with the long spin; alone,
the short one is slower. It is not set for a float baseline, whose speed it halves on CPUs whose
threads wake slowly.
"""
SPIN_SAMPLES, SAMPLE_SECONDS = 3, 0.005
"""Number of samples of running processes before a run, and their interval in seconds."""
THREAD_SAMPLES = 20
"""Number of samples by which the number of threads of a run is chosen."""
COUNTS = Path("/proc/stat")
"""Linux's file with the number of running processes."""

BACKENDS = ("triton", "native", "torch", "interpreter")
"""Backends of kernels."""
BASELINES = ("float", "ste")
"""Choices of `--weights` that train a float baseline."""
INTERPRET = "TRITON_INTERPRET"
"""Triton's variable: at `1`, kernels run in its interpreter. It is read when they are defined."""


def set_environment(*, spins: bool = True) -> None:
    """Set the variables of `SETTINGS`, unless the user has set them; before torch is imported.

    Args:
        spins: whether to call `set_spins` too.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if spins:
        set_spins()


def set_spins(*, yields: bool = False) -> None:
    """Set `GOMP_SPINCOUNT`, unless the user has set it; before torch is imported.

    Args:
        yields: whether threads spin less while other programs run.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = SPINS[yields and count_busy_processors() > 0]


def keep_compiled_modules() -> None:
    """Keep compiled modules in the cache of `arb` where Python keeps none of torch's.

    Every process would compile them otherwise, which takes 2 to 3 s. Python keeps none where
    torch's folder cannot be written, or where `PYTHONDONTWRITEBYTECODE` is set, as in many
    containers. A folder that `PYTHONPYCACHEPREFIX` names is used as it is. Processes that this one
    starts use the same folder.
    """
    if "torch" in sys.modules or sys.pycache_prefix is not None:
        return
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    keeps = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    if keeps or os.path.exists(importlib.util.cache_from_source(torch.origin)):
        return
    from arbcli.base.caches import private_folder

    folder = private_folder("modules")
    if folder is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def count_busy_processors(samples: int = SPIN_SAMPLES) -> int:
    """Return the number of processors that other programs keep busy, the minimum of some samples.

    Args:
        samples: number of samples, `SAMPLE_SECONDS` apart.

    Returns:
        Number of processors; always 0 outside of Linux.
    """
    busy = sys.maxsize
    for sample in range(samples):
        time.sleep(SAMPLE_SECONDS if sample else 0)
        try:
            lines = COUNTS.read_text().splitlines()
        except OSError:
            return 0
        running = [line.split()[1] for line in lines if line.startswith("procs_running ")]
        busy = min(busy, int(running[0]) - 1 if running else 0)  # without this process
        if busy <= 0:
            return 0
    return busy


def free_threads(threads: int, processors: int) -> int:
    """Return the number of threads to compute with while other programs run.

    Threads divide work evenly, so one that shares its processor with another program delays all of
    them: busy processors are left to other programs, if at most half of all are busy.

    Args:
        threads: number of threads on an idle machine.
        processors: number of processors of the machine.

    Returns:
        At most `threads`; exactly `threads` if `OMP_NUM_THREADS` is set.
    """
    if threads == 1 or "OMP_NUM_THREADS" in os.environ:
        return threads
    busy = count_busy_processors(THREAD_SAMPLES)
    return min(threads, processors - busy) if 2 * busy <= processors else threads


def uses_cpu(device: str | None) -> bool:
    """Return whether the device is not a GPU.

    Args:
        device: the device of the settings; None is the GPU if there is one.
    """
    import torch  # takes seconds, so not for `arb --help`

    return not torch.cuda.is_available() or (device or "").startswith("cpu")


def interpret_kernels_without_gpu(device: str | None) -> None:
    """Select Triton's interpreter if the device is not a GPU; call it before importing kernels.

    Args:
        device: the requested device; None is the GPU if there is one.
    """
    if uses_cpu(device):
        os.environ[INTERPRET] = "1"


def no_cuda_device(name: str) -> ArbError:
    """Return the error for a CUDA device that does not exist."""
    return ArbError(f"there is no CUDA device for `{name}`", "use `--device cpu`, or leave it out")


def may_have_gpu() -> bool:
    """Return whether torch might find a GPU, without importing it: on Linux, by its driver."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()  # an AMD GPU, whose device type is `cuda` too
    return True


def parse_env_int(
    environment: Mapping[str, str], name: str, minimum: int, maximum: int = 2**31 - 1
) -> int:
    """Parse a whole number from an environment variable.

    Raises:
        ArbError: the value is not a whole number, or is not in `minimum` to `maximum`.
    """
    text = environment[name]
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
    if not minimum <= number <= maximum:
        raise ArbError(
            f"the environment variable `{name}` is `{text}`",
            f"set it to a whole number from {minimum} to {maximum}",
        )
    return number
