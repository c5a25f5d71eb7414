"""Environment variables: those that libraries read when they are loaded, and numbers for arb."""

import ctypes
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from arbcli.errors import ArbError

SETTINGS = {
    # cuBLAS gives the same bits every time only if it has this workspace
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torch's profiler would say on stderr when it begins and ends
    "KINETO_LOG_LEVEL": "8",
    # torch would add a stack of its own to the error that says that a process is gone
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Set for every command."""
SPINS = {False: "12000", True: "2000"}
"""Rounds that threads which wait for each other spin, by whether other programs use a processor:
with one a step of training was seen to take 24 s instead of 0.3, and with few it is slower alone.
They are not set for a float twin, whose speed they halve on CPUs whose threads wake slowly."""
LOOKS, LOOK_SECONDS = 3, 0.005
"""Times that the processors are looked at before a run, and the pause between two of them."""
LOOKS_FOR_THREADS = 20
"""Times before the threads of a run are counted, as it keeps their number."""
COUNTS = Path("/proc/stat")
"""File of Linux that counts what runs."""

TWINS = ("float", "ste")
"""Choices of `--weights` that train a float twin."""
INTERPRET = "TRITON_INTERPRET"
"""At `1`, kernels are defined for Triton's interpreter."""


def set_environment(words: Sequence[str] = ()) -> None:
    """Set what the user has not.

    Args:
        words: of the command line; with `--weights float` or `ste` a float twin is trained.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not trains_twin(words) and "GOMP_SPINCOUNT" not in os.environ:
        os.environ["GOMP_SPINCOUNT"] = SPINS[words[:1] == ["train"] and others_running() > 0]


def others_running(looks: int = LOOKS) -> int:
    """Count the processors that other programs keep busy: the fewest of some looks.

    Args:
        looks: at the count of Linux, `LOOK_SECONDS` apart; elsewhere there are 0.
    """
    fewest = sys.maxsize
    for look in range(looks):
        time.sleep(LOOK_SECONDS if look else 0)
        try:
            lines = COUNTS.read_text().splitlines()
        except OSError:
            return 0
        running = [line.split()[1] for line in lines if line.startswith("procs_running ")]
        fewest = min(fewest, int(running[0]) - 1 if running else 0)  # besides this program
        if fewest <= 0:
            return 0
    return fewest


def free_threads(threads: int, processors: int) -> int:
    """Choose how many threads of a run compute next to other programs.

    Threads share work evenly. One that takes turns with another program holds up all others, so
    busy processors are left to it. Where that would leave less than half of them, it gains nothing.

    Args:
        threads: that there are without other programs.
        processors: of the machine.

    Returns:
        As many, or fewer; `OMP_NUM_THREADS` decides instead where it is set.
    """
    if threads == 1 or "OMP_NUM_THREADS" in os.environ:
        return threads
    busy = others_running(LOOKS_FOR_THREADS)
    return min(threads, processors - busy) if 2 * busy <= processors else threads


def trains_twin(words: Sequence[str]) -> bool:
    """Tell from a command line whether it trains a float twin; the last `--weights` counts."""
    weights = "ternary"
    for index, word in enumerate(words):
        if word == "--weights":
            weights = "".join(words[index + 1 : index + 2])
        elif word.startswith("--weights="):
            weights = word.removeprefix("--weights=")
    return weights in TWINS


def is_for_cpu(device: str | None) -> bool:
    """Tell whether no GPU computes.

    Args:
        device: the one that was asked for; None is the GPU if there is one.
    """
    import torch  # takes seconds, so not for `arb --help`

    return not torch.cuda.is_available() or (device or "").startswith("cpu")


def interpret_kernels_without_gpu(device: str | None) -> None:
    """Have kernels defined for Triton's interpreter where they cannot run; before their import.

    Args:
        device: the one that was asked for; None is the GPU if there is one.
    """
    if is_for_cpu(device):
        os.environ[INTERPRET] = "1"


def no_cuda_device(name: str) -> ArbError:
    """Make the error of a device that is not there."""
    return ArbError(
        f"there is no CUDA device for `{name}`", hint="use `--device cpu`, or leave it out"
    )


def no_gpu_for_triton(device: str) -> ArbError:
    """Make the error of kernels for a GPU on another device."""
    return ArbError(
        f"the `triton` backend needs a CUDA device, and this run is on `{device}`",
        hint="use `--backend torch`, or `--device cuda` on a machine with an NVIDIA GPU",
    )


def interpreter_not_asked_for() -> ArbError:
    """Make the error of kernels that were not defined for Triton's interpreter."""
    return ArbError(
        "the `interpreter` backend was not asked for before the kernels were defined",
        hint=f"set the environment variable `{INTERPRET}=1`",
    )


def may_have_gpu() -> bool:
    """Tell quickly whether torch might find a GPU: on Linux there is the driver of one."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()  # of an AMD GPU, which torch calls `cuda` too
    return True


def number_in(environment: Mapping[str, str], name: str, least: int, most: int = 2**31 - 1) -> int:
    """Read a whole number from an environment variable.

    Raises:
        ArbError: it is not a number, or is out of range.
    """
    text = environment[name]
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
    if not least <= number <= most:
        raise ArbError(
            f"the environment variable `{name}` is `{text}`",
            hint=f"set it to a whole number from {least} to {most}",
        )
    return number
