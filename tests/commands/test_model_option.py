"""`--model FILE` is the whole model of a file, for every command that makes one."""

import json
from unittest import mock

import pytest

from arbcli.config.file import read_settings
from arbcli.config.presets import with_storage
from arbcli.errors import ArbError

TOML = """steps = 7
[model]
ctx = 16
[model.block.near]
mixer = { kind = "attention", heads = 2 }
channel = { kind = "experts", experts = 4, width = 8 }
[[model.stage]]
dim = 32
blocks = "near*2"
"""
STORAGE = ["--ctx", "8", "--rule", "carry", "--tscale-type", "T8", "--optimizer", "sign"]
STORED = {"ctx": 8, "rule": "carry", "scale_type": "T8", "direction": "sign"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(TOML)
    return path


@pytest.mark.parametrize("command", ["train", "audit-memory", "probe-loss"])
def test_model_of_a_file_is_that_of_the_run(command, file, arb_here, monkeypatch):
    new_config = mock.Mock(side_effect=ArbError("enough"))
    monkeypatch.setattr("arbcli.train.configure.new_config", new_config)
    assert "enough" in arb_here(command, "--model", str(file), *STORAGE).stderr
    given = new_config.call_args.kwargs
    assert given["preset"] == read_settings(file)["preset"]
    assert {name: given[name] for name in STORED} == STORED
    assert "model_file" not in given
    assert given.get("steps") != 7  # other settings of the file are left aside


def test_model_of_a_file_is_counted(file, arb_here):
    done = arb_here("count-params", "--model", str(file), *STORAGE, "--json")
    expected = with_storage(read_settings(file)["preset"], **STORED)
    report = json.loads(done.stdout)
    assert report["config"]["stages"][0]["blocks"][0]["channel"]["experts"] == 4
    assert {name: report["config"][name] for name in STORED} == STORED
    assert expected.ctx == 8
    assert [part["path"] for part in report["parts"]] == [
        "embedding", "blocks", "blocks.0-1", "blocks.0-1.attention", "blocks.0-1.experts", "norm",
        "head",
    ]  # fmt: skip
    shown = arb_here("count-params", "--model", str(file)).stdout
    assert "blocks 0-1" in shown
