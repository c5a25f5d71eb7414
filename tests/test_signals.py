"""The first signal that asks to stop is kept or raised, the second has its own effect again."""

import os
import signal
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from arbcli import __main__, cli
from arbcli.signals import (
    HANGUP,
    STOPPING,
    Interrupted,
    RaisedSignal,
    RememberedSignal,
    exit_code,
)


def unheard(number: int, _frame: object) -> None:
    pytest.fail(f"nobody listened to {signal.Signals(number).name}")


@pytest.fixture
def set_before() -> Iterator[Callable]:
    """Set what a signal does before anyone listens; the tests may run where some are ignored."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:
        signal.signal(number, unheard)
    yield signal.signal
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("name", "code"), [("SIGHUP", 129), ("SIGINT", 130), ("SIGTERM", 143)])
def test_exit_code_is_that_of_the_signal(name, code):
    assert exit_code(name) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_finds_what_was_there_before(number, set_before):
    came = []
    set_before(number, lambda *_: came.append("second"))
    with RememberedSignal() as remembered:
        signal.raise_signal(number)
        assert remembered.received == number
        assert came == []
        signal.raise_signal(number)
        assert came == ["second"]


@pytest.mark.parametrize("number", STOPPING)
def test_signal_is_raised_by_its_name(number, set_before):
    with pytest.raises(Interrupted) as caught, RaisedSignal():
        signal.raise_signal(number)
    assert caught.value.name == signal.Signals(number).name
    assert not isinstance(caught.value, Exception)
    assert [signal.getsignal(each) for each in STOPPING] == [unheard] * len(STOPPING)


@pytest.mark.parametrize("listener", [RememberedSignal, RaisedSignal])
def test_hangup_that_is_ignored_is_not_listened_to(listener, set_before):
    """As `nohup` has it; the others are listened to all the same."""
    set_before(HANGUP, signal.SIG_IGN)
    with listener():
        assert signal.getsignal(HANGUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, unheard)
        for _ in range(2):
            signal.raise_signal(HANGUP)
    assert signal.getsignal(HANGUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == unheard


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_other_signals_are_listened_to_though_they_were_ignored(number, set_before):
    """A shell ignores the SIGINT of what it runs in the background, which `kill` may send."""
    set_before(number, signal.SIG_IGN)
    with RememberedSignal() as remembered:
        signal.raise_signal(number)
    assert remembered.received == number
    assert signal.getsignal(number) == signal.SIG_IGN


def test_hangup_that_is_ignored_stays_so_after_another_signal(set_before):
    set_before(HANGUP, signal.SIG_IGN)
    with RememberedSignal() as remembered:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(HANGUP)
        assert signal.getsignal(HANGUP) == signal.SIG_IGN
    assert remembered.received == signal.SIGTERM
    assert signal.getsignal(HANGUP) == signal.SIG_IGN


@pytest.mark.parametrize("before", [unheard, signal.SIG_DFL])
def test_hangup_that_comes_twice_has_no_effect_of_its_own(before, set_before):
    """A terminal that is closed sends more than one."""
    set_before(HANGUP, before)
    with RememberedSignal() as remembered:
        signal.raise_signal(HANGUP)
        assert signal.getsignal(HANGUP) == signal.SIG_IGN
        signal.raise_signal(HANGUP)
    assert remembered.received == HANGUP
    assert signal.getsignal(HANGUP) == before


@pytest.mark.parametrize("ignored", STOPPING)
def test_program_listens_from_its_start_to_what_is_not_ignored(ignored, set_before, monkeypatch):
    """As `nohup` ignores a SIGHUP, and a shell the SIGINT of what it runs in the background."""
    seen = {}
    found = lambda: seen.update({n: signal.getsignal(n) for n in STOPPING})  # noqa: E731
    monkeypatch.setattr(cli, "main", found)
    set_before(ignored, signal.SIG_IGN)
    __main__.main()
    assert seen == {n: signal.SIG_IGN if n == ignored else __main__._stop for n in STOPPING}


@pytest.mark.parametrize("number", STOPPING)
def test_program_that_is_still_loaded_is_ended_with_a_line(number, monkeypatch, capfd):
    ended = mock.Mock(side_effect=SystemExit)  # as it does not return
    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit):
        __main__._stop(number, None)
    assert ended.call_args.args == (3,)
    name = signal.Signals(number).name
    assert capfd.readouterr() == ("", f"error: stopped by {name}, with nothing saved\n")
