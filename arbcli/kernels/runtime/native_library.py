"""The library of the `native` backend: `native.c`, compiled once on the machine that runs it.

A C compiler makes it in a second, for the instructions that this CPU has, or for those of the level
that `ARB_NATIVE_LEVEL` names. The result is kept in the user's cache.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from arbcli.base.caches import cache_folder, read_cached, write_cached
from arbcli.base.errors import ArbError, quoted

SOURCE = Path(__file__).with_name("native.c")
COMPILERS = ("cc", "gcc", "clang")
"""Compilers that are looked for, unless the environment variable `CC` names one."""
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden",
    # every operation rounds once, integers wrap, and nothing asks how an operation ended
    "-ffp-contract=off", "-fwrapv", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
TUNING = {"x86_64": "-march=native", "amd64": "-march=native"}
TUNING |= dict.fromkeys(("arm64", "aarch64"), "-mcpu=native")
"""Flags for all instructions of this CPU, by kind of machine."""
LEVEL = "ARB_NATIVE_LEVEL"
"""Environment variable that names a level to compile for, in place of this CPU."""
LEVELS = {
    "x86_64": {
        "x86-64": "",
        "x86-64-v2": "cx16 popcnt sse4_2 ssse3",
        "x86-64-v3": "avx2 bmi2 f16c fma movbe",
        "x86-64-v4": "avx512bw avx512cd avx512dq avx512vl",
    },
    "aarch64": {"armv8-a": ""},
}
"""Levels as compilers name them, by kind of machine, and the flags of a CPU that has each."""
LEVELS |= {"amd64": LEVELS["x86_64"], "arm64": LEVELS["aarch64"]}
COMPILE_SECONDS = 300


class MissingLibrary(Exception):
    """The library is missing, with the reason."""


def load_library() -> ctypes.CDLL:
    """Load the compiled library from the cache, or compile it and cache it if possible."""
    if os.name != "posix":
        raise MissingLibrary("it is for Linux and macOS")
    level = _level()
    command = [*_compiler(), *FLAGS, *([f"-march={level}"] if level else _tuning())]
    about = "\0".join([SOURCE.read_text(), *command, "" if level else "\n".join(describe_cpu())])
    name = f"native-{hashlib.sha256(about.encode()).hexdigest()[:20]}.so"
    cached = cache_folder() / name
    with tempfile.TemporaryDirectory() as folder:  # other users cannot write to the loaded file
        library = Path(folder) / name
        if (content := read_cached(cached)) is not None:
            library.write_bytes(content)
            with suppress(OSError):  # built on a system with another linker
                return ctypes.CDLL(str(library))
        _compile([*command, str(SOURCE), "-o", str(library), "-lm"])
        loaded = ctypes.CDLL(str(library))
        with suppress(ArbError):  # it is compiled again in the next process
            write_cached(cached, [library.read_bytes()])
    return loaded


def _compiler() -> list[str]:
    try:
        words = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise MissingLibrary(f"`CC` cannot be read: {error}") from None
    for command in [words] if words else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise MissingLibrary("no C compiler was found")


def _tuning() -> list[str]:
    flag = TUNING.get(platform.machine().lower())
    return [flag] if flag else []


def levels_here() -> list[str]:
    """List the levels that this CPU has, the lowest first."""
    flags = set(" ".join(describe_cpu()).split())
    known = LEVELS.get(platform.machine().lower(), {})
    return [name for name, needed in known.items() if flags.issuperset(needed.split())]


def _level() -> str | None:
    """Read the level to compile for; None is this CPU.

    Raises:
        ArbError: this CPU does not have it.
    """
    level = os.environ.get(LEVEL)
    if not level:
        return None
    if level not in (here := levels_here()):
        names = quoted(here) or "none"
        raise ArbError(
            f"`{LEVEL}` is `{level}`, and the levels of this CPU are: {names}",
            f"set `{LEVEL}` to one of them, or unset it to use all instructions",
        )
    return level


def describe_cpu() -> list[str]:
    """List lines that identify this CPU: its model and flags."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
        return list(dict.fromkeys(about))
    return [platform.platform(), platform.processor()]


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS
        )
        lines = done.stderr.strip().splitlines() or ["nothing was said"]
        reason = next((line for line in lines if "error" in line.lower()), lines[0])
        complaint = f"failed: {reason}" if done.returncode else None
    except subprocess.TimeoutExpired:
        complaint = f"took more than {COMPILE_SECONDS} seconds"
    if complaint is not None:
        raise MissingLibrary(f"`{command[0]}` {complaint}")
