"""`torchrun` on this machine without its tracebacks: what is wrong, a process has said.

    python -m arbcli.train.parallel.launch NUMBER WORD...

starts `arb WORD...` so many times, and ends with the exit code of the first process that failed.
"""

import logging
import os
import sys
from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Start the processes, wait for them, and return an exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which torchrun would set, and say so at length
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    number, *command = words
    start = ["--standalone", "--nproc-per-node", number, "-m", "arbcli", *command]
    try:
        run(parse_args(start))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode  # as a shell has it
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
