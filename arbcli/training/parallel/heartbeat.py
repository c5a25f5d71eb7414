"""Heartbeats of a run's processes: all of them name the lost one, within a bounded time.

Each process counts in a shared store, and watches the counters of the others. A thread does so, as
a collective may wait for ever for a machine that hangs or cannot be reached.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread

import torch.distributed as dist

from arbcli.base.environment import parse_env_int
from arbcli.base.errors import ArbError
from arbcli.base.signals import Interrupted
from arbcli.training.parallel.launch import fail_once
from arbcli.training.parallel.process import RESUME, LostProcess, call_with_timeout, process_name

LOST = "ARB_LOST_SECONDS"
"""Environment variable with the time in seconds after which a silent process is lost."""
LOST_SECONDS = 60
BEAT_SECONDS = 1.0
SUSPECT_SECONDS = 3.0
"""Time after which a silent process is lost once a collective has failed."""
LEAVE_SECONDS = 2.0
"""Time that the main thread has to end by itself."""
DONE = 2**40
"""Added to the counter of a process that has left the run."""
REASON = "reason"
"""Key of the reason why the run ended, which the first process that knows it writes."""


class Heartbeat:
    """The heartbeat of this process, and the watch over the others.

    All processes create one, and go on when all have done so.

    Args:
        store: a connection to the shared store that only the heartbeat uses.
        rank: rank of this process.
        hosts: name of the machine of each process.

    Raises:
        ArbError: the environment variable `LOST` is invalid.
    """

    def __init__(self, store: dist.Store, rank: int, hosts: Sequence[str]) -> None:
        self._store, self._rank, self._hosts = store, rank, hosts
        limit = parse_env_int(os.environ, LOST, 1) if LOST in os.environ else LOST_SECONDS
        self._limit = float(limit)
        self._keys = [f"beat-{rank}" for rank in range(len(hosts))]
        self._seen: list[tuple[int, float]] = [(0, 0.0)] * len(hosts)
        """Counter of each process, and when it last changed."""
        self._suspects, self._has_reason, self._left = Event(), Event(), Event()
        self._reason = ""
        """Why the run ended, once `_has_reason` is set."""
        self._store.add(self._keys[rank], 1)

    def start(self) -> None:
        """Start to watch; all processes have created their heartbeats."""
        self._seen = [(0, time.monotonic())] * len(self._hosts)
        Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Leave the run at its end."""
        self._left.set()
        self._write_to_store(lambda: self._store.add(self._keys[self._rank], DONE))

    def leave(self, error: BaseException) -> ArbError | None:
        """Leave the run after an error, and tell the others.

        Returns:
            The error to report if another process was lost; None if this process has failed.
        """
        if isinstance(error, LostProcess):
            self._suspects.set()
            self._has_reason.wait(min(self._limit, SUSPECT_SECONDS) + 3 * BEAT_SECONDS)
        self._left.set()
        lost = None
        if self._has_reason.is_set() and isinstance(error, LostProcess | Interrupted):
            lost = ArbError(self._reason, RESUME)
        else:
            text = str(error).splitlines()[:1] or [type(error).__name__]
            reason = f"{process_name(self._rank, self._hosts)} failed: {text[0]}"
            self._write_to_store(lambda: self._store.compare_set(REASON, "", reason))
        if self._rank == 0:  # the store may end with this process, and others are to read it
            time.sleep(1.5 * BEAT_SECONDS)
        return lost

    def _watch(self) -> None:
        """Beat until this process leaves, or until another is lost; then end this process."""
        reason = None
        while reason is None:
            if self._left.wait(min(BEAT_SECONDS, self._limit / 4)):
                return
            try:
                reason = call_with_timeout(self._limit, self._beat)
            except TimeoutError:
                machine = f"the machine of {process_name(0, self._hosts)}"
                reason = f"no answer for {self._limit:.0f} s from {machine}"
            except RuntimeError:  # the store is closed
                reason = f"{process_name(0, self._hosts)} or its machine is lost"
        self._reason = f"the run ended: {reason}"
        self._has_reason.set()
        if not self._left.wait(LEAVE_SECONDS):
            fail_once(self._reason, RESUME)
            os._exit(2)

    def _beat(self) -> str | None:
        """Count, and return why the run has ended, if it has."""
        self._store.add(self._keys[self._rank], 1)
        if self._store.check([REASON]):
            return self._store.get(REASON).decode()
        counts, now = map(int, self._store.multi_get(self._keys)), time.monotonic()
        for rank, count in enumerate(counts):
            if count != self._seen[rank][0]:
                self._seen[rank] = count, now
        limit = self._limit
        if self._suspects.is_set():
            limit = min(limit, SUSPECT_SECONDS)
        ages = {r: now - since for r, (count, since) in enumerate(self._seen) if count < DONE}
        if max(ages.values(), default=0.0) < limit:
            return None
        silent = [rank for rank in ages if ages[rank] > limit / 2]
        first, *others = sorted(silent, key=lambda rank: -ages[rank])
        others_text = f" and {len(others)} more" if others else ""
        reason = f"no answer for {limit:.0f} s from {process_name(first, self._hosts)}{others_text}"
        return self._store.compare_set(REASON, "", reason).decode()  # the first is decisive

    def _write_to_store(self, call: Callable[[], object]) -> None:
        """Write to the store, which may be lost or unreachable."""
        with suppress(RuntimeError, TimeoutError):
            call_with_timeout(LEAVE_SECONDS, call)
