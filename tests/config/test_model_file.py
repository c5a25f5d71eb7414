"""A model is written as TOML and read back equal, and a file that is wrong is refused by path."""

import tomllib
from dataclasses import replace

import pytest

from arbcli.base.errors import ArbError
from arbcli.config.file import read_settings
from arbcli.config.model_file import model_from_toml, model_lines
from arbcli.config.presets import PRESETS
from arbcli.verify.models import MODELS

VOTES = replace(PRESETS["tiny"], rule="votes", direction=None, votes_fixes=("order", "bound"))
CONFIGS = MODELS | dict(PRESETS) | {"fixes of votes": VOTES}


@pytest.mark.parametrize("name", CONFIGS)
def test_model_is_read_back_equal(name):
    config = CONFIGS[name]
    written = tomllib.loads("\n".join(model_lines(config)))
    assert model_from_toml(written["model"], "a file") == config


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
