"""Widths of heads and layers that few models have, and the terms that keep norms from zero."""

import dataclasses

import pytest
import torch
from references import logits_in_parts

from arbcli.base.errors import ArbError
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.model.build import build_model
from arbcli.verify.reference import Reference
from arbcli.verify.update_reference import reference_weight


def config_of(mixer: dict | None = None, stage: dict | None = None, **fields) -> ModelConfig:
    about = {"heads": 2, "query_key_norm": "gain", "sub_norm": False} | (mixer or {})
    block = BlockConfig(mixer=AttentionConfig(**about), channel=MLPConfig(width=48, sub_norm=False))
    stages = (StageConfig(dim=32, blocks=(block,) * 2, **(stage or {})),)
    about = {"norm_gain": True, "norm_eps": 0.01, "digits": "all", "direction": "factored"}
    return ModelConfig(ctx=12, stages=stages, **about | fields)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_every_norm_adds_norm_eps(eps):
    """Of a stream so small that it counts, before parts, of heads and before the head."""
    model = build_model(config_of(norm_eps=eps), torch.float32)
    model.embedding.weight.exponent.sub_(4)
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    weights = {name: reference_weight(tensor) for name, tensor in model.weights().items()}
    wanted, _ = Reference(weights, model.config)(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).double(), wanted, rtol=0, atol=1e-5)
        logits = logits_in_parts(model, ids[:1], [1] * 12)
        torch.testing.assert_close(logits.double(), wanted[:1], rtol=0, atol=1e-5)
    other = dataclasses.replace(model.config, norm_eps=1e-4)
    assert (Reference(weights, other)(ids)[0] - wanted).abs().max() > 1e-2
    model.loss(ids, ids).backward()


@pytest.mark.parametrize("change", [
    {"norm_gain": False}, {"norm_eps": 0.0}, {"norm_eps": 0.02}, {"norm_eps": -1e-5},
    {"mixer": {"query_key_norm": "unit"}}, {"mixer": {"sub_norm": True}},
    {"stage": {"streams": 2}}, {"stage": {"router": True}},
    {"head": MLPConfig(width=8, sub_norm=False)},
])  # fmt: skip
def test_norms_whose_kernels_have_one_constant_are_refused(change):
    with pytest.raises(ArbError, match="`norm_eps` is"):
        config_of(**change)
