"""A pool of processes, as Triton compiles and interprets on a single core."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from arbcli.kernels.runtime.compile_once import compile_each_once


@dataclass(frozen=True, slots=True)
class JobDone:
    """A finished job."""

    number: int
    """Number of finished jobs, including this one."""
    total: int
    name: str
    result: Any
    """Return value of the call."""
    arguments: tuple = ()
    """Arguments of the call."""


def name_of(job: tuple) -> str:
    """Return the name of a job: its first arguments."""
    return " ".join(str(part) for part in job[:2] if part is not None)


@dataclass(slots=True)
class Batch:
    """Queued jobs, and their results so far."""

    function: Callable
    jobs: list[tuple]
    progress: Callable[[JobDone], None]
    turn: Callable[[tuple], int]
    results: dict[int, Any] = field(default_factory=dict)
    """Results by the index of the job."""

    @property
    def is_done(self) -> bool:
        """Whether all jobs are finished."""
        return len(self.results) == len(self.jobs)

    def add(self, index: int, result: Any) -> None:
        """Store a result."""
        self.results[index], job = result, self.jobs[index]
        self.progress(JobDone(len(self.results), len(self.jobs), name_of(job), result, job))


class Workers:
    """A pool of processes that run jobs; for a single one, this process.

    Args:
        number: number of processes.
        interpret: whether the processes use Triton's interpreter; None is like this process.
    """

    def __init__(self, number: int = 1, *, interpret: bool | None = None) -> None:
        self.number, self.interpret = number, interpret
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()
        self._locks: tempfile.TemporaryDirectory | None = None
        self._waiting: list[tuple[Batch, int]] = []
        self._open: dict[Future, tuple[Batch, int]] = {}

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

    def start(self, load: Callable[[], None]) -> None:
        """Start the processes, if there are several, before there are jobs.

        Args:
            load: function of the module that imports the dependencies of the jobs; it takes long
                enough that each process gets one call.
        """
        if self.number > 1:
            self._submit([(Batch(load, [()], print, len), 0)] * self.number)

    def map(
        self,
        function: Callable,
        jobs: Iterable[tuple],
        progress: Callable[[JobDone], None] = lambda _: None,
    ) -> list[Any]:
        """Call a function with the arguments of every job, and wait for all; see `begin`."""
        return self.finish(self.begin(function, jobs, progress))

    def begin(
        self,
        function: Callable,
        jobs: Iterable[tuple],
        progress: Callable[[JobDone], None] = lambda _: None,
        turn: Callable[[tuple], int] = lambda _: 0,
    ) -> Batch:
        """Queue jobs for the processes, which begin when a batch is waited for.

        Args:
            function: function of a module, as other processes import it.
            jobs: arguments of the calls; the first ones name the job.
            progress: called for each finished job while any batch is waited for.
            turn: priority of a job; lower ones begin first, across all batches.
        """
        batch = Batch(function, list(jobs), progress, turn)
        if self.number > 1 or self.interpret is not None:
            self._waiting += [(batch, index) for index in range(len(batch.jobs))]
        return batch

    def begin_ahead(self, calls: Iterable[tuple], turn: int) -> None:
        """Queue calls whose results nobody reads, if there are several processes.

        Args:
            calls: a function and its arguments each.
            turn: priority of the calls; see `begin`.
        """
        if self.number > 1:
            for function, *arguments in calls:
                self.begin(function, [tuple(arguments)], turn=lambda _: turn)

    def finish(self, batch: Batch) -> list[Any]:
        """Wait for a batch.

        Returns:
            The results, in the order of the jobs.
        """
        if self._waiting:
            self._waiting.sort(key=lambda each: each[0].turn(each[0].jobs[each[1]]))
            self._open |= self._submit(self._waiting)
            self._waiting = []
        while self._open and not batch.is_done:
            for future in wait(self._open, return_when=FIRST_COMPLETED).done:
                of, index = self._open.pop(future)
                of.add(index, future.result())
        for index, job in enumerate(batch.jobs):
            if index not in batch.results:  # there are no processes
                batch.add(index, batch.function(*job))
        return [batch.results[index] for index in range(len(batch.jobs))]

    def _submit(self, jobs: list[tuple[Batch, int]]) -> dict[Future, tuple[Batch, int]]:
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
                futures = {
                    self._pool.submit(batch.function, *batch.jobs[index]): (batch, index)
                    for batch, index in jobs
                }
            self._processes |= set(active_children()) - others
            return futures
        finally:
            if before is None:
                os.environ.pop("TRITON_INTERPRET", None)
            else:
                os.environ["TRITON_INTERPRET"] = before


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block Ctrl-C in the block, so that processes started in it never receive it.

    A terminal sends Ctrl-C to all its processes. This process receives it after the block.
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
    """Share cores and compiled kernels with the other processes."""
    torch.set_num_threads(threads)
    compile_each_once(locks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be held back
