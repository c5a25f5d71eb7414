"""Hyper-connections: several streams are mixed without gain or loss."""

import pytest
import torch

from arbcli.config.presets import preset
from arbcli.kernels.streams.stream_weights import stream_weights
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel

SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 9}
IDS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))


def model(dtype=torch.float32, **options) -> LanguageModel:
    lm = build_model(preset("tiny", **SHAPE | options), dtype)
    lm.initialise(0)
    return lm


def stirred(lm: LanguageModel) -> LanguageModel:
    """Give the projections weights, which are zero at first."""
    for index, (name, tensor) in enumerate(lm.weights().items()):
        if name.endswith("projection.weight"):
            tensor.spread, tensor.std = 1.0, 0.3
            tensor.initialise(1, index)
    return lm


@pytest.mark.parametrize("streams", [2, 4, 8])
def test_rows_and_columns_sum_to_one(streams):
    lm, seen = stirred(model(streams=streams)), []
    connection = lm.blocks[1].mlp_streams
    connection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    with torch.no_grad():
        lm(IDS)
        a, b, c = connection.weights(seen[0])
    assert b.std() > 0.01
    for dim in (1, 2):
        assert (b.double().sum(dim) - 1).abs().max() < 1e-6
    assert b.min() >= 0
    assert 0 < a.min() < a.max() < 1
    assert 0 < c.min() < c.max() < 2


@pytest.mark.parametrize("far", [1.0, 4.0, 100.0])
def test_sums_are_one_for_any_numbers(far):
    raw = far * torch.randn(500, 24, generator=torch.Generator().manual_seed(1))
    _, b, _ = stream_weights(raw, torch.zeros(24))
    assert b.min() >= 0
    for dim in (1, 2):
        assert (b.double().sum(dim) - 1).abs().max() < 1e-6


def test_no_number_stays_none():
    raw = torch.zeros(2, 24)
    raw[0, 9] = torch.nan
    b = stream_weights(raw, torch.zeros(24))[1]
    assert b[0].isnan().any()
    assert b[1].isfinite().all()


@pytest.mark.parametrize("lengths", [[1] * 9, [4, 1, 3, 1]], ids=str)
def test_cached_logits_equal_those_of_the_whole_text(lengths):
    lm = stirred(model(streams=4))
    ids = IDS[:1]
    with torch.no_grad(), lm.prepared_weights():
        cache = lm.new_cache(9)
        found = torch.cat([lm(part, cache) for part in ids.split(lengths, dim=1)], dim=1)
        # loops of a CPU round to 16 bits what a step multiplies
        torch.testing.assert_close(found, lm(ids), rtol=1e-3, atol=1e-3)
