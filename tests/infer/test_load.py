"""No model is built for a file: what cannot be loaded is refused by what it says."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch

from arbcli.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from arbcli.errors import ArbError
from arbcli.infer import load
from arbcli.infer.load import load_model, load_weights
from arbcli.model.build import build_model


def rewritten(path: Path, saved: Path, **changes) -> Path:
    """Write a checkpoint again that differs in some of its parts."""
    write_checkpoint(path, dataclasses.replace(load_checkpoint(saved), **changes))
    return path


@pytest.fixture
def built(monkeypatch) -> list[int]:
    """Note of how many blocks each model is that is built."""
    found: list[int] = []

    def build(config, dtype):
        found.append(config.layers)
        return build_model(config, dtype)

    monkeypatch.setattr(load, "build_model", build)
    return found


def test_blocks_that_are_not_there_are_not_built(saved, built, tmp_path):
    path = saved()
    stages = load_checkpoint(path).config["stages"]
    config = load_checkpoint(path).config | {
        "stages": [stage | {"blocks": 500 * stage["blocks"]} for stage in stages]
    }
    other = rewritten(tmp_path / "other", path, config=config)
    with pytest.raises(
        ArbError, match=r"it has .* tensors, and the model of its configuration"
    ) as told:
        load_model(other, device="cpu")
    assert "it was altered" in told.value.hint
    assert max(built) == 1
    load_model(path, device="cpu")
    assert max(built) == 2


@pytest.mark.slow
def test_tensors_of_stages_are_counted(saved, small_hnet, built, tmp_path):
    given = {name: size for name, size in small_hnet.items() if name not in ("preset", "batch")}
    path = saved("hnet-tiny", **given)
    stages = load_checkpoint(path).config["stages"]
    longer = [stages[0] | {"after": 300 * stages[0]["after"]}, *stages[1:]]
    other = rewritten(
        tmp_path / "other", path, config=load_checkpoint(path).config | {"stages": longer}
    )
    built.clear()
    with pytest.raises(ArbError, match="and the model of its configuration"):
        load_model(other, device="cpu")
    assert max(built) == 1
    load_model(path, device="cpu")


def test_model_of_several_processes_is_loaded_by_one(saved, tmp_path):
    path = saved()
    checkpoint = load_checkpoint(path)
    alone = load_model(path, device="cpu")
    model = build_model(load.saved_config(checkpoint), torch.float32)
    model.load_state_dict(checkpoint.tensors)
    model.declare_wire()
    data, tensors = checkpoint.data | {"wire": "int8"}, model.state_dict()
    assert tensors.keys() > checkpoint.tensors.keys()
    shared = rewritten(tmp_path / "shared", path, data=data, tensors=tensors)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(load_model(shared, device="cpu")(ids), alone(ids))
    with pytest.raises(ArbError):  # none of them says that it has such tensors
        load_model(rewritten(tmp_path / "other", path, tensors=tensors), device="cpu")


def test_dtype_that_is_asked_for_goes_before_that_of_the_run(saved, tmp_path):
    path = saved()
    (tmp_path / "config.json").write_text('{"config": {"compute": "bf16"}}')
    assert load_model(path, device="cpu").compute_dtype == torch.bfloat16
    assert load_model(path, device="cpu", compute="fp32").compute_dtype == torch.float32
    with pytest.raises(ArbError, match="`compute` is `fp64`"):
        load_model("nowhere", device="cpu", compute="fp64")


@pytest.mark.parametrize("config", ["[]", '{"config": 3}', '{"config": {"compute": "fp64"}}'])
def test_run_that_tells_no_dtype_is_refused(config, saved, tmp_path):
    path = saved()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ArbError, match=r"not values by name|no valid `config`|`compute` is `fp64`"):
        load_weights(path, print)


def test_origin_of_an_export_is_what_it_was_made_of():
    checkpoint = mock.Mock(spec=Checkpoint, digest="own", data={})
    weights = load.Weights(mock.Mock(), checkpoint, Path("a"), "fp32")
    assert weights.origin == "own"
    checkpoint.data = {"origin": "first"}
    assert weights.origin == "first"
