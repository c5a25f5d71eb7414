"""Let processes that share a machine compile each kernel once, and not each for itself."""

import hashlib
from pathlib import Path
from typing import Any

from arbcli.kernels.runtime._triton import HAS_TRITON, INTERPRETED


def compile_each_once(folder: str) -> None:
    """Let this process wait for a kernel that another compiles, which Triton's cache then has.

    Args:
        folder: where locks are, the same for all of the processes.
    """
    if not HAS_TRITON or INTERPRETED:
        return
    import fcntl  # where triton is, this is

    from triton import compiler

    compile_alone = compiler.compile

    def compile_once(source: Any, *args: Any, **kwargs: Any) -> Any:
        about = f"{source.hash()} {args} {kwargs}"
        name = hashlib.sha256(about.encode()).hexdigest()
        with Path(folder, name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_alone(source, *args, **kwargs)

    compiler.compile = compile_once  # launchers look it up when they first run
