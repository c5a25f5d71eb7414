"""Text from a model: the same as from plain forwards, and chosen as it was asked for."""

import pytest
import torch

from arbcli.errors import ArbError
from arbcli.generation import Decoder, Sampling, choose_byte, generate
from arbcli.model.config import preset
from arbcli.model.lm import ByteLM

GREEDY = Sampling(temperature=0)


def model(device, weights="ternary", dtype=torch.float32, ctx=16) -> ByteLM:
    config = preset("tiny", dim=32, layers=2, heads=2, ffn=48, ctx=ctx, weights=weights)
    with torch.device(device):
        lm = ByteLM(config, dtype)
    lm.initialise(0)
    return lm


def continued(lm, prompt: bytes, length: int, sampling: Sampling | None = None) -> bytes:
    return b"".join(generate(lm, prompt, length, sampling))


@pytest.mark.parametrize("weights", ["ternary", "float", "ste"])
@pytest.mark.parametrize("prompt", [b"a", b"abc", b"twelve bytes"])
def test_greedy_text_is_that_of_whole_forwards(prompt, weights, device):
    lm = model(device, weights)
    expected = prompt
    for _ in range(16 - len(prompt)):
        with torch.no_grad():
            logits = lm(torch.tensor([list(expected)], device=device))
        expected += bytes([int(logits[0, -1].argmax())])
    assert prompt + continued(lm, prompt, 16 - len(prompt), GREEDY) == expected


def test_prompt_longer_than_the_window_is_read_whole(device):
    lm = model(device)
    prompt = bytes(range(50))
    decoder = Decoder(lm, 60, GREEDY)
    for byte in prompt:
        decoder.read(bytes([byte]))
    assert b"".join(decoder.stream(10)) == continued(lm, prompt, 10, GREEDY)


def test_text_can_be_streamed_in_turns(device):
    decoder = Decoder(model(device), 200, Sampling(seed=3))
    decoder.read(b"ab")
    parts = [b"".join(decoder.stream(length)) for length in (1, 40, 33)]
    assert [len(part) for part in parts] == [1, 40, 33]
    assert b"".join(parts) == continued(model(device), b"ab", 74, Sampling(seed=3))


def test_seed_decides_the_text(device):
    lm = model(device)
    texts = [continued(lm, b"ab", 40, Sampling(seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 40


def test_no_more_bytes_than_the_text_has_room_for(device):
    decoder = Decoder(model(device), 10)
    with pytest.raises(ValueError, match="no room for 3 bytes after 0"):
        next(decoder.stream(3))
    decoder.read(b"12345678")
    with pytest.raises(ValueError, match="no room for 3 bytes after 8"):
        next(decoder.stream(3))


def test_empty_prompt_is_refused(device):
    with pytest.raises(ArbError, match="the prompt is empty"):
        continued(model(device), b"", 3)


def chosen(logits: torch.Tensor, sampling: Sampling, count: int = 3000) -> torch.Tensor:
    key = torch.tensor(12345, dtype=torch.int32, device=logits.device)
    positions = torch.arange(count, dtype=torch.int32, device=logits.device)
    bytes_ = [choose_byte(logits, key, position, sampling) for position in positions]
    return torch.stack(bytes_).bincount(minlength=256)


def logits_of(device, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(256, generator=torch.Generator().manual_seed(0)).to(device)


def test_bytes_come_as_often_as_their_probabilities_say(device):
    logits = logits_of(device)
    for temperature in (0.5, 1.0, 2.0):
        share = (logits.double() / temperature).softmax(0)
        counts = chosen(logits, Sampling(temperature=temperature))
        deviation = (counts - 3000 * share) / (3000 * share * (1 - share)).sqrt().clamp(min=1)
        assert deviation.abs().max() < 5
        assert deviation.square().mean() < 1.5


def test_top_k_keeps_the_likeliest(device):
    logits = logits_of(device)
    for k in (1, 2, 7):
        found = chosen(logits, Sampling(temperature=2.0, top_k=k), 400).nonzero()[:, 0]
        assert sorted(found.tolist()) == sorted(logits.topk(k).indices.tolist())


def test_top_k_keeps_the_first_of_equals(device):
    counts = chosen(torch.zeros(256, device=device), Sampling(top_k=3), 200)
    assert counts.nonzero()[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("top_k", [256, 5])
def test_top_p_keeps_the_fewest_that_reach_the_share(top_k, device):
    logits = logits_of(device)
    order = logits.argsort(descending=True)[:top_k]
    share = logits[order].double().softmax(0).cumsum(0)
    for p in (0.01, 0.3, 0.8):
        kept = order[: int((share < p).sum()) + 1]
        sampling = Sampling(temperature=1.0, top_k=top_k, top_p=p)
        assert set(chosen(logits, sampling, 500).nonzero()[:, 0].tolist()) <= set(kept.tolist())
        assert chosen(logits, sampling, 500)[kept[-1]] > 0


@pytest.mark.parametrize("temperature", [0.0, 1e-30])
def test_no_temperature_takes_the_likeliest(temperature, device):
    logits = logits_of(device)
    counts = chosen(logits, Sampling(temperature=temperature, seed=5), 50)
    assert int(counts.argmax()) == int(logits.argmax())
    assert int(counts.max()) == 50


BAD = [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_k": 257},
       {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}]  # fmt: skip


@pytest.mark.parametrize("given", BAD, ids=str)
def test_sampling_out_of_range_is_refused(given):
    with pytest.raises(ArbError, match=next(iter(given)).replace("_", "-")):
        Sampling(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["ternary", "float", "ste"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=20, top_p=0.9, seed=4)], ids=str)
def test_captured_step_gives_the_bits_of_the_eager_one(sampling, weights, device):
    lm = model(device, weights, torch.bfloat16, ctx=64)
    texts, rings = [], []
    with lm.held_weights():
        for capture in (False, True):
            decoder = Decoder(lm, 300, sampling, capture=capture)
            decoder.read(b"0123456789" * 5)
            texts.append(b"".join(decoder.stream(250)))
            rings.append([ring for block in decoder.cache.blocks for ring in (block.keys,)])
    assert texts[0] == texts[1]
    assert all(torch.equal(a, b) for a, b in zip(*rings, strict=True))
