"""Texts join and leave at any step, and each is what it is alone."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cells import Cell

from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.data.tokens import TokenStream
from arbcli.generation.batch import Request, generate_batch
from arbcli.generation.sampling import Sampling
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.serve import engine as engines
from arbcli.serve.engine import Busy, Closed, Engine
from arbcli.serve.texts import Output, Piece, Symbol, Text

DENSE = preset("tiny", dim=32, layers=2, heads=2, ffn=48, ctx=16)
KINDS = {
    "dense": DENSE,
    "hnet": Cell("attention", "mlp", 1, "chunked").model(),
    "compressed": Cell("compressed", "mlp", 1, "plain").model(),
    "mamba": Cell("mamba", "mlp", 1, "plain").model(),
}
"""`tests/generation/test_batch.py` has all parts in a batch."""
WAIT = 60
"""Time in seconds after which a text that does not come is an error."""


def model_of(config: ModelConfig, device: torch.device) -> LanguageModel:
    with torch.device(device):
        model = build_model(config, torch.float32)
    if config.vocabulary > 256:
        model.tokenizer = SimpleNamespace(
            beginning=[], ends=frozenset(), encode=list,
            decode=lambda tokens: "".join(map(chr, tokens)),
        )  # fmt: skip
    return model


class Heard:
    """A text with what the engine said of it; `at` holds what to do after so many symbols."""

    def __init__(self, prompt: bytes, length: int, seed: int, **options) -> None:
        self.pieces: list[Piece] = []
        self.ended = threading.Event()
        self.at: dict[int, Callable[[], None]] = {}
        sampling = Sampling(seed=seed, temperature=options.pop("temperature", 1.0))
        self.text = Text(
            prompt=prompt, length=length, sampling=sampling, on_piece=self.hear, **options
        )

    def hear(self, piece: Piece) -> None:
        self.pieces.append(piece)
        count = sum(len(piece.symbols) for piece in self.pieces if not piece.echoed)
        for number in [number for number in self.at if number <= count]:
            self.at.pop(number)()
        if piece.finish:
            self.ended.set()

    def symbols(self, *, echoed: bool = False) -> list[Symbol]:
        assert self.ended.wait(WAIT)
        return [s for piece in self.pieces if piece.echoed == echoed for s in piece.symbols]


def asked() -> list[Heard]:
    """Return texts of several lengths and options, without a tokenizer."""
    return [
        Heard(b"it was longer", 8, 1, logprobs=3, echo=True),
        Heard(b"a", 5, 2),
        Heard(b"words", 4, 3, stream=2, temperature=0.0),
        Heard(b"ab", 3, 4, logprobs=0),
    ]


@pytest.mark.parametrize(
    ("kind", "steps", "ahead"),
    [*((kind, 1, 0) for kind in KINDS if kind != "hnet"), ("hnet", 4, 1)],
)
def test_text_that_joins_late_has_the_symbols_that_it_has_alone(kind, steps, ahead, device):
    """Also in groups of steps of which one runs ahead, as on a GPU."""
    model = model_of(KINDS[kind], device)
    with Engine(model, Path("run/step"), texts=2, positions=24) as engine:
        alone = asked()
        for heard in alone:
            engine.submit([heard.text])
            assert heard.ended.wait(WAIT)
    engine = Engine(model, Path("run/step"), texts=3, positions=24)
    engine._steps, engine._ahead = steps, ahead
    with engine:
        first, *others = together = asked()
        left = Heard(b"left", 20, 9)
        first.at = {1: lambda: engine.submit([left.text])}
        for step, heard in zip((2, 3, 5), others, strict=True):
            first.at[step] = lambda text=heard.text: engine.submit([text])
        left.at[2] = lambda: engine.cancel([left.text])
        engine.submit([first.text])
        for one, other in zip(alone, together, strict=True):
            assert one.symbols() == other.symbols()
            assert one.symbols(echoed=True) == other.symbols(echoed=True)
            assert len(one.symbols()) == one.text.length
    assert len({tuple(heard.symbols()) for heard in alone}) == len(alone)
    assert sum(len(piece.symbols) for piece in left.pieces) < 20
    assert not engine.num_running


def test_text_is_that_of_a_batch(device):
    model = model_of(DENSE, device)
    request = Request(prompt=b"it was", length=12, sampling=Sampling(seed=3), stream=1)
    ((_, text),) = generate_batch(model, [request])
    with Engine(model, Path("run/step"), texts=2, positions=32) as engine:
        heard = Heard(b"it was", 12, 3, temperature=0.8, stream=1)
        engine.submit([heard.text])
        assert b"".join(symbol.content for symbol in heard.symbols()) == text


@pytest.mark.parametrize("kind", ["dense", "hnet", "compressed"])
@torch.no_grad()
def test_log_probabilities_of_a_prompt_are_those_of_the_model(kind, device):
    """Of a prompt that is no longer than the context, so that all of it is read at once."""
    model, prompt = model_of(KINDS[kind], device), b"it was long"
    with Engine(model, Path("run/step"), texts=2, positions=32) as engine:
        heard = Heard(prompt, 1, 0, logprobs=256, echo=True)
        engine.submit([heard.text])
        first, *scored = heard.symbols(echoed=True)
        (generated,) = heard.symbols()
    ids = torch.tensor([[*prompt, generated.id]], device=device)
    expected = model(ids)[0].log_softmax(-1)
    assert first.logprob is None
    assert bytes(symbol.id for symbol in [first, *scored]) == prompt
    for row, symbol in zip(expected, [*scored, generated], strict=False):
        torch.testing.assert_close(symbol.logprob, float(row[symbol.id]), rtol=1e-3, atol=2e-3)
        best = [logprob for _, logprob in symbol.likeliest]
        assert len(best) == engines.MAX_LOGPROBS
        torch.testing.assert_close(best[0], float(row.max()), rtol=1e-3, atol=2e-3)
        assert best == sorted(best, reverse=True)


def test_queue_is_bounded_and_places_are_freed(device):
    model = model_of(DENSE, device)
    with Engine(model, Path("run/step"), texts=2, positions=32, queue=1) as engine:
        texts = [Heard(b"a", 20, seed) for seed in range(4)]
        with pytest.raises(Busy):
            engine.submit([heard.text for heard in texts])
        full = threading.Event()

        def fill() -> None:
            with pytest.raises(Busy):
                engine.submit([texts[2].text, texts[3].text])
            engine.submit([texts[2].text])
            engine.cancel([texts[2].text])
            assert engine.num_waiting == 0
            engine.cancel([texts[0].text, texts[1].text])
            full.set()

        texts[0].at[1] = fill
        engine.submit([texts[0].text, texts[1].text])
        assert full.wait(WAIT)
        engine.submit([texts[3].text])
        assert len(texts[3].symbols()) == 20
        assert not texts[0].ended.is_set()
    with pytest.raises(Closed):
        engine.submit([texts[0].text])


@pytest.mark.parametrize(("function", "length"), [("begin", 20), ("step", 20), ("_deliver", 1)])
def test_failure_ends_all_texts(function, length, device, monkeypatch):
    """Also those whose last step was launched and not delivered."""
    engine, told = Engine(model_of(DENSE, device), Path("run/step"), texts=2, positions=32), []
    engine.on_failure = lambda: told.append(engine.failure)
    engine.start()
    failing = engine if function == "_deliver" else engine._decoder
    monkeypatch.setattr(failing, function, lambda *_, **__: 1 / 0)
    texts = [Heard(b"a", length, seed) for seed in range(3)]
    engine.submit([heard.text for heard in texts])
    assert all(heard.ended.wait(WAIT) for heard in texts)
    assert {heard.pieces[-1].finish for heard in texts} == {"error"}
    with pytest.raises(ZeroDivisionError):
        engine.close()
    assert told == [engine.failure]


def cut_at_stop(text: bytes, stops: list[bytes]) -> tuple[bytes, str]:
    """Return a text up to the stop string that is complete first."""
    for end in range(len(text) + 1):
        if places := [at for stop in stops if (at := text[:end].find(stop)) >= 0]:
            return text[: min(places)], "stop"
    return text, "length"


def test_output_ends_before_a_stop_string_and_never_shows_its_beginning():
    draw, ended = random.Random(0), 0
    for _ in range(500):
        text = bytes(draw.choices(b"ab", k=12))
        stops = [
            bytes(draw.choices(b"ab", k=draw.randint(1, 6))) for _ in range(draw.randint(0, 3))
        ]
        expected, reason = cut_at_stop(text, stops)
        asked = Text(prompt=b"a", length=12, sampling=Sampling(), stops=tuple(stops))
        output, shown, left = Output(asked, None), b"", [*map(Symbol, text)]
        while left:
            size = draw.randint(1, 4)
            shown += b"".join(symbol.content for symbol in output.take(left[:size]))
            assert expected.startswith(shown)
            del left[:size]
        assert (shown, output.finish) == (expected, reason)
        ended += reason == "stop"
    assert 100 < ended < 400
    engine, output = Engine(model_of(DENSE, "cpu"), Path("run/step")), Output(asked, None)
    output.text.stops = (b"a",)
    engine._deliver(lambda: [[[97.0]]] * 3, {0: output})
    assert engine.num_generated == 1  # of three steps


def test_tokens_are_spelled_with_the_characters_that_they_complete():
    """And a stop string may end within a token."""

    class Halves:
        """A tokenizer whose token is half of a character of two bytes."""

        def decode(self, tokens):
            return bytes(tokens).decode(errors="replace")

    stream = TokenStream(Halves(), b"x")
    parts = [stream.add([byte]) for byte in "aéb".encode() + b"\xc3"]
    assert parts == [b"a", b"", "é".encode(), b"b", b""]
    assert stream.flush() == "\ufffd".encode()
    text = Text(prompt=b"x", length=9, sampling=Sampling(), stops=(b"\xc3",), ends=frozenset([3]))
    output = Output(text, Halves())
    contents = [symbol.content for symbol in output.take(map(Symbol, "aéb".encode()))]
    assert (contents, output.finish) == ([b"a", b""], "stop")
    output = Output(replace(text, stops=()), Halves())
    contents = [symbol.content for symbol in output.take(map(Symbol, [97, 0xC3, 3, 98]))]
    assert (contents, output.finish) == ([b"a", b"", "\ufffd".encode()], "stop")
