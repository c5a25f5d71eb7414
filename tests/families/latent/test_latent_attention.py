"""Latent attention against plain softmax over every query, and its cache against a whole text."""

import dataclasses

import pytest
import torch
from graph_parts import CLOSE, decoded, initialised, normal, plain, spec
from torch import nn
from torch.nn import functional

from arbcli.families.latent.attention import LatentAttention
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.interop.huggingface.modeling_core import norm
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.parts.cached import FORMATS, CacheFormat
from arbcli.model.state import PositionCounter, StateSpec, Track

CONFIG = LatentAttentionConfig(heads=2, latent=24, rotary=8)
DIM = spec().dim
WINDOW = spec().ctx
LENGTH = 21
PARTS = {
    "a window, then bytes": [WINDOW, *[1] * 13],
    "ragged chunks and bytes": [3, 1, 7, 2, 8],
}


class Normalised(nn.Module):
    """Attention after a norm."""

    def __init__(self, config=CONFIG, **at) -> None:
        super().__init__()
        place = spec(**at)
        self.attention, self.before = (
            LatentAttention(config, place),
            TernaryRMSNorm(place.dim, place),
        )
        initialised(self)

    def forward(self, x, past=None) -> torch.Tensor:
        return self.attention(x, self.before, state=past).added


def reference(config=CONFIG, **at):
    def run(w, x):
        weights = {name.removeprefix("attention."): weight for name, weight in w.items()}
        attention = plain(config, weights, nn.Module(), **at)
        return torch.stack([attention(row, row, None) for row in norm(x)])

    return run


def new_track(part, positions=LENGTH, stored=None) -> Track:
    clock = PositionCounter(
        WINDOW, StateSpec(positions, torch.float32, torch.device("cpu"), None, CacheFormat(stored))
    )
    return Track(clock, [part.attention.new_state(clock)])


@torch.no_grad()
def read_in_parts(part, x, lengths, track) -> torch.Tensor:
    """Read (1, T, D) after the past of a track."""
    outputs = []
    for piece in x.split(lengths, dim=1):
        with track.clock.reading(piece.shape[1]):
            outputs.append(part(piece, track.blocks[0]))
    return torch.cat(outputs, dim=1)


def check(part, x, lengths, track) -> None:
    with torch.no_grad():
        expected = reference()(decoded(part), x.double())
    torch.testing.assert_close(read_in_parts(part, x, lengths, track).double(), expected, **CLOSE)


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
    for tensor in given:
        assert tensor.data_ptr() % 16 == 0
        assert [stride * tensor.itemsize % 16 for stride in tensor.stride()[:-1]] == [0, 0, 0]


@pytest.mark.parametrize("name", PARTS)
def test_cache_equals_the_whole_text_in_windows(name):
    part = Normalised()
    check(part, normal(1, LENGTH, DIM), PARTS[name], new_track(part))


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
        return read_in_parts(part, x, lengths, track)

    one_by_one = read([1] * LENGTH)
    torch.testing.assert_close(read(PARTS["ragged chunks and bytes"]), one_by_one, **CLOSE)
    torch.testing.assert_close(one_by_one[:, :WINDOW], part(x[:, :WINDOW]), **CLOSE)
    assert not torch.equal(plain, part(x[:, :WINDOW]))
    # attention with a sharp peak: close, not equal
    assert torch.cosine_similarity(plain.flatten(), one_by_one[:, :WINDOW].flatten(), 0) > 0.999
