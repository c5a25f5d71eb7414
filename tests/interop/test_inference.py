"""The weights alone: a quarter of a byte each, and all that generating and evaluating need."""

import json
import os
from pathlib import Path

import pytest
import torch

import arbcli
from arbcli.generation.generation import generate
from arbcli.generation.load import load_model
from arbcli.generation.sampling import Sampling
from arbcli.interop.exporting import export
from arbcli.model.checkpoint import load_checkpoint


@pytest.mark.parametrize(
    ("rule", "digits"), [("moment", "trit"), ("votes", "trit"), ("nibble", "all")]
)
def test_exported_weights_predict_as_their_checkpoint(saved, tmp_path, rule, digits):
    checkpoint = saved(rule=rule, digits=digits)
    path = tmp_path / "weights.safetensors"
    report = export(checkpoint, "safetensors", out=path)
    assert report.origin == load_checkpoint(checkpoint).digest
    whole = load_model(checkpoint, device="cpu")
    alone = arbcli.load(path, device="cpu")
    ids = torch.arange(32).view(1, 32)
    assert torch.equal(alone(ids), whole(ids))
    text = [b"".join(generate(model, b"a", 6, Sampling())) for model in (whole, alone)]
    assert text[0] == text[1]
    assert {name.rpartition(".")[2] for name in alone.state_dict()} <= {
        "trits", "exponent", "fraction", *(["remainder"] if digits == "all" else [])
    }  # fmt: skip
    assert (rule, digits) == ("nibble", "all") or path.stat().st_size < checkpoint.stat().st_size


def test_export_has_the_origin_of_its_checkpoint_and_so_has_its_own_export(saved, tmp_path):
    source = load_checkpoint(saved())
    (tmp_path / "config.json").write_text(json.dumps({"config": {"compute": "fp32"}}))
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    export(tmp_path, "safetensors", out=first)
    weights = load_checkpoint(first)
    assert (weights.step, weights.config, weights.counters) == (7, source.config, {})
    assert weights.data == source.data | {"origin": source.digest, "compute": "fp32"}
    export(first, "safetensors", out=second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("of_run", "kind", "name"),
    [(False, "safetensors", "{}-weights.safetensors"), (True, "hf", "{}-hf")],
)
def test_export_is_named_for_its_run_or_else_for_its_file(
    of_run, kind, name, saved, tmp_path, monkeypatch
):
    path = saved()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if of_run:
        (tmp_path / "config.json").write_text(json.dumps({"config": {"compute": "fp32"}}))
    report = export(path, kind)
    assert report.path == name.format(tmp_path.name if of_run else "step-000007")
    assert (tmp_path / "here" / report.path).exists()
    assert report.checkpoint == str(path)
    assert report.type == ("trits" if kind == "safetensors" else "BF16")
    if of_run:  # wherever one stands
        monkeypatch.chdir(tmp_path)
        assert export(Path("."), kind).path == name.format(tmp_path.name)


def test_run_whose_name_is_not_utf_8_is_exported(saved, tmp_path):
    run = tmp_path / os.fsdecode(b"run \xff")
    run.mkdir()
    (run / "config.json").write_text('{"config": {"compute": "fp32"}}')
    saved().rename(run / "step-000007.safetensors")
    export(run, "safetensors", out=tmp_path / "weights")
    export(run, "hf", out=tmp_path / "made")
    assert "# run ?\n" in (tmp_path / "made" / "README.md").read_text()
