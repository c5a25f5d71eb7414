"""A model is written as TOML and read back equal, and a file that is wrong is refused by path."""

import dataclasses
import random
import tomllib
from types import NoneType, UnionType
from typing import get_args, get_origin

import pytest

from arbcli.base.errors import ArbError
from arbcli.config.file import read_settings
from arbcli.config.kinds import BESIDE, CHANNELS, MIXERS
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.model_file import model_from_toml, model_lines
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.settings import parted
from arbcli.families.graph.config import MemoriesConfig
from arbcli.families.hnet.config import ChunkingConfig
from arbcli.model.rules import DIRECTION, RULES, VOTES_FIXES, WITH_DIGITS


def drawn(kind: type, seed: random.Random):
    """Draw a configuration that is valid, each of its fields at random."""
    while True:
        fields = [field for field in dataclasses.fields(kind) if field.init]
        try:
            return kind(**{field.name: _value(field.name, field.type, seed) for field in fields})
        except ArbError:
            continue


def _value(name: str, kind, seed: random.Random):
    kind, setting = parted(kind)
    if get_origin(kind) is UnionType:
        kind = seed.choice(get_args(kind))
    if get_origin(kind) is tuple:
        return tuple(_value(name, one, seed) for one in get_args(kind))
    if dataclasses.is_dataclass(kind):
        return drawn(kind, seed)
    makes = {
        int: lambda: seed.choice((1, 2, 3, 4, 6, 8, 12, 64)),
        bool: lambda: seed.random() < 0.5,
        str: lambda: seed.choice(WITH_DIGITS if name == "rule" else setting.choices),
        float: lambda: seed.choice((0.5, 1.0, 2.0, 10000.0)),
        NoneType: lambda: None,
    }
    return makes[kind]()


def drawn_model(seed: random.Random) -> ModelConfig:
    """Draw a model of one to three stages."""
    while True:
        try:
            return _model(seed)
        except ArbError:
            continue


def _model(seed: random.Random) -> ModelConfig:
    def blocks():
        kinds = [BlockConfig(mixer=drawn(seed.choice([*MIXERS.values()]), seed))]
        kinds.append(BlockConfig(channel=drawn(seed.choice([*CHANNELS.values()]), seed)))
        kinds.append(dataclasses.replace(kinds[0], channel=kinds[1].channel))
        return tuple(seed.choices(kinds, k=seed.randrange(6)))

    def outer():
        chunking = drawn(ChunkingConfig, seed)
        return StageConfig(dim=96, before=blocks(), after=blocks(), chunking=chunking, streams=2)

    around = tuple(outer() for _ in range(seed.randrange(3)))
    beside = tuple(drawn(kind, seed) for kind in BESIDE.values() if seed.random() < 0.5)
    memories = None if around else seed.choice((None, drawn(MemoriesConfig, seed)))
    router = not around and seed.random() < 0.5
    rule = seed.choice([*RULES])
    return ModelConfig(
        ctx=seed.choice((7, 64)),
        stages=(*around, StageConfig(dim=192, blocks=blocks(), memories=memories, router=router)),
        beside=beside,
        head=seed.choice((None, drawn(MLPConfig, seed))),
        scale_type=seed.choice(("T4", "T32")),
        rule=rule,
        votes_fixes=seed.choice(((), VOTES_FIXES)) if rule == "votes" else (),
        direction=seed.choice(("sign", DIRECTION[rule])),
    )


def read_back(config: ModelConfig) -> ModelConfig:
    return model_from_toml(tomllib.loads("\n".join(model_lines(config)))["model"], "a file")


@pytest.mark.parametrize("seed", range(20))
def test_model_of_random_parts_is_read_back_equal(seed):
    config = drawn_model(random.Random(seed))
    assert read_back(config) == config


