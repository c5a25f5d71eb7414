"""Refusals and their messages: each names the setting or file, and its value."""

import ast
import errno
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
from arbcli.config.training import FIELDS, SETTINGS
from arbcli.generation.load import load_named_model
from arbcli.interop.exporting import export
from arbcli.interop.huggingface import export as hugging_face
from arbcli.kernels.runtime.device import check_compute, resolve_device
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
    ("convert.py", "skip_unsupported"), ("initial.py", "preset"),
    ("weights.py", "use_reentrant"), ("weights.py", "bf16"), ("weights.py", "dtype"),
    ("optimizer.py", "accumulation"), ("optimizer.py", "use_reentrant"),
    ("weights.py", "create_graph"), ("group.py", "LOCAL_RANK"),
}  # fmt: skip
"""Old names, arguments of libraries, a variable, and an area of a model."""
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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


def test_checkpoint_is_read_where_there_is_room_for_it_and_its_model(saved, monkeypatch):
    path = saved()
    size = sum(tensor.nbytes for tensor in load_checkpoint(path).tensors.values())
    monkeypatch.setattr("arbcli.kernels.runtime.device.available_bytes", lambda: 2 * size)
    load_named_model(path, torch.device("cpu"), print)
    monkeypatch.setattr("arbcli.kernels.runtime.device.available_bytes", lambda: 2 * size - 1)
    with pytest.raises(ArbError, match="to read it, and make its model, needs at least 0"):
        load_named_model(path, torch.device("cpu"), print)


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


def test_products_in_eight_bits_need_a_gpu_that_has_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_compute("fp8", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    check_compute("bf16", CUDA)
    check_compute("fp8", CPU)
    with pytest.raises(ArbError, match=r"`Some GPU` is sm_86, and .* needs sm_89") as caught:
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
