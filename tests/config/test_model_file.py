"""A model is written as TOML and read back equal, and a file that is wrong is refused by path."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

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
RECORDED = Path(__file__).with_name("wrong_models.txt").read_text(encoding="utf-8")
"""Text of the good file, its replacement, and the beginning of the error."""
WRONG = [
    *re.findall(r"^(.*) => ?(.*)\n  (.*)", RECORDED, re.MULTILINE),
    ("ctx = 64", "ctx = 64\nhead" + ".a" * 2_000 + " = 1", "`FILE` is not TOML: it is nested"),
    ("ctx = 64", "ctx = " + "[" * 2_000 + "]" * 2_000, "`FILE` is not TOML"),
    ("dim = 32", "dim = 0x" + "f" * 9999, "`model.stage[0].dim` is int without an end"),
    ("[[model.stage]]\ndim", "[[model.stage]]\n" * 65 + "dim", "`FILE` has no list of stages"),
    ("[[model.stage]]\n", "[[model.stage]]\ndim = 8\nchunking = {}\n" * 9 + "[[model.stage]]\n",
     "`model`: a model has 11 stages"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), WRONG, ids=range(len(WRONG)))
def test_wrong_model_is_refused_in_one_line_that_names_the_path(tmp_path, old, new, said):
    path = tmp_path / "model.toml"
    old, new = (part.replace("\\n", "\n") for part in (old, new))
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ArbError) as caught:
        read_settings(path)
    message = str(caught.value).replace(str(path), "FILE")
    assert message.startswith(said)
    assert "\n" not in message
    assert len(message) < 300
    assert caught.value.hint
    assert caught.value.fields == ()  # a file has no options


def test_none_removes_a_default(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(GOOD.replace("heads = 2 }\nch", 'heads = 2, top_k = "none" }\nch'))
    assert read_settings(path)["preset"].main.blocks[-1].mixer.top_k is None
