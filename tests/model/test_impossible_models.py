"""Models that cannot be: each is refused in a line that names what is wrong, with a hint."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from arbcli.base.errors import ArbError
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.config.presets import PRESETS, preset
from arbcli.config.short_forms import dense
from arbcli.families.ahead.config import AheadConfig
from arbcli.families.media.config import CompositeConfig
from arbcli.model.build import build_model
from arbcli.training.configure import new_config

TINY = dense(dim=24, layers=1, heads=2, ffn=16, ctx=11)
AHEAD = {"ahead": AheadConfig(positions=4, width=14)}
MASKED, FILL = replace(TINY, objective="masked"), replace(TINY, objective="fill", ctx=40)
COMPOSITE = replace(TINY, composite=CompositeConfig())
LONGER = {"base": 50.0, "factor": 8.0, "original_ctx": 40}
TWO_STAGES = {"outer_dim": (24, 28), "outer_layers": (1, 1), "outer_heads": (2, 2),
              "outer_ffn": (36, 36), "chunk_length": (2, 2)}  # fmt: skip


def attention(angles: dict | None = None, **fields) -> ModelConfig:
    mixer = AttentionConfig(heads=4, rotary=RotaryConfig(**angles or {}), **fields)
    return ModelConfig(ctx=12, stages=(StageConfig(dim=48, blocks=(BlockConfig(mixer=mixer),)),))


def compressed(**options) -> ModelConfig:
    return preset("tiny", attention="compressed", heads=4, dim=64, **options)


def chunked(**options) -> ModelConfig:
    return preset("hnet-tiny", **{"outer_dim": (24,), "outer_heads": 2} | options)


def of_words() -> ModelConfig:
    config = PRESETS["hnet-tiny"]
    first, *others = config.stages
    first = replace(first, chunking=replace(first.chunking, boundaries="space"))
    return replace(config, stages=(first, *others), vocabulary=301)


REFUSED: dict[str, Callable] = {
    "3 heads of keys do not divide 4": lambda: attention(kv_heads=3),
    "`head_width` is 7": lambda: attention(head_width=7),
    "`query_key_norm` is `some`": lambda: attention(query_key_norm="some"),
    "`share` is 0.1, and 1 of 12 numbers": lambda: attention({"share": 0.1}),
    "`base` is 0.5": lambda: attention({"base": 0.5}),
    "`share` is 1.5": lambda: attention({"share": 1.5}),
    "`scaling` is `more`": lambda: attention({"scaling": "more"}),
    "`factor` does not apply to the scaling `none`": lambda: attention({"factor": 2.0}),
    "`original_ctx` does not apply to": lambda: attention(LONGER | {"scaling": "linear"}),
    "`yarn` needs `original_ctx`": lambda: attention({"scaling": "yarn", "factor": 2.0}),
    "`low` is 4.0, and `high`": lambda: attention(LONGER | {"scaling": "llama3", "low": 4.0}),
    "do not divide": lambda: compressed(kv_heads=3),
    "`head_width` is 3": lambda: compressed(head_width=3),
    "`ratios`": lambda: compressed(ratios=(4, 1)),
    "40 cannot be rotated": lambda: compressed(rotary=40),
    "`index_width` is 6": lambda: compressed(index_width=6),
    "numbers for 2 stages, and `outer_dim`": lambda: chunked(chunk_length=(3, 3)),
    "`boundaries` is `words`": lambda: chunked(boundaries="words"),
    "5 heads do not divide a width of 24": lambda: chunked(outer_heads=5),
    "chunks of chunks have no spaces": lambda: chunked(boundaries="space", **TWO_STAGES),
    "`positions` is 9": lambda: AheadConfig(positions=9, width=3),
    "`positions` is 1": lambda: AheadConfig(positions=1, width=3),
    "`width` is 0": lambda: AheadConfig(positions=2, width=0),
    "`weight` is 0.0": lambda: AheadConfig(positions=2, width=3, weight=0.0),
    "`weight` is `nan`": lambda: AheadConfig(positions=2, width=3, weight=float("nan")),
    "in a context of 4": lambda: replace(TINY, ctx=4, **AHEAD),
    "`ahead` reads bytes": lambda: replace(TINY, vocabulary=300, **AHEAD),
    "`ahead`: it reads what is before": lambda: replace(MASKED, **AHEAD),
    "`tied`: the head has no row": lambda: replace(MASKED, tied=True),
    "`objective`": lambda: replace(MASKED, objective="later"),
    "`objective=masked`": MASKED.check_documents,
    "from left to right": lambda: build_model(MASKED).new_cache(5),
    "`ahead`, which does not support holes": lambda: replace(FILL, **AHEAD),
    "`tied`, which does not support holes": lambda: replace(FILL, tied=True),
    "`ctx` is 7": lambda: replace(FILL, ctx=7),
    "`ctx` is 25": lambda: replace(FILL, ctx=25, vocabulary=5),
    "`experts`, which": lambda: preset("tiny", objective="fill", experts=3, moe_gate="hash"),
    "combine with `ahead`": lambda: replace(COMPOSITE, **AHEAD),
    "combine with `tied`": lambda: replace(COMPOSITE, tied=True),
    "combine with `vocabulary`": lambda: replace(COMPOSITE, vocabulary=300),
    "combine with `objective`": lambda: replace(COMPOSITE, objective="fill"),
    "`composite`, it would pass": COMPOSITE.check_documents,
    "`sound` is 11": lambda: CompositeConfig(sound=11.0),
    "picture": lambda: CompositeConfig(picture=True),
    "`contribution` is 0.0": lambda: StageConfig(dim=8, contribution=0.0),
    "`contribution` is 1.5": lambda: StageConfig(dim=8, contribution=1.5),
    "`bound` is 0.0": lambda: StageConfig(dim=8, bound=0.0),
    "`carry` does not fade to the trit": lambda: preset("tiny", mlp_rule="carry", digits="fade"),
    "`votes` has no learning rate": lambda: preset("tiny", rule="votes", mlp_rule="nibble"),
    "`votes`": lambda: preset("tiny", mlp_rule="votes"),
    "`mlp_rule` is `nibbel`": lambda: preset("tiny", mlp_rule="nibbel"),
    "`vocabulary` is 0": lambda: replace(TINY, vocabulary=0),
    "`vocabulary` is 1": lambda: replace(TINY, vocabulary=1),
    "`vocabulary` is 1,048,577": lambda: replace(TINY, vocabulary=2**20 + 1),
    "`vocabulary` is `256.0`": lambda: replace(TINY, vocabulary=256.0),
    "`vocabulary` is `True`": lambda: replace(TINY, vocabulary=True),
    "reads bytes, and": of_words,
    "and the model has 301 symbols": lambda: replace(PRESETS["arb-tiny"], vocabulary=301),
    "no remainder that": lambda: new_config(device="cpu", rule="votes", weight_decay=0.1),
    "baseline has no teacher": lambda: new_config(device="cpu", weights="float", teacher="runs/1"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_model_that_cannot_be_is_refused_in_a_line(message):
    with pytest.raises(ArbError) as caught:
        REFUSED[message]()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
