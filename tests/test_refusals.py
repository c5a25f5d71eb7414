"""Refusals and their messages: each names the setting or file, and its value."""

import ast
import errno
import json
import os
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import typer
from syntax import parsed, walk

import arbcli
from arbcli.base.errors import ArbError
from arbcli.cli import app
from arbcli.commands._options import replace_fields
from arbcli.config.presets import preset
from arbcli.config.short_forms import ARGUMENTS
from arbcli.config.training import FIELDS, SETTINGS, train_config
from arbcli.generation.load import load_weights
from arbcli.interop.exporting import export
from arbcli.interop.huggingface import export as hugging_face
from arbcli.kernels.runtime.device import (
    check_compute,
    resolve_device,
)
from arbcli.model import checkpoint as checkpoints
from arbcli.model.build import build_model
from arbcli.model.checkpoint import keep_best, load_checkpoint
from arbcli.model.updater import Updater
from arbcli.training.directory import make_directory
from arbcli.training.record import RunRecords, keep_records

SAYING = "ArbError", "setting_error", "note", "noted"
"""Ends of the names of functions that say something to a user."""
OF_OTHERS = {
    ("_options.py", "--digits"), ("training.py", "moe_graph"),
    ("convert.py", "skip_unsupported"), ("initial.py", "preset"), ("__init__.py", "--upgrade"),
    ("weights.py", "use_reentrant"), ("weights.py", "bf16"), ("weights.py", "dtype"),
    ("optimizer.py", "accumulation"), ("optimizer.py", "use_reentrant"),
    ("weights.py", "create_graph"),
}  # fmt: skip
"""Old names, arguments of libraries, and an area of a model."""
PLACE = {"device": "cpu", "backend": "torch", "compute": "fp32"}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def model_config(name: str, **options):
    return lambda: preset(name, **options)


def run_config(name: str = "tiny", **options):
    return lambda: train_config(name, **PLACE | options)


