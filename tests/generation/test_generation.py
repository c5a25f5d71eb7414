"""Text from a model: the same as from plain forwards, and chosen as it was asked for."""

import gc
from dataclasses import replace
from itertools import product
from unittest import mock
from weakref import ref

import pytest
import torch
from cells import Cell, wide

from arbcli.base.errors import ArbError
from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.generation.decoder import Decoder
from arbcli.generation.generation import continue_text, generate, repetition_period
from arbcli.generation.sampling import Sampling
from arbcli.kernels.runtime import native
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.model.decoding import fused_logits, fuses
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers import rotary
from arbcli.model.parts.base import BlockOutput

GREEDY = Sampling(temperature=0)


def model(device, weights="ternary", dtype=torch.float32, ctx=16) -> LanguageModel:
    config = preset("tiny", dim=32, layers=2, heads=2, ffn=48, ctx=ctx, weights=weights)
    with torch.device(device):
        return build_model(config, dtype)


def continued(lm, prompt: bytes, length: int, sampling: Sampling | None = None) -> bytes:
    return b"".join(generate(lm, prompt, length, sampling))


def test_period_of_a_text_is_the_smallest_that_repeats_to_its_end(device):
    """Of a greedy text with a context of one byte, each byte follows from the one before."""
    begins, count = b"begins " + b"and so on, " * 20, bytes(range(100))
    for repeated, period in (
        (b"", None), (begins, 11), (begins + b"and", 11), (begins + b"ends", None),
        (b"a" * 63, None), (b"a" * 64, 1), (count * 2 + count[:-1], None), (count * 3, 100),
    ):  # fmt: skip
        assert repetition_period(repeated) == period
    text = bytearray()
    options = {"backend": "torch", "on_bytes": text.extend}
    period = continue_text(model(device, ctx=1), "model", b"a", 160, GREEDY, **options).period
    assert period is not None
    assert text[-period:] == text[-2 * period : -period]


@pytest.mark.parametrize(("kind", "backend"), [("plain", None), ("chunked", "torch")])
def test_memory_of_a_text_is_freed_without_a_collector(kind, backend, device):
    """A captured step, which has memory of its own, would else stay until garbage is collected."""
    with torch.device(device):
        lm = build_model(wide(Cell("attention", "mlp", 1, kind).model()), torch.float32)
    gc.disable()
    try:
        with lm.prepared_weights():
            decoder = Decoder(lm, 12, backend=backend)
            decoder.begin(b"abc", GREEDY)
            list(decoder.stream(3))
        kept = ref(decoder), ref(decoder.cache)
        del decoder
        assert [part() for part in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("prompt", "weights"), [(b"a", "ternary"), (b"twelve bytes", "float"), (b"abc", "ste")]
)
def test_greedy_text_is_that_of_whole_forwards(prompt, weights, device):
    lm = model(device, weights)
    expected = prompt
    for _ in range(16 - len(prompt)):
        with torch.no_grad():
            logits = lm(torch.tensor([list(expected)], device=device))
        expected += bytes([int(logits[0, -1].argmax())])
    assert prompt + continued(lm, prompt, 16 - len(prompt), GREEDY) == expected


@pytest.mark.parametrize(
    ("sizes", "window", "texts", "kv"),
    [({"layers": 3}, 5, 2, "int8"), ({"key_heads": 1}, None, 1, None),
     ({"streams": 2}, None, 1, None)],
)  # fmt: skip
def test_prompt_of_any_length_is_read_in_bounded_time_with_the_bits_of_all_of_it(
    sizes, window, texts, kv, device, monkeypatch
):
    """Symbols before the reach of the windows of attention are counted, but not read.

    Of several texts the last slot has the prompt, and the others have none.
    """
    sizes = {"dim": 32, "layers": 2, "heads": 2, "ffn": 40, "ctx": 8} | sizes
    config = preset("tiny", **sizes)
    wide, *others = config.main.blocks
    narrow = replace(wide, mixer=replace(wide.mixer, window=window))
    config = replace(config, stages=(replace(config.main, blocks=(narrow, *others)),))
    lm = build_model(config, torch.float32).to(device)
    text = bytes(n * n % 251 for n in range(120))
    monkeypatch.setattr(rotary, "ROWS_AT_ONCE", 8)  # rows that are not asked for are zeros
    read, results = [], []
    lm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    known = config.reach
    assert known == (window or 8) - 1 + (config.layers - 1) * 7
    for reach in (known, None):
        monkeypatch.setattr(ModelConfig, "reach", reach)
        read.clear()
        with lm.prepared_weights(), lm.cached_as(kv):
            decoder, slot = Decoder(lm, 400, texts, capture=False, prompt=80), texts - 1
            with pytest.raises(ValueError, match="prompt of 80 bytes was expected, got 79"):
                decoder.begin(text[:79], slot=slot)
            progress = mock.Mock()
            decoder.begin(text, Sampling(seed=2), slot=slot, progress=progress)
            at_once, told = decoder.cache.window, [call.args for call in progress.mock_calls]
            size = told[-1][1]
            assert told == [
                (min(stop, size), size) for stop in range(at_once, size + at_once, at_once)
            ]
            number = sum(read)
            cache = decoder.cache if texts == 1 else decoder.cache.texts[slot]
            parts = [part.clone() for part in cache.main.blocks[-1].tensors()]
            decoder.step(9)
            results.append((number, parts, decoder.end(slot, 9)()))
    (few, parts, made), (every, whole, wanted) = results
    assert every == len(text) - 1
    assert few < 2 * (known + 2 * 8) < every
    assert made == wanted
    for part, expected in zip(parts, whole, strict=True):
        assert torch.equal(part, expected)