GOOD = """[model]
ctx = 64
[model.block.near]
mixer = { kind = "attention", heads = 2 }
[model.block.far]
mixer = { kind = "compressed", heads = 2 }
channel = { kind = "experts", experts = 4, width = 8 }
[[model.stage]]
dim = 32
before = "near"
chunking = { length = 4 }
[[model.stage]]
dim = 32
blocks = "near*2 far"
"""
WRONG = {
    ("heads = 2 }\nch", 'heads = "x" }\nch'): "`model.block.far.mixer.heads` is `x`",
    ("heads = 2 }\nch", "heads = 2, ratio = 1 }\nch"): "`model.block.far.mixer.ratio` is 1",
    ("heads = 2 }\nch", "heads = 2, wings = 1 }\nch"): "`model.block.far.mixer` has no field `wi",
    ("experts = 4, ", ""): "`model.block.far.channel` has no `experts`",
    ('"experts"', '"birds"'): "`model.block.far.channel` is of the kind `birds`, which is none of",
    ('"attention", heads = 2', '"attention", heads = 0'): "`model.block.near.mixer.heads` is 0",
    ("near*2", "neer*2"): "`model.stage[1].blocks` names the block `neer`",
    ("near*2", "near*0"): "`model.stage[1].blocks` repeats `near*0`",
    ("near*2", "near*99999999999"): "`model.stage[1].blocks` repeats `near*99999999999`",
    ('"near*2 far"', "3"): "`model.stage[1].blocks` is `3`",
    ("length = 4", "length = 1"): "`model.stage[0].chunking`: `chunk_length` is 1",
    ("length = 4", 'kind = "mamba"'): "`model.stage[0].chunking` is not of the kind",
    ("dim = 32\nblocks", "dim = -1\nblocks"): "`model.stage[1].dim` is -1",
    ("dim = 32\nblocks", "dim = 0x" + "f" * 9999 + "\nblocks"): "is int without an end",
    ("dim = 32\nblocks", "blocks"): "`model.stage[1]` has no `dim`",
    ("dim = 32\nblocks", "dim = 33\nblocks"): "2 heads do not divide a width of 33",
    ("ctx = 64", "ctx = 0"): "`model.ctx` is 0",
    ("ctx = 64", ""): "`model` has no `ctx`",
    ("ctx = 64", 'ctx = 64\ndirection = ""'): "`model.direction` is ``",
    ("ctx = 64", 'ctx = 64\ndirection = "none"'): "the rule `moment` has no `model.direction`",
    ("ctx = 64", "ctx = 64\nwings = 2"): "`model` has no field `wings`",
    ("ctx = 64", 'ctx = 64\nbeside = [{ kind = "mlp" }]'): "`model.beside[0]` is of the kind `mlp`",
    ("ctx = 64", "ctx = 64\nhead" + ".a" * 2_000 + " = 1"): "is not TOML: it is nested too deeply",
    ("ctx = 64", "ctx = " + "[" * 2_000 + "]" * 2_000): "is not TOML",
    ("[[model.stage]]\ndim", "[[model.stage]]\n" * 65 + "dim"): "has no list of stages",
    ("[[model.stage]]\n", "[[model.stage]]\ndim = 8\nchunking = {}\n" * 9 + "[[model.stage]]\n"):
        "`model`: a model has 11 stages",
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG, ids=range(len(WRONG)))
def test_wrong_model_is_refused_in_one_line_that_names_the_path(tmp_path, change):
    path = tmp_path / "model.toml"
    assert change[0] in GOOD
    path.write_text(GOOD.replace(change[0], change[1], 1))
    with pytest.raises(ArbError) as caught:
        read_settings(path)
    assert WRONG[change] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert caught.value.hint
    assert caught.value.fields == ()  # a file has no options


def test_none_removes_a_default(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(GOOD.replace("heads = 2 }\nch", 'heads = 2, top_k = "none" }\nch'))
    assert read_settings(path)["preset"].main.blocks[-1].mixer.top_k is None
