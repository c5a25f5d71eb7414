"""A process in which POSIX is as far away as on Windows: names that it lacks, and files in use.

It is forked where other libraries are imported, as these look at `sys.platform`.
"""

import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

MODULES = ("fcntl", "resource", "termios", "tty", "pwd", "grp", "pty", "syslog", "posix")
SIGNALS = {"SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV", "SIG_DFL", "SIG_IGN"}
FUNCTIONS = (
    "alarm", "setitimer", "getitimer", "pthread_kill", "pthread_sigmask", "sigwait", "sigpending",
    "siginterrupt", "pause",
)  # fmt: skip
NAMES = (
    "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_SYNC", "O_NOCTTY",
    "fork", "forkpty", "wait", "wait3", "wait4", "WNOHANG", "killpg", "setsid", "getpgid",
    "setpgid", "getuid", "geteuid", "getgid", "getegid", "setuid", "chown", "fchown", "lchown",
    "fchmod", "sched_getaffinity", "sched_setaffinity", "sched_yield", "sysconf", "statvfs",
    "fstatvfs", "mkfifo", "mknod", "uname", "getloadavg", "nice", "openpty", "pread", "pwrite",
    "readv", "writev", "sendfile", "sync", "fdatasync", "posix_fallocate", "posix_fadvise",
)  # fmt: skip


def hide_posix() -> None:
    """Hide what Windows lacks, and refuse what it refuses."""
    sys.modules |= dict.fromkeys(MODULES)
    for name in dir(signal):
        if name in FUNCTIONS or (name.startswith("SIG") and name not in SIGNALS):
            delattr(signal, name)
    shutil._use_fd_functions = False
    tempfile.TemporaryFile = tempfile.NamedTemporaryFile
    os.open = _refuse(os.open, os.path.isdir)
    for name in ("replace", "rename", "unlink", "remove"):
        setattr(os, name, _refuse(getattr(os, name), _is_in_use))
    for name in NAMES:
        if hasattr(os, name):
            delattr(os, name)
    select.select = _select
    from arbcli.kernels.runtime import native_library

    native_library.os = SimpleNamespace(name="nt")


def _refuse(function: Callable, condition: Callable[[Any], bool]) -> Callable:
    """Return a function that refuses paths for which a condition holds."""

    def refusing(*paths: Any, **options: Any) -> Any:
        for path in paths[:2]:
            if isinstance(path, str | os.PathLike) and condition(path):
                raise PermissionError(13, "The process cannot access the file", os.fspath(path))
        return function(*paths, **options)

    return refusing


def _is_in_use(path: Any) -> bool:
    """Return whether this process has a file open or mapped."""
    path = os.path.realpath(path)
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == path:
                return True
        except OSError:  # closed
            continue
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any(line.rstrip("\n").endswith(f" {path}") for line in maps)


def _select(*_: Any) -> None:
    raise OSError(10038, "An operation was attempted on something that is not a socket")


def run(commands: list[list[str]]) -> None:
    """Run commands of `arb` in this forked process, as far as the first one that fails."""
    hide_posix()
    from arbcli.__main__ import main as arb
    from arbcli.training import sample
    from arbcli.training.trainer import Trainer

    # as in `conftest.py`
    sample.SAMPLE_BYTES = 4
    Trainer.evaluate.__wrapped__.__defaults__ = (2,)
    for words in commands:
        sys.argv = ["arb", *words]
        try:
            arb()
        except SystemExit as ended:
            if ended.code:
                raise