def test_text_ends_before_a_symbol_and_counts_so_many(device):
    lm = model(device)
    whole = continued(lm, b"abc", 12, GREEDY)
    end = whole[5]
    wanted = whole[: whole.index(end)]
    assert b"".join(generate(lm, b"abc", 12, GREEDY, ends={end, -1})) == wanted
    report = continue_text(lm, "it", b"abc", 12, GREEDY, backend=None, ends={end})
    assert report.length == len(wanted)
    assert report.text == wanted.decode(errors="replace")


@torch.no_grad()
@pytest.mark.skipif(not native.available(), reason="there is no C compiler")
def test_fused_head_normalises_the_stream():
    """Greedy text would not tell: the likeliest byte stays whatever the size."""
    lm = build_model(preset("tiny", dim=64, layers=1, heads=2, ffn=64), torch.bfloat16)
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with lm.prepared_weights(), use_backend("native"):
        assert fuses(lm, x)
        small, large = (fused_logits(lm, size * x).float() for size in (1, 8))
        torch.testing.assert_close(small, lm.logits(BlockOutput(x)).float(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(large, small, rtol=0.02, atol=0.02)
    assert small.std() > 0.1


def test_no_more_bytes_than_the_text_has_room_for(device):
    decoder = Decoder(model(device), 10)
    decoder.begin(b"12345678")
    with pytest.raises(ValueError, match="no room for 3 bytes after 8"):
        next(decoder.stream(3))
    with pytest.raises(ValueError, match="no room for 11 bytes in a text of 10"):
        decoder.begin(b"12345678abc")
    decoder = Decoder(model(device), 10, 2)
    for slot, prompt in enumerate((b"1234", b"12345678")):
        decoder.begin(prompt, slot=slot)
    with pytest.raises(ValueError, match="no room for 3 bytes after 8"):
        decoder.step(3)
    decoder.end(1, 0)
    decoder.step(3)
    assert decoder.lengths == {0: 7}


@pytest.mark.parametrize("texts", [1, 2])
def test_slot_without_a_text_is_refused(texts, device):
    """It has none before its first prompt, after its end, and after a prompt that is refused."""
    decoder, slot = Decoder(model(device), 10, texts), 0

    def check() -> None:
        for use in (lambda: next(decoder.stream(3)), lambda: decoder.end(slot, 1)):
            with pytest.raises(ValueError, match="no text has begun in slot 0"):
                use()

    check()
    if texts > 1:
        decoder.begin(b"abc", slot=1)
    check()
    decoder.begin(b"abc")
    decoder.end(slot, 1)
    check()
    decoder.begin(b"abc")
    with pytest.raises(ArbError, match="the prompt is empty"):
        decoder.begin(b"")
    check()
    if texts > 1:
        decoder.step(7)
        assert decoder.cache.position.tolist() == [0, 9]


def test_text_after_others_in_a_slot_is_that_of_a_new_decoder(device):
    """Whatever the last text was, where it stopped, and how its bytes were sampled."""
    lm, first_texts = model(device), {}
    ways = {b"a": Sampling(seed=2), b"twelve bytes": GREEDY, b"ab": Sampling(top_k=3, seed=4)}
    for texts in (1, 2):
        with lm.prepared_weights():
            used = Decoder(lm, 24, texts)
            for prompt, sampling in [*ways.items(), *ways.items()][:4]:
                new = Decoder(lm, 24, texts)
                for decoder in (used, new):
                    decoder.begin(prompt, sampling)
                    room = 24 - len(prompt)
                    text = b"".join(map(bytes, decoder.stream(room)))
                    assert first_texts.setdefault((texts, prompt), text) == text
                used.begin(prompt, sampling)
                next(used.stream(9))


SAMPLED = Sampling(top_k=20, top_p=0.9, seed=4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sampling", "weights", "kv"),
    [
        *product((GREEDY, SAMPLED), ("ternary", "float", "ste"), [None]),
        *product([GREEDY], ["ternary"], ("fp8", "int8")),
    ],
    ids=str,
)
def test_captured_step_gives_the_bits_of_an_eager_step(sampling, weights, kv, device):
    lm, results = model(device, weights, torch.bfloat16, ctx=64), []
    with lm.prepared_weights(), lm.cached_as(kv):
        for capture in (False, True):
            decoder = Decoder(lm, 300, capture=capture)
            decoder.begin(b"0123456789" * 5, sampling)
            text = b"".join(decoder.stream(250))
            rings = [part for b in decoder.cache.main.blocks for part in b.tensors()]
            results.append((text, [part.view(torch.int8) for part in rings]))
    (text, eager), (same, captured) = results
    assert text == same
    assert all(map(torch.equal, eager, captured))
