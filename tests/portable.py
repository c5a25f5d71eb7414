"""Run tests as CPUs with fewer instructions do.

    python tests/portable.py [PYTEST ARGUMENTS]

pytest runs once for every level below the highest that this CPU has, at which `make test` runs.
Without arguments it runs a selection: kernels in C, which are compiled for a level, against their
references, and the tests that once failed on another CPU.
"""

import os
import subprocess
import sys
from pathlib import Path

from arbcli.kernels.runtime import native_library

ROOT = Path(__file__).parents[1]
LEVELS = {
    "x86-64": ("default", "Prescott", "SSE4_2", "SSE41"),
    "x86-64-v3": ("avx2", "Haswell", "AVX2", "AVX2"),
    "x86-64-v4": ("avx512", "SkylakeX", "AVX512", "AVX512_CORE"),
    "armv8-a": ("default", "ARMV8", "", ""),
}
"""Values of `LIBRARIES`, by levels of the native backend."""
LIBRARIES = (
    "ATEN_CPU_CAPABILITY",  # torch
    "OPENBLAS_CORETYPE",  # numpy's products, which are those of Triton's interpreter too
    "MKL_ENABLE_INSTRUCTIONS",  # torch's products in float32, on a processor of Intel
    "ONEDNN_MAX_CPU_ISA",  # torch's products in bfloat16
)
KERNELS = (
    "tests/kernels/test_every_kernel.py::test_kernel_equals_reference",
    "-k", "not interpreter and not triton and not T6-torch and not T32-torch", "-m", "not slow",
)  # fmt: skip
SENSITIVE = (
    "tests/test_results.py::test_tables_follow_from_the_results",
    "tests/training/test_reading.py::test_records_of_a_run_are_pinned",
    "tests/families/compressed/test_compressed.py::test_cached_logits_equal_those_of_one_forward",
    "tests/families/graph/test_memories.py",
)


def main() -> int:
    """Run all lower levels, and return 1 if one of them failed."""
    given, failed = sys.argv[1:], []
    here = native_library.levels_here()
    for level in (level for level in LEVELS if level in here[:-1]):
        settings = zip(LIBRARIES, LEVELS[level], strict=True)
        settings = {name: value for name, value in settings if value} | {
            native_library.LEVEL: level
        }
        if run(level, given or [*SENSITIVE, *KERNELS], **settings):
            failed.append(level)
    say(f"failed: {', '.join(failed)}" if failed else "passed at every lower level")
    return bool(failed)


def run(name: str, arguments: list[str], **settings: str) -> int:
    """Run pytest with variables of the environment, and return how it ended."""
    say(" ".join([name, *(f"{variable}={value}" for variable, value in settings.items())]))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings).returncode


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
