"""Several processes of one run: starting them, and knowing which one this is."""

import os
import sys
from collections.abc import Sequence

from arbcli.errors import ArbError


def this_process() -> tuple[int, int]:
    """Find the rank of this process, and how many there are, as `torchrun` says it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def start_processes(number: int) -> None:
    """Become `torchrun`, which starts this command so many times; it does not return.

    Raises:
        ArbError: this process was started so itself.
    """
    if "WORLD_SIZE" in os.environ:
        raise ArbError(
            "`--gpus` starts processes, and this is one that `torchrun` has started",
            hint="leave `--gpus` out",
        )
    command = torchrun(number, sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def torchrun(number: int, words: Sequence[str]) -> list[str]:
    """Make the command line that starts a command in several processes of this machine.

    Args:
        number: of processes.
        words: of the command line, which `--gpus` is taken out of.
    """
    kept, skipped = [], False
    for word in words:
        if skipped:
            skipped = False
        elif word == "--gpus":
            skipped = True
        elif not word.startswith("--gpus="):
            kept.append(word)
    return [sys.executable, "-m", "arbcli.train.parallel.launch", str(number), *kept]
