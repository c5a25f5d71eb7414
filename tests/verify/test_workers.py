"""Processes that do jobs: Ctrl-C is the business of the first one alone."""

import signal
from unittest import mock

import pytest
import torch

from arbcli.verify import workers
from arbcli.verify.workers import Workers, _interrupts_held_back


def held_back(_: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
def test_no_worker_ever_gets_an_interrupt():
    with Workers(2) as workers:
        assert workers.map(held_back, [(0,), (1,)]) == [True, True]
    assert not held_back(0)


@pytest.mark.parametrize(("number", "share"), [(2, 4), (3, 2), (12, 1)])
def test_workers_share_the_threads(number, share, monkeypatch):
    pool = mock.Mock(side_effect=KeyError)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with pytest.raises(KeyError), Workers(number) as some:
        some.map(held_back, [(0,)])
    count, _, start, about = pool.call_args.args
    assert (count, start, about[0]) == (number, workers._start_process, share)


def test_interrupt_that_is_held_back_comes_when_it_is_over():
    held = []
    before = signal.signal(signal.SIGINT, lambda *_: held.append("came"))
    try:
        with _interrupts_held_back():
            signal.raise_signal(signal.SIGINT)
            held.append("over")
    finally:
        signal.signal(signal.SIGINT, before)
    assert held == ["over", "came"]


@pytest.mark.parametrize("kind", [None, KeyError])
def test_processes_are_ended_at_once_after_an_error_alone(kind):
    some, process = Workers(2), mock.Mock()
    some._pool, some._locks, some._processes = mock.Mock(), mock.Mock(), {process}
    some.__exit__(kind, None, None)
    assert process.terminate.called == (kind is not None)
    some._pool.shutdown.assert_called_once_with(cancel_futures=True)
    some._locks.cleanup.assert_called_once_with()


@pytest.mark.parametrize("number", [1, 3])
def test_processes_are_started_before_there_are_jobs(number, monkeypatch):
    given = []
    monkeypatch.setattr(Workers, "_submit", lambda _, jobs: given.extend(jobs))
    Workers(number).start(print)
    assert [batch.function(0) for batch, _ in given] == [None] * (number if number > 1 else 0)
