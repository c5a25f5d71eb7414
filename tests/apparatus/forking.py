"""A process that imports `arbcli` anew, or cannot, where other libraries are imported already."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib import reload
from pathlib import Path

import torch


def run_forked(work: Callable[[], None], log: Path, read: Path | str = os.devnull) -> int:
    """Call `work` in a fork of this process, which has no module of `arbcli`.

    Args:
        log: gets the standard output and error.
        read: is the standard input.

    Returns:
        Its exit code; 99 after an exception.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code: object = 99
    try:
        for number, path in ((0, read), (1, log), (2, log)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        streams = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
        sys.stdin, sys.stdout, sys.stderr = streams  # and not those of pytest
        reload(warnings)  # which pytest records
        torch.set_deterministic_debug_mode("default")
        torch.set_num_threads(1)  # else the first threads race to make torch's pool after a fork
        for name in [name for name in sys.modules if name.split(".")[0] == "arbcli"]:
            del sys.modules[name]
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
