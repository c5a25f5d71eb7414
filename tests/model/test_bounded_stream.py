"""Blocks that add a share of what their parts make, to a stream that is bounded."""

from dataclasses import asdict, replace

import pytest
import torch
from cells import Cell

from arbcli.config.model import ModelConfig
from arbcli.config.presets import config_from_dict
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.stack import clamp_rms


def model(streams: int, place: str = "plain", **stream) -> ModelConfig:
    config = Cell("attention", "mlp", streams, place).model()
    return replace(config, stages=tuple(replace(stage, **stream) for stage in config.stages))


def build(config: ModelConfig) -> LanguageModel:
    return build_model(config, torch.float32)


@pytest.mark.parametrize("streams", [1, 4])
@torch.no_grad()
def test_parts_add_a_share_and_blocks_end_within_the_bound(streams):
    seen = []
    for stream in ({}, {"contribution": 0.5}, {"bound": 0.5}):
        lm = build(model(streams, **stream))
        lm.blocks[-1].register_forward_hook(
            lambda _block, _given, output: seen.append(output.total())
        )
        with use_backend("torch"):
            lm(torch.arange(11)[None] + 97)
    whole, half, small = (x.square().mean(dim=-1).sqrt() for x in seen)
    assert half.mean() < whole.mean()
    assert whole.max() > 0.5
    assert small.max() <= 0.501


def test_configuration_is_kept():
    config = model(4, contribution=0.25, bound=3.0)
    assert not config.main.adds_plainly
    assert config_from_dict(asdict(config)) == config


def test_streams_above_a_bound_are_scaled_down_and_others_left_alone():
    x = torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(0))
    x[1] *= 10
    size = x.square().mean(dim=-1, keepdim=True).sqrt()
    scaled = clamp_rms(x, 2.0)
    assert torch.equal(scaled[0], x[0])
    torch.testing.assert_close(scaled, torch.where(size > 2, 2 * x / size, x))
    still = torch.zeros(2, 8, requires_grad=True)
    clamp_rms(still, 1.0).sum().backward()
    assert torch.equal(still.grad, torch.ones(2, 8))
