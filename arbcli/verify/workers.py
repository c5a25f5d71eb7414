"""Share work among processes: Triton compiles, and interprets, on one core at a time."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch


class Workers:
    """Processes that do jobs, or this process where there is to be one only.

    Args:
        number: of processes.
        interpret: whether kernels are for Triton's interpreter there; None is as it is here.
    """

    def __init__(self, number: int = 1, *, interpret: bool | None = None) -> None:
        self.number, self.interpret = number, interpret
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def map(
        self,
        function: Callable,
        jobs: Iterable[tuple],
        progress: Callable[[str], None] = lambda _: None,
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
            named = " ".join(str(part) for part in jobs[index][:2] if part is not None)
            progress(f"{count}/{len(jobs)}  {named}")
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
                self._pool = ProcessPoolExecutor(
                    self.number, get_context("spawn"), torch.set_num_threads, (threads,)
                )
            return {self._pool.submit(function, *job): i for i, job in enumerate(jobs)}
        finally:
            if before is None:
                os.environ.pop("TRITON_INTERPRET", None)
            else:
                os.environ["TRITON_INTERPRET"] = before
