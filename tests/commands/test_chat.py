"""The prompt loop: lines are continued after the text so far, and Ctrl-C stops the text only."""

import signal
from types import SimpleNamespace
from unittest import mock

import pytest

from arbcli.base.errors import ArbError
from arbcli.base.signals import Interrupted
from arbcli.commands import _chat
from arbcli.generation.generation import generate
from arbcli.generation.load import load_model
from arbcli.generation.sampling import Sampling


@pytest.fixture
def model(saved):
    return load_model(saved(), device="cpu", compute="fp32")


@pytest.fixture
def typed(monkeypatch):
    """Type lines; what is not text is done instead."""

    def type_lines(*lines) -> None:
        waiting = iter([*lines, None])

        def read(_mark):
            line = next(waiting)
            return line() if callable(line) else line

        monkeypatch.setattr(_chat, "read_line", read)

    return type_lines


def test_lines_are_continued_after_the_text_so_far(model, typed, capfd):
    typed("abc", "", "de", "a line that is longer than the context of the model")
    _chat.chat(model, 5, Sampling(seed=2**31 - 2), "torch")
    text, reports = b"", []
    long = b"\na line that is longer than the context of the model"
    for line, seed in ((b"abc", 2**31 - 2), (b"", 2**31 - 1), (b"\nde", 0), (long, 1)):
        text += line
        reports.append(b"".join(generate(model, text[-32:], 5, Sampling(seed=seed))))
        text += reports[-1]
    stdout, stderr = capfd.readouterr()
    assert stdout == "".join(part.decode(errors="replace") for part in reports)
    assert _chat.WELCOME in stderr


def test_text_of_tokens_is_cut_to_the_tokens_of_the_context():
    tokenizer = SimpleNamespace(beginning=[7], encode=lambda text: [*range(len(text) // 4)])
    model = SimpleNamespace(config=SimpleNamespace(ctx=9), tokenizer=tokenizer)
    assert _chat.Continued(model).ask(b"a" * 4 * 8) == [7, *range(8)]
    assert _chat.Continued(model).ask(b"a" * 4 * 11) == [*range(2, 11)]
    model.tokenizer = None
    assert _chat.Continued(model).ask(b"0123456789") == b"123456789"


def test_ctrl_c_stops_the_text_and_not_the_program(model, typed, capfd, monkeypatch):
    steps = []

    def slow(*arguments, **options):
        assert options.pop("ahead") == 2
        for part in generate(*arguments, **options):
            steps.append(part)
            if len(steps) == 2:
                signal.raise_signal(signal.SIGINT)
            yield part

    monkeypatch.setattr("arbcli.generation.generation.generate", slow)
    typed(lambda: signal.raise_signal(signal.SIGINT), "a", "b")
    _chat.chat(model, 5, Sampling(), "torch", ahead=2)
    assert len(steps) == 2 + 5


def test_refused_message_does_not_end_the_chat(model, typed, capfd):
    conversation = mock.Mock(ends=())
    conversation.ask.side_effect = ArbError("it is bad", "rephrase it"), b"", b"abc"
    typed("bad", "a template may write nothing", "abc")
    _chat.chat(model, 5, Sampling(), "torch", None, conversation)
    assert [len(call.args[0]) for call in conversation.append_answer.mock_calls] == [0, 5]
    assert "bad\nhint: rephrase it\nerror: the prompt is empty\n" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_the_program(number, model, typed):
    typed(lambda: signal.raise_signal(number))
    with pytest.raises(Interrupted):
        _chat.chat(model, 5, Sampling(), "torch")
