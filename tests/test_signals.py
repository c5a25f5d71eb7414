"""The first signal that asks to stop is kept or raised, the second has its own effect again."""

import signal

import pytest

from arbcli.signals import Interrupted, RaisedSignal, RememberedSignal, exit_code


@pytest.mark.parametrize(("name", "code"), [("SIGHUP", 129), ("SIGINT", 130), ("SIGTERM", 143)])
def test_exit_code_is_that_of_the_signal(name, code):
    assert exit_code(name) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_finds_what_was_there_before(number):
    came = []
    before = signal.signal(number, lambda *_: came.append("second"))
    try:
        with RememberedSignal() as remembered:
            signal.raise_signal(number)
            assert remembered.received == number
            assert came == []
            signal.raise_signal(number)
            assert came == ["second"]
    finally:
        signal.signal(number, before)


def test_signal_is_raised_by_its_name():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught, RaisedSignal():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.name == "SIGTERM"
    assert not isinstance(caught.value, Exception)
    assert signal.getsignal(signal.SIGTERM) == before
