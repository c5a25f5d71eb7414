"""The head beyond the next byte: its equations, its losses, and that it leaves others alone."""

from dataclasses import replace

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.config.model import ModelConfig
from arbcli.config.short_forms import dense
from arbcli.families.ahead.config import AheadConfig
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.language_model import LanguageModel

AHEAD = AheadConfig(positions=4, width=14, weight=0.3)


def config(**changes) -> ModelConfig:
    plain = dense(dim=24, layers=1, heads=2, ffn=16, ctx=11)
    return replace(plain, **{"ahead": AHEAD} | changes)


def text(seed: int = 0, length: int = 12) -> torch.Tensor:
    return torch.randint(97, 123, (2, length), generator=torch.Generator().manual_seed(seed))


def model(of: ModelConfig) -> LanguageModel:
    lm = LanguageModel(of, torch.float32)
    lm.initialise(0)
    return lm


def test_losses_of_the_ahead_head_sum_to_its_weight():
    lm = model(config())
    assert sum(lm.loss_weights[name] for name in AHEAD.losses) == pytest.approx(0.3)
    assert "next_2" not in model(config(ahead=None)).loss_weights


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


@torch.no_grad()
def test_positions_one_by_one_equal_all_at_once():
    lm, ids = model(config()), text()
    with use_backend("torch"):
        x = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(3))
        whole = lm.ahead(x, ids)
        for t in range(12):
            position = lm.ahead(x[:, t : t + 1], ids[:, t : t + 1])
            for part, single in zip(whole, position, strict=True):
                torch.testing.assert_close(part[:, t : t + 1], single)
