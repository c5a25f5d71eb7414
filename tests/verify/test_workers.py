"""Processes that do jobs: Ctrl-C is the business of the first one alone."""

import signal

import pytest

from arbcli.verify.workers import Workers, _interrupts_held_back


def held_back(_: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
def test_no_worker_ever_gets_an_interrupt():
    with Workers(2) as workers:
        assert workers.run([(held_back, 0), (held_back, 1)]) == [True, True]
    assert not held_back(0)


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


def fail_second(number: int) -> int:
    if number == 2:
        raise RuntimeError("not foreseen")
    return -number


def test_error_of_one_job_is_not_lost():
    with pytest.raises(RuntimeError, match="not foreseen"), Workers(1) as some:
        some.run([(fail_second, number) for number in (1, 2, 3)])
