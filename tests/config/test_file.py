"""Settings from a file are those of the options, and what is not a setting is refused."""

import json
import re
from pathlib import Path

import pytest

from arbcli.base.errors import ArbError
from arbcli.config.file import read_settings, settings_text
from arbcli.config.training import train_config_dict
from arbcli.training.configure import new_config

GIVEN = [
    {"preset": "tiny", "data": ('a "b"\\\x7f\n.txt', "ü", "\U0001f600"), "sub_norms": False},
    {"preset": "small", "rule": "votes", "eval_every": 3, "accum": 8, "reduce_dtype": "none"},
    {"preset": "arb-tiny", "moe": True, "graph": True, "codes": (8, 8)},
    {"preset": "base", "weights": "float", "optimizer": "muon", "lr": 1e-5},
    {"preset": "hnet-tiny", "outer_blocks": "mamba", "chunk_length": (5,), "digits": "all"},
]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: given["preset"])
def test_printed_settings_are_read_back(tmp_path, given):
    config = new_config(**given, device="cpu")
    path = tmp_path / "run.toml"
    path.write_text(settings_text(config), encoding="utf-8")
    assert new_config(**read_settings(path)) == config
    facts = tmp_path / "config.json"
    facts.write_text(json.dumps({"config": train_config_dict(config), "text": {}}))
    assert new_config(**read_settings(facts)) == config


def test_few_settings_are_enough(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('preset = "base"\nlr = 1\n[model]\nctx = 3\nweights = "int8"\noptimizer="sign"')
    model = {"weights": "ternary", "digits": "all", "direction": "sign"}
    assert str(read_settings(path)) == str({"preset": "base", "lr": 1.0, "ctx": 3} | model)
    other = tmp_path / "run.json"  # written by hand, and not the `config.json` of a run
    other.write_text('{"preset": "base", "steps": 3, "field": null, "model": {"ctx": 16}}')
    assert read_settings(other) == {"preset": "base", "steps": 3, "ctx": 16}
    path.write_text("")
    assert read_settings(path) == {}


RECORDED = Path(__file__).with_name("wrong_settings.txt").read_text(encoding="utf-8")
"""Files of a line, and the beginning of the error."""


@pytest.mark.parametrize(("text", "said"), re.findall(r"(.*)\n  (.*)\n", RECORDED))
def test_wrong_file_is_refused(tmp_path, text, said):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ArbError) as caught:
        read_settings(path)
    assert str(caught.value).replace(str(path), "FILE").startswith(said)
    assert caught.value.hint


def test_command_prints_settings_and_options_go_first(tmp_path, arb_done, arb_json, arb_error):
    path = tmp_path / "run.toml"
    options = ["--steps", "9", "--dim", "32", "--heads", "2", "--device", "cpu"]
    printed = arb_done("train", *options, "--print-config")
    path.write_text(f"\ufeff{printed.stdout}", encoding="utf-8")  # as some editors save it
    again = arb_done("train", "--config", str(path), "--steps", "5", "--print-config")
    assert again.stdout == printed.stdout.replace("steps = 9", "steps = 5")
    assert re.search('cpu"(?s:.*)weights = "ternary"\noptimizer = "muon"', again.stdout)
    assert "backend" not in again.stdout  # it was not given
    as_json = arb_json("train", "--config", str(path), "--print-config")
    assert (as_json["steps"], as_json["model"]["stages"][0]["dim"]) == (9, 32)
    error = arb_error("train", "--resume", "auto", "--print-config")
    assert "`--print-config` cannot be combined with `--resume`" in error
