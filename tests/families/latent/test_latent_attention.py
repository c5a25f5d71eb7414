"""Latent attention: addresses that a GPU reads, and a cache in eight bits."""

import dataclasses

import pytest
import torch
from graph_parts import CLOSE, initialised, normal, spec
from torch import nn
from torch.nn import functional

from arbcli.families.latent.attention import LatentAttention
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.model.layers.norm import TernaryRMSNorm
from arbcli.model.parts.cached import FORMATS, CacheFormat
from arbcli.model.state import PositionCounter, StateSpec, Track

CONFIG = LatentAttentionConfig(heads=2, latent=24, rotary=8)
DIM = spec().dim
WINDOW = spec().ctx
LENGTH = 21


class Normalised(nn.Module):
    """Attention after a norm."""

    def __init__(self, config=CONFIG, **at) -> None:
        super().__init__()
        place = spec(**at)
        self.attention = LatentAttention(config, place)
        self.before = TernaryRMSNorm(place.dim, place)
        initialised(self)

    def forward(self, x, past=None) -> torch.Tensor:
        return self.attention(x, self.before, state=past).added


def new_track(part, stored) -> Track:
    place = StateSpec(LENGTH, torch.float32, torch.device("cpu"), None, CacheFormat(stored))
    clock = PositionCounter(WINDOW, place)
    return Track(clock, [part.attention.new_state(clock)])


@torch.no_grad()
def read_in_parts(part, x, lengths, track) -> torch.Tensor:
    """Read (1, T, D) after the past of a track."""
    outputs = []
    for piece in x.split(lengths, dim=1):
        with track.clock.reading(piece.shape[1]):
            outputs.append(part(piece, track.blocks[0]))
    return torch.cat(outputs, dim=1)


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


@pytest.mark.parametrize("kv", ["fp8", "int8"])
@torch.no_grad()
def test_cache_in_eight_bits_is_read_as_byte_by_byte(kv):
    """Compressed positions in eight bits, what is rotated as it is; as without a cache, too."""
    part, x = Normalised(), normal(1, LENGTH, DIM)
    plain = part(x[:, :WINDOW])
    part.attention.cache_format = CacheFormat(FORMATS[kv])

    def read(lengths: list[int]) -> torch.Tensor:
        track = new_track(part, FORMATS[kv])
        of_a_byte = CONFIG.latent + 1 + 4 * (CONFIG.rotary + CONFIG.heads)
        assert track.nbytes == WINDOW * of_a_byte
        return read_in_parts(part, x, lengths, track)

    one_by_one = read([1] * LENGTH)
    torch.testing.assert_close(read([3, 1, 7, 2, 8]), one_by_one, **CLOSE)
    torch.testing.assert_close(one_by_one[:, :WINDOW], part(x[:, :WINDOW]), **CLOSE)
    assert not torch.equal(plain, part(x[:, :WINDOW]))
    # attention with a sharp peak: close, not equal
    assert torch.cosine_similarity(plain.flatten(), one_by_one[:, :WINDOW].flatten(), 0) > 0.999
