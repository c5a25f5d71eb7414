"""The head beyond the next byte: the weights of its losses, and sizes that are refused."""

from dataclasses import replace

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.config.model import ModelConfig
from arbcli.config.short_forms import dense
from arbcli.families.ahead.config import AheadConfig
from arbcli.model.language_model import LanguageModel

AHEAD = AheadConfig(positions=4, width=14, weight=0.3)


def config(**changes) -> ModelConfig:
    plain = dense(dim=24, layers=1, heads=2, ffn=16, ctx=11)
    return replace(plain, **{"ahead": AHEAD} | changes)


def test_losses_of_the_ahead_head_sum_to_its_weight():
    weights = LanguageModel(config(), torch.float32).loss_weights
    assert sum(weights[name] for name in AHEAD.losses) == pytest.approx(0.3)
    assert "next_2" not in LanguageModel(config(ahead=None), torch.float32).loss_weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: AheadConfig(positions=9, width=3), "`positions` is 9"),
        (lambda: AheadConfig(positions=1, width=3), "`positions` is 1"),
        (lambda: AheadConfig(positions=2, width=0), "width"),
        (lambda: AheadConfig(positions=2, width=3, weight=0.0), "`weight` is 0.0"),
        (lambda: AheadConfig(positions=2, width=3, weight=float("nan")), "`weight` is `nan`"),
        (lambda: config(ctx=4), "in a context of 4"),
        (lambda: config(vocabulary=300), "`ahead` reads bytes"),
    ],
)
def test_sizes_of_the_ahead_head_out_of_range_are_refused(changes, message):
    with pytest.raises(ArbError, match=message) as caught:
        changes()
    assert caught.value.hint
