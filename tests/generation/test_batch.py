"""Several texts at once: each is what it is alone, whatever the others are."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cells import FEW, Cell, each_cell, wide
from graph_parts import graph_config

from arbcli.base.errors import ArbError
from arbcli.config.fields import change_fields
from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.generation import batch as batches
from arbcli.generation.batch import Request, generate_batch
from arbcli.generation.decoder import Decoder
from arbcli.generation.generation import generate
from arbcli.generation.prompts import read_prompts
from arbcli.generation.sampling import Sampling
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.parts.cached import CacheFormat


@pytest.fixture
def lm(device, monkeypatch) -> LanguageModel:
    """A model whose steps have kernels for several texts, by torch where there is no GPU."""
    config = preset("tiny", dim=32, layers=2, heads=2, ffn=48, ctx=16)
    with torch.device(device):
        lm = build_model(config)
    if device.type == "cpu":
        monkeypatch.setattr("arbcli.model.decoding.fits_prepacked", lambda x, _: x.shape[1] == 1)
    return lm


def request(prompt: bytes, length: int, stream: int = 0, **how) -> Request:
    return Request(prompt=prompt, length=length, sampling=Sampling(**how), stream=stream)


REQUESTS = [
    request(b"a", 9), request(b"a prompt longer than the window is", 4, 1),
    request(b"ab", 17, 2), request(b"abc", 1, 3, temperature=0.0),
    request(b"abc", 12, 4, temperature=2.0, top_k=7), request(b"abc", 12, 4, seed=5, top_p=0.7),
]  # fmt: skip
"""Texts that end at different times, wrap around the window, and are chosen in many ways."""


def texts(lm, requests, batch, kv=None) -> list[bytes]:
    reports = dict(generate_batch(lm, requests, batch, kv=kv))
    return [reports[index] for index in range(len(requests))]


def test_a_text_is_the_same_among_any_others(lm):
    alone = [texts(lm, [asked], 1)[0] for asked in REQUESTS]
    assert [len(text) for text in alone] == [asked.length for asked in REQUESTS]
    assert texts(lm, REQUESTS, 2) == alone
    assert texts(lm, REQUESTS[::-1], 5)[::-1] == alone
    assert len(set(alone)) == len(alone)


def test_slot_takes_the_sampling_settings_of_its_new_text(lm):
    """Each of these choices is greedy by one setting alone, and the last by none."""
    settings = ({"top_p": 1e-9}, {"top_k": 1}, {"temperature": 0.0}, {})
    made = texts(lm, [request(b"abc", 9, **({"temperature": 3.0} | how)) for how in settings], 1)
    assert made[0] == made[1] == made[2] != made[3]
    assert made[3:] == texts(lm, [request(b"abc", 9, temperature=3.0)], 1)


def model_of_cell(cell, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    with torch.device(device):
        return build_model(wide(cell.model()), dtype)


@torch.no_grad()
def logits_of(lm: LanguageModel, prompts: tuple[bytes, ...], steps: int = 2) -> torch.Tensor:
    """Read prompts, then a byte more of each text in every step: (steps, texts, 256)."""
    batch = lm.new_cache(24, max(2, len(prompts)))
    if len(prompts) == 1:
        batch = SimpleNamespace(texts=[lm.new_cache(24)], active=torch.ones(1))
    for prompt, cache in zip(prompts, batch.texts, strict=True):
        ids = torch.tensor([[*prompt[:-1]]], dtype=torch.int64, device=lm.device)
        for part in ids.split(cache.window, dim=1) if len(prompt) > 1 else ():
            lm(part, cache)
    batch.active.fill_(1)
    ids = torch.tensor([[prompt[-1]] for prompt in prompts], device=lm.device)
    whole = batch.texts[0] if len(prompts) == 1 else batch
    return torch.stack([lm((ids + 5 * step) % 256, whole)[:, 0] for step in range(steps)])


def check_neighbours(lm, first: bytes, second: bytes, other: bytes) -> None:
    """Two texts have the same logits next to any others, and nearly those of each alone."""
    with lm.prepared_weights():
        logits = logits_of(lm, (first, second, b" "))
        assert torch.equal(logits[:, :2], logits_of(lm, (b"q", first, other, second))[:, [1, 3]])
        for index, prompt in enumerate((first, second)):
            alone = logits_of(lm, (prompt,))
            # loops of a CPU round to 16 bits what they multiply; chunks are read without them
            torch.testing.assert_close(logits[:, index : index + 1], alone, rtol=1e-3, atol=2e-3)


@each_cell(quick=FEW)
def test_text_of_every_cell_is_the_same_among_any_others(cell, device):
    """By the kernels of the device, and where there are none one text after another."""
    lm, (first, second) = model_of_cell(cell, torch.float32, device), (b"it was longer", b"a b")
    check_neighbours(lm, first, second, b"words of it")


def resized(kind: str, **sizes: object) -> ModelConfig:
    fields = {f"mixer.{name}": value for name, value in sizes.items()}
    return change_fields(Cell(kind, "mlp", 1, "plain").model(), fields)


OTHERS = {
    "narrow": resized("attention", head_width=6),
    "without an indexer": resized("compressed", heads=1, head_width=12, top_k="none"),
    "groups": resized("compressed", heads=4, kv_heads=2, head_width=10),
    "graph": graph_config(memgram=True),
}
"""Models of heads, or of keys and values alone, of widths that no kernel reads; and one whose
memories, n-grams and router read each text by itself."""


@pytest.mark.parametrize("name", OTHERS)
def test_text_that_no_kernel_reads_is_the_same_among_any_others(name, device):
    with torch.device(device):
        lm = build_model(OTHERS[name], torch.float32)
    check_neighbours(lm, b"it was longer", b"a b", b"words of it")


@pytest.mark.gpu
@each_cell()
@pytest.mark.parametrize("kv", [None, "int8"])
def test_text_of_every_cell_is_the_same_among_any_others_on_a_gpu(cell, kv):
    """In bf16, each at a place of its own among 2, 9 and 40 texts."""
    lm = model_of_cell(cell, torch.bfloat16, torch.device("cuda"))
    if kv and cell.mixer in ("mamba", "none"):
        pytest.skip("has no keys and values")
    many = [request(bytes([97 + n % 26]) * (1 + n % 13), 6, n) for n in range(40)]
    together = texts(lm, many, 40, kv)
    assert texts(lm, many[::-1], 9, kv)[::-1] == together
    assert texts(lm, many[:3], 2, kv) == together[:3]
    sharp = [request(asked.prompt, 6, temperature=0.0) for asked in many[:12]]
    alone = [b"".join(generate(lm, asked.prompt, 6, asked.sampling, kv=kv)) for asked in sharp]
    # roundings of bf16 decide a few
    assert sum(a[:1] == b[:1] for a, b in zip(texts(lm, sharp, 12, kv), alone, strict=True)) >= 8


def test_tokens_are_made_among_others(device):
    """Of a vocabulary of more symbols than a byte has; a token is written as its two bytes.

    Before a prompt are tokens that no byte of it stands for, which need room, too.
    """
    config = preset("tiny", dim=32, layers=1, heads=2, ffn=48, ctx=16)
    with torch.device(device):
        lm = build_model(replace(config, vocabulary=700), torch.float32)
    lm.tokenizer = SimpleNamespace(
        beginning=(5, 7, 5), ends=(), encode=lambda text: [3 * each for each in text],
        decoded=lambda _, parts: (each.to_bytes(2, "big") for part in parts for each in part),
    )  # fmt: skip
    texts_made = texts(lm, REQUESTS, 4)
    assert [len(text) for text in texts_made] == [2 * each.length for each in REQUESTS]
    assert texts(lm, REQUESTS[::-1], 6)[::-1] == texts_made
    assert max(int.from_bytes(text[:2], "big") for text in texts_made) > 255
    first = texts_made[0][2:4]  # the second token of a text, at which each text ends now
    lm.tokenizer.ends = {int.from_bytes(first, "big")}
    tokens = [[text[at : at + 2] for at in range(0, len(text), 2)] for text in texts_made]
    wanted = [each.index(first) if first in each else len(each) for each in tokens]
    ended = texts(lm, REQUESTS, 4)
    assert [len(text) // 2 for text in ended] == wanted
    assert all(text.startswith(short) for text, short in zip(texts_made, ended, strict=True))
    assert [each.length for each in batches.continue_batch(lm, REQUESTS, backend="torch")] == wanted
    lm.tokenizer.ends = ()
    for each, text in zip(REQUESTS, texts_made, strict=True):
        decoder, tokenizer = Decoder(lm, 60), lm.tokenizer
        symbols = [*tokenizer.beginning, *tokenizer.encode(each.prompt)]
        decoder.begin(symbols, each.sampling, stream=each.stream)
        alone = b"".join(lm.tokenizer.decoded([], decoder.stream(each.length)))
        assert alone[:2] == text[:2]


def test_cache_takes_the_predicted_memory(lm):
    cache, short = lm.new_cache(40, 3), lm.new_cache(10, 3)
    assert cache.nbytes == 2 * 2 * 3 * 16 * 32 * 2
    assert short.nbytes == cache.nbytes * 10 // 16
    for positions, made in ((40, cache), (10, short)):
        assert lm.new_cache(positions, 3, device=torch.device("meta")).nbytes == made.nbytes
    refused = pytest.raises(ValueError, match="one byte at a time, got 2")
    with refused, cache.reading(torch.zeros(3, 2)):
        pass


def test_keys_and_values_have_the_requested_format(lm, monkeypatch):
    new, formats = batches.Decoder, []

    def new_decoder(*arguments, **options):
        made = new(*arguments, **options)
        formats.append(made.cache.main.blocks[0].keys.codes.element_size())
        return made

    monkeypatch.setattr(batches, "Decoder", new_decoder)
    asked = [request(one.prompt, one.length, temperature=0.0) for one in REQUESTS[:3]]
    together = dict(generate_batch(lm, asked, kv="int8"))
    others = dict(generate_batch(lm, asked[::-1], 2, kv="int8"))
    for index, one in enumerate(asked):
        alone = b"".join(generate(lm, one.prompt, one.length, one.sampling, kv="int8"))
        assert alone[:3] == together[index][:3]
        assert others[2 - index] == together[index]
    assert {*formats} == {1}
    assert lm.cache_format == CacheFormat()


def test_batch_beyond_the_limit_of_kernels_is_refused(lm):
    for batch in (0, 65):
        with pytest.raises(ArbError, match=f"`--batch` is {batch}"):
            texts(lm, REQUESTS, batch)


def test_prompt_that_is_refused_is_numbered(lm):
    ask = mock.Mock(side_effect=[[1], ArbError("it is bad", "rephrase it")])
    with pytest.raises(ArbError, match="prompt 2: it is bad"):
        next(batches.continue_batch(lm, REQUESTS, backend="torch", encode=ask))


def read(*lines: str) -> list[Request]:
    return read_prompts([line.encode() for line in lines], "f", 7, Sampling(seed=3))


def test_lines_are_read_as_prompts_with_options():
    prompts = read('{"prompt": "a"}', "", '"b"', '{"prompt": "c", "seed": 9, "length": 2}')
    assert [prompt.prompt for prompt in prompts] == [b"a", b"b", b"c"]
    assert [prompt.length for prompt in prompts] == [7, 7, 2]
    assert [(prompt.sampling.seed, prompt.stream) for prompt in prompts] == [(3, 0), (3, 1), (9, 0)]
    assert read('"a\\udcff"')[0].prompt == b"a\xff"  # as Python writes what is not UTF-8
    (one,) = read('{"prompt": "d", "temperature": 0, "top_k": 5, "top_p": 0.5}')
    assert one.sampling == Sampling(temperature=0, top_k=5, top_p=0.5, seed=3)


@pytest.mark.parametrize(("line", "why"), [
    ("It was", "line 3 of `f`: `It was` is not JSON"), ("[1]", "there is no `prompt`"),
    ('{"text": "a"}', "there is no `prompt`"), ('{"prompt": 3}', "`prompt` is 3"),
    ('{"prompt": "a", "max": 3}', "no field is named `max`"),
    ('{"prompt": "a", "length": true}', "`length` is true"),
    ('{"prompt": "a", "length": 0}', "`length` is 0 after a prompt"),
    ('{"prompt": ""}', "the prompt is empty"), ('{"prompt": "\\ud800"}', "unpaired surrogate"),
    ('{"prompt": "a", "temperature": NaN}', "is not JSON"),
    ('{"prompt": "a", "top_p": 2}', "`--top-p` is 2"),
])  # fmt: skip
def test_wrong_line_is_named(line, why):
    message = ".*".join(["line 3 of `f`: ", why.split(": ")[-1]])
    with pytest.raises(ArbError, match=message) as caught:
        read('"a"', "", line)
    assert caught.value.hint
