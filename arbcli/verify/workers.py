"""A pool of processes, as Triton compiles and interprets on a single core."""

import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from arbcli.kernels.runtime.compile_once import compile_each_once
from arbcli.kernels.runtime.interpreter import interpret_faster

Job = tuple[Callable, Any]
"""A function of a module, as other processes import it, and its argument."""


class Workers:
    """A pool of processes that run jobs; for a single one, this process.

    Args:
        number: number of processes.
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()
        self._locks: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the processes; after an error or a signal, without waiting for their jobs."""
        if self._pool is None:
            return
        if kind is not None:
            for process in self._processes:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)
        if self._locks is not None:
            self._locks.cleanup()

    def run(
        self, jobs: Iterable[Job], on_done: Callable[[int, Any], None] = lambda index, result: None
    ) -> list[Any]:
        """Run jobs, which begin in their order, and wait for all.

        Args:
            jobs: the jobs.
            on_done: called with the index of each finished job, and its result.

        Returns:
            The results, in the order of the jobs.
        """
        jobs = list(jobs)
        results: dict[int, Any] = {}

        def done(index: int, result: Any) -> None:
            results[index] = result
            on_done(index, result)

        if self.number == 1:
            interpret_faster()
            for index, (function, argument) in enumerate(jobs):
                done(index, function(argument))
        else:
            futures = self._submit(jobs)
            for future in as_completed(futures):
                done(futures[future], future.result())
        return [results[index] for index in range(len(jobs))]

    def _submit(self, jobs: list[Job]) -> dict[Future, int]:
        if self._pool is None:
            threads = max(1, torch.get_num_threads() // self.number)
            self._locks = tempfile.TemporaryDirectory(prefix="arb-")
            self._pool = ProcessPoolExecutor(
                self.number, get_context("spawn"), _start_process, (threads, self._locks.name)
            )
        others = set(active_children())
        with _interrupts_held_back():
            futures = {
                self._pool.submit(function, argument): index
                for index, (function, argument) in enumerate(jobs)
            }
        self._processes |= set(active_children()) - others
        return futures


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block Ctrl-C in the block, so that processes started in it never receive it.

    A terminal sends Ctrl-C to all its processes. This process receives it after the block.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # when it starts it lets signals through again
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _start_process(threads: int, locks: str) -> None:
    """Share cores and compiled kernels with the other processes, and interpret faster."""
    torch.set_num_threads(threads)
    compile_each_once(locks)
    interpret_faster()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be held back