CONFIGURATIONS = {
    "unknown fix of votes": (model_config("tiny", rule="votes", votes_fixes=("order", "none")),
        "`votes_fixes` is `none`", "choose one of: `threshold`", ("votes_fixes",)),
    "fix of votes twice": (model_config("tiny", rule="votes", votes_fixes=("order", "order")),
        "names a fix twice", "name it once", ("votes_fixes",)),
    "fixes of another rule": (model_config("tiny", votes_fixes=("order",)),
        "only applies to the rule `votes`", "leave it out, or use `rule=votes`",
        ("votes_fixes", "rule")),
    "digits of votes": (model_config("tiny", rule="votes", digits="all"),
        "the rule `votes` stores no digits",
        "`digits=all` out, or use one of: moment, nibble, carry", ("digits",)),
    "digits of a baseline": (model_config("tiny", weights="ste", digits="all"),
        "a float baseline stores no digits", "moment", ("digits",)),
    "half keys": (model_config("arb-tiny", top_k=2000), "`top_k` is 2000", "half keys", ("top_k",)),
    "stages": (model_config("hnet-tiny", outer_dim=(32, 32)), "for 1 stages, and `outer_dim` for 2",
        "1 to 8", ("outer_layers", "outer_dim")),
    "best of a baseline": (run_config(weights="float", keep_best=True),
        "a float baseline has no checkpoint", "leave `keep_best` out", ("keep_best", "weights")),
    "end of a constant rate": (run_config(schedule="constant", final_lr=0.5),
        "does not change at the end", "`final_lr` out, or choose another `schedule`",
        ("final_lr", "schedule")),
    "fading of other weights": (run_config(digits="all", fade_from=0.1), "only applies to weights",
        "`fade_from` out, or use `digits=fade`", ("fade_from", "digits")),
    "fading beyond the end": (run_config(digits="fade", fade_from=0.6), "fade from 0.6 to 1.1 of",
        "a larger `fade_to` of at most 1", ("fade_from", "fade_to")),
    "fading that ends before": (run_config(digits="fade", fade_from=0.4, fade_to=0.3),
        "would fade from 0.4 to 0.3 of the",
        "`fade_from` of 0 or more, and a larger `fade_to`", ("fade_from", "fade_to")),
    "streams of others": (model_config("arb-tiny", streams=2), "read one residual stream",
        "use `streams = 1`", ("streams",)),
    "reduce dtype of a baseline": (run_config(weights="float", reduce_dtype="int8"),
        "a float baseline has no rounded gradients", "leave `reduce_dtype` out",
        ("reduce_dtype", "weights")),
    "too many parts": (run_config(reduce_dtype="int16", accum=4097),
        "sums of 4,097 parts of int16 could wrap",
        "use `accum` of up to 4,096", ("accum", "reduce_dtype")),
    "fp8 of a baseline": (run_config(weights="ste", compute="fp8"), "no products in eight bits",
        "`compute=fp8` out", ("compute", "weights")),
    "rate of votes": (run_config(rule="votes", lr=0.1), "the rule `votes` has no learning rate",
        "leave `lr` out", ("lr", "rule")),
    "direction of a float head": (run_config(weights="float", fields={"head_direction": "sign"}),
        "a float baseline takes no direction", "leave `head_direction` out", ()),
    "direction of a tied head": (run_config(fields={"head_direction": "sign", "tied": True}),
        "no linear head", "leave `head_direction` out", ()),
    "attention of chunks": (model_config("hnet-tiny", attention="compressed"),
        "`hnet-tiny` has no such part: `attention`", "use it with `tiny` or `small`",
        ("attention",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configuration_is_refused_with_its_values_and_a_way_out(name):
    make, message, hint, fields = CONFIGURATIONS[name]
    with pytest.raises(ArbError) as caught:
        make()
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.fields == fields


@cache
def sayings() -> list[tuple[Path, ast.Call]]:
    """List the calls that say something to a user, with their files."""
    paths = [*Path(arbcli.__file__).parent.rglob("*.py")]
    texts = ((path, path.read_text()) for path in paths)
    saying = [path for path, text in texts if any(f"{name}(" in text for name in SAYING)]
    return [
        (path, call)
        for path in saying
        for call in walk(parsed(path))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(SAYING)
    ]


def test_every_refusal_has_a_hint_and_lists_the_settings_that_it_names():
    """A command line shows those that are listed as its options."""
    unlisted, named = set(), 0
    for path, call in sayings():
        if ast.unparse(call.func) != "ArbError":
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        message, hint = call.args
        said = ast.unparse(message) + ast.unparse(hint)
        names = {*re.findall(r"`(\w+)(?:=\w+)?`", said)} & SETTINGS.keys()
        parts = [*walk(given.get("fields", ast.Tuple([])))]
        if not any(isinstance(part, ast.Name) for part in parts):
            listed = {part.value for part in parts if isinstance(part, ast.Constant)}
            unlisted |= {f"{path.name}: {name}" for name in names - listed}
            named += len(names)
    # an argument of the library, and keys of a model's file
    assert unlisted == {"__init__.py: batch", "model.py: router", "model_file.py: dim"}
    assert named > 15


def test_every_option_and_setting_that_a_message_names_exists():
    commands = typer.main.get_command(app).commands.values()
    options = {"--help", "--version"} | {
        name
        for command in commands
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    settings, unknown, named = {*SETTINGS, *FIELDS, *ARGUMENTS}, set(), 0
    for path, call in sayings():
        parts = [part.value for part in walk(call) if isinstance(part, ast.Constant)]
        said = " ".join(part for part in parts if isinstance(part, str))
        names = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", said))
        fields = set(re.findall(r"`(\w+)=|--set ([\w.]+)=?", said))
        named += len(names)
        unknown |= {(path.name, name) for name in names - options}
        unknown |= {(path.name, name) for pair in fields for name in pair if name} - {
            (path.name, name) for name in settings
        }
    assert unknown == OF_OTHERS
    assert named > 150


def test_setting_without_an_option_is_named_as_it_can_be_set():
    said, fields = "`scale_losses` and `lr` and `outer_dim`", ("scale_losses", "lr", "outer_dim")
    expected = "`--set scale_losses` and `--lr` and `--set outer_dim`"
    assert replace_fields(said, fields) == expected


def test_export_that_cannot_be_written_leaves_nothing(saved, tmp_path, monkeypatch):
    path, full = saved(), OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(hugging_face, "_write_files", mock.Mock(side_effect=full))
    with pytest.raises(ArbError, match=r"cannot write `.*model`: No space left on device"):
        export(path, "hf", out=tmp_path / "model")
    assert not [path for path in tmp_path.iterdir() if "model" in path.name]
    monkeypatch.undo()
    left = tmp_path / ".model.0123abcd.tmp"  # by a killed process
    left.mkdir()
    (left / "other").touch()
    export(path, "hf", out=tmp_path / "model")
    assert "other" not in [path.name for path in tmp_path.rglob("*")]


def test_run_without_its_dtype_is_refused(saved, tmp_path):
    path = saved()
    (tmp_path / "config.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(ArbError, match=r"no valid `config\.compute`: it is missing") as caught:
        load_weights(path, print)
    assert caught.value.hint == "give `--compute`"
    (tmp_path / "config.json").write_text(json.dumps({"config": {"compute": "fp8"}}))
    assert load_weights(path, print).compute == "fp8"


def test_checkpoint_is_read_where_there_is_room_for_it_and_its_model(saved, monkeypatch):
    path = saved()
    size = sum(tensor.nbytes for tensor in load_checkpoint(path).tensors.values())
    monkeypatch.setattr("arbcli.kernels.runtime.device.available_bytes", lambda: 2 * size)
    load_weights(path, print)
    monkeypatch.setattr("arbcli.kernels.runtime.device.available_bytes", lambda: 2 * size - 1)
    with pytest.raises(ArbError, match="to read it, and make its model, needs at least 0"):
        load_weights(path, print)


def test_best_checkpoint_is_copied_where_there_are_no_links(saved, tmp_path, monkeypatch):
    path = saved()
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(errno.EPERM, "no links")))
    best = keep_best(path)
    assert best.name == "best-000007.safetensors"
    assert best.read_bytes() == path.read_bytes()
    aside = checkpoints.set_aside(path, leave=True)
    assert (aside.exists(), path.exists()) == (True, False)


DEVICES = {
    "nonsense": ("no device is named `nonsense`", 0), "xpu": ("`xpu` is not supported", 0),
    "mps": ("there is no Apple GPU for `mps`", 0),
    "cuda": ("there is no CUDA device for `cuda`", 0),
    "cuda:2": ("there is no CUDA device for `cuda:2`", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_missing_device_is_named(name, monkeypatch):
    message, number = DEVICES[name]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ArbError, match=message):
        resolve_device(name)
    if number:
        assert resolve_device("cuda:1") == torch.device("cuda:1")
        assert resolve_device("cuda") == CUDA


@pytest.mark.parametrize(("capability", "fits"), [((8, 6), False), ((8, 9), True)])
def test_products_in_eight_bits_need_a_gpu_that_has_them(capability, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    check_compute("bf16", CUDA)
    check_compute("fp8", CPU)
    if fits:
        check_compute("fp8", CUDA)
        return
    number = "".join(map(str, capability))
    with pytest.raises(ArbError, match=f"`Some GPU` is sm_{number}, and .* needs sm_89") as caught:
        check_compute("fp8", CUDA)
    assert caught.value.fields == ("compute",)


def test_records_that_cannot_be_written_or_read_are_explained(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    record = SimpleNamespace(as_json=lambda: {"step": 1})
    path = str(tmp_path / "metrics.jsonl")
    with pytest.raises(ArbError) as caught:
        RunRecords(tmp_path).append(record)
    assert str(caught.value).startswith(f"cannot write `{path}`: Is a directory")
    assert f"`--resume {tmp_path}`" in caught.value.hint
    with pytest.raises(ArbError) as caught:
        keep_records(tmp_path, lambda record: True)
    assert str(caught.value).startswith(f"cannot read `{path}`: Is a directory")


def test_directory_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path / "file" / "run", "cannot make"), (tmp_path / "file", "file`")):
        with pytest.raises(ArbError, match=message) as caught:
            make_directory(path)
        assert "another `--out`" in caught.value.hint


def test_counters_of_another_version_are_refused(small_graph):
    model = build_model(preset("tiny", dim=32, layers=1, heads=1, ffn=32))
    updater = Updater(model.weights().values(), 0, torch.float32)
    for counters, named in (({"refused": 1}, "`refused`"), ({}, "none")):
        with pytest.raises(ArbError, match=f"the checkpoint has different counters: {named}"):
            updater.restore(counters)
    updater.restore({"refused": 5, "nonfinite_steps": 2})
    assert updater.counters() == {"refused": 5, "nonfinite_steps": 2}
