"""Latent attention against plain softmax over every query, and its cache against a whole text."""

import dataclasses

import pytest
import torch
from graph_parts import CLOSE, assert_same, decoded, initialised, normal, reading, site
from torch import nn
from torch.nn import functional

from arbcli.families.latent.attention import LatentAttention
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.families.latent.reference import latent_attention
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.parts.cached import FORMATS, CacheFormat
from arbcli.model.state import Clock, StateSpec, Track
from arbcli.verify.parts.base import norm

CONFIG = LatentAttentionConfig(heads=2, latent=24, rotary=8)
DIM = site().dim
WINDOW = site().ctx
LENGTH = 21
PARTS = {
    "a byte at a time": [1] * LENGTH,
    "a window, then bytes": [WINDOW, *[1] * 13],
    "chunks of a window": [WINDOW, WINDOW, 5],
    "ragged chunks and bytes": [3, 1, 7, 2, 8],
}


class Normalised(nn.Module):
    """Attention after a norm."""

    def __init__(self, config=CONFIG, **at) -> None:
        super().__init__()
        own = site(**at)
        self.attention, self.before = LatentAttention(config, own), TernaryRMSNorm(own.dim, own)
        initialised(self)

    def forward(self, x, past=None) -> torch.Tensor:
        return self.attention(x, self.before, state=past).added


def reference(config=CONFIG, **at):
    def run(w, x):
        own = {name.removeprefix("attention."): weight for name, weight in w.items()}
        normal = norm(x, w["before"])
        read = reading(config, **at)
        return torch.stack([latent_attention(own, row, row, read) for row in normal])

    return run


def new_track(part, positions=LENGTH, stored=None) -> Track:
    clock = Clock(
        WINDOW, StateSpec(positions, torch.float32, torch.device("cpu"), None, CacheFormat(stored))
    )
    return Track(clock, [part.attention.new_state(clock)])


@torch.no_grad()
def in_parts(part, x, lengths, track) -> torch.Tensor:
    """Read (1, T, D) after the past of a track."""
    found = []
    for each in x.split(lengths, dim=1):
        with track.clock.reading(each.shape[1]):
            found.append(part(each, track.blocks[0]))
    return torch.cat(found, dim=1)


def check(part, x, lengths, track) -> None:
    with torch.no_grad():
        expected = reference()(decoded(part), x.double())
    torch.testing.assert_close(in_parts(part, x, lengths, track).double(), expected, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"rotary": 20}, {"heads": 4, "rotary": 2}], ids=str)
def test_attention_and_gradients_equal_autograd(options):
    config = dataclasses.replace(CONFIG, **options)
    part = Normalised(config)
    assert_same(part, (normal(2, 7, DIM),), part, reference(config))


@pytest.mark.parametrize("rotary", [2, 4, 8])
def test_values_begin_where_a_gpu_can_read_them(rotary, monkeypatch):
    """A kernel of torch that reads 16 bytes at once fails where they are not at such addresses."""
    config = dataclasses.replace(CONFIG, rotary=rotary)
    part, given, attend = Normalised(config, dim=32), [], functional.scaled_dot_product_attention

    def spy(q, k, v, **options):
        given.extend((q, k, v))
        return attend(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    part(normal(2, 7, 32).bfloat16())
    assert len(given) == 3
    for each in given:
        assert each.data_ptr() % 16 == 0
        assert [stride * each.itemsize % 16 for stride in each.stride()[:-1]] == [0, 0, 0]


@pytest.mark.parametrize("name", PARTS)
def test_cache_equals_the_whole_text_in_windows(name):
    part = Normalised()
    check(part, normal(1, LENGTH, DIM), PARTS[name], new_track(part))


def test_short_text_has_a_short_ring():
    part = Normalised()
    track = new_track(part, 5)
    assert track.blocks[0].latent.codes.shape == (1, 5, CONFIG.latent)
    assert new_track(part, 5000).blocks[0].rotated.shape == (1, WINDOW, 1, CONFIG.rotary)
    check(part, normal(1, 5, DIM), [2, 1, 2], track)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
@torch.no_grad()
def test_cache_in_eight_bits_is_read_as_byte_by_byte(kv):
    """Compressed positions in eight bits, what is rotated as it is; as without a cache, too."""
    part, x = Normalised(), normal(1, LENGTH, DIM)
    plain = part(x[:, :WINDOW])
    part.attention.cache_format = CacheFormat(FORMATS[kv])

    def read(lengths: list[int]) -> torch.Tensor:
        track = new_track(part, stored=FORMATS[kv])
        of_a_byte = CONFIG.latent + 1 + 4 * (CONFIG.rotary + CONFIG.heads)
        assert track.nbytes == WINDOW * of_a_byte
        return in_parts(part, x, lengths, track)

    one_by_one = read([1] * LENGTH)
    torch.testing.assert_close(read(PARTS["ragged chunks and bytes"]), one_by_one, **CLOSE)
    torch.testing.assert_close(one_by_one[:, :WINDOW], part(x[:, :WINDOW]), **CLOSE)
    assert not torch.equal(plain, part(x[:, :WINDOW]))
    # attention with a sharp peak: close, not equal
    assert torch.cosine_similarity(plain.flatten(), one_by_one[:, :WINDOW].flatten(), 0) > 0.999
