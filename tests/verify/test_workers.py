"""Processes that do jobs: Ctrl-C is the business of the first one alone."""

import signal
from concurrent.futures import Future
from unittest import mock

import pytest
import torch
from marks import needs_triton

from arbcli.verify import workers
from arbcli.verify.workers import Workers, _interrupts_held_back


def held_back(_: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
def test_no_worker_ever_gets_an_interrupt():
    with Workers(2) as workers:
        assert workers.run([(held_back, 0), (held_back, 1)]) == [True, True]
    assert not held_back(0)


@pytest.mark.parametrize(("number", "share"), [(2, 4), (3, 2), (12, 1)])
def test_workers_share_the_threads(number, share, monkeypatch):
    pool = mock.Mock(side_effect=KeyError)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    with pytest.raises(KeyError), Workers(number) as some:
        some.run([(held_back, 0), (held_back, 1)])
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


def fail_second(number: int) -> int:
    if number == 2:
        raise RuntimeError("not foreseen")
    return -number


def test_error_of_one_job_is_not_lost():
    with pytest.raises(RuntimeError, match="not foreseen"), Workers(1) as some:
        some.run([(fail_second, number) for number in (1, 2, 3)])


@pytest.mark.parametrize("number", [1, 2])
def test_results_are_in_the_order_of_the_jobs(number, monkeypatch):
    """However they end; each is told of once."""

    def submit(_, jobs):
        futures = {}
        for index, (function, argument) in reversed([*enumerate(jobs)]):
            future = Future()
            future.set_result(function(argument))
            futures[future] = index
        return futures

    monkeypatch.setattr(Workers, "_submit", submit)
    told = []
    results = Workers(number).run(
        [(fail_second, n) for n in (1, 3, 5)], lambda index, result: told.append((index, result))
    )
    assert results == [-1, -3, -5]
    assert sorted(told) == [(0, -1), (1, -3), (2, -5)]


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_interpreter_of_a_worker_does_nothing_that_has_no_effect(monkeypatch):
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.sanitize_overflow  # the tests' own asks for it, too
    started = mock.Mock()
    for name in ("compile_each_once", "interpret_faster", "signal", "torch"):
        monkeypatch.setattr(workers, name, getattr(started, name))
    workers._start_process(3, "locks")
    started.torch.set_num_threads.assert_called_once_with(3)
    started.compile_each_once.assert_called_once_with("locks")
    started.interpret_faster.assert_called_once_with()
