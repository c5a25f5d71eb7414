"""Share work among processes: Triton compiles, and interprets, on one core at a time."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from arbcli.kernels.runtime.compile_once import compile_each_once


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job that is done."""

    number: int
    """How many are done, this one too."""
    total: int
    name: str
    result: Any
    """What the call returned."""
    arguments: tuple = ()
    """Of the call."""
    remembered: bool = False
    """Whether nothing was called, as the result was known."""


def name_of(job: tuple) -> str:
    """Name a job by its first arguments."""
    return " ".join(str(part) for part in job[:2] if part is not None)


class Workers:
    """Processes that do jobs, or this process where there is to be one only.

    Args:
        number: of processes.
        interpret: whether kernels are for Triton's interpreter there; None is as it is here.
    """

    def __init__(self, number: int = 1, *, interpret: bool | None = None) -> None:
        self.number, self.interpret = number, interpret
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()
        self._locks: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the processes; after an error, or a signal, whatever they are at."""
        if self._pool is None:
            return
        if kind is not None:
            for process in self._processes:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)
        if self._locks is not None:
            self._locks.cleanup()

    def map(
        self,
        function: Callable,
        jobs: Iterable[tuple],
        progress: Callable[[JobDone], None] = lambda _: None,
    ) -> list[Any]:
        """Call a function with the arguments of every job.

        Args:
            function: of a module, as another process has to find it.
            jobs: arguments, the first of which name the job.
            progress: is told of each job that is done.

        Returns:
            What the calls returned, in the order of the jobs.
        """
        jobs = list(jobs)
        results, count = [None] * len(jobs), 0
        for index, result in self._each(function, jobs):
            results[index], count = result, count + 1
            progress(JobDone(count, len(jobs), name_of(jobs[index]), result, jobs[index]))
        return results

    def _each(self, function: Callable, jobs: list[tuple]) -> Iterable[tuple[int, Any]]:
        """Give (index, result) of every job as it is done."""
        if self.number == 1 and self.interpret is None:
            for index, job in enumerate(jobs):
                yield index, function(*job)
            return
        futures = self._submit(function, jobs)
        for future in as_completed(futures):
            yield futures[future], future.result()

    def _submit(self, function: Callable, jobs: list[tuple]) -> dict[Future, int]:
        before = os.environ.get("TRITON_INTERPRET")
        if self.interpret is not None:  # processes inherit what is set while they start
            os.environ["TRITON_INTERPRET"] = str(int(self.interpret))
        try:
            if self._pool is None:
                threads = max(1, torch.get_num_threads() // self.number)
                self._locks = tempfile.TemporaryDirectory(prefix="arb-")
                how = (threads, self._locks.name)
                self._pool = ProcessPoolExecutor(
                    self.number, get_context("spawn"), _start_process, how
                )
            others = set(active_children())
            with _interrupts_held_back():
                futures = {self._pool.submit(function, *job): i for i, job in enumerate(jobs)}
            self._processes |= set(active_children()) - others
            return futures
        finally:
            if before is None:
                os.environ.pop("TRITON_INTERPRET", None)
            else:
                os.environ["TRITON_INTERPRET"] = before


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Leave Ctrl-C, which all processes of a terminal get, to this one.

    What is held back here comes when it is over. A process that is started meanwhile never gets it,
    from its first moment on.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # when it starts it lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_process(threads: int, locks: str) -> None:
    """Share the cores, and what is compiled."""
    torch.set_num_threads(threads)
    compile_each_once(locks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be held back
