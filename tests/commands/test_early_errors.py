"""Mistakes in options and paths are refused before torch is imported, which takes seconds."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from arbcli.base.errors import ArbError
from arbcli.cli import app
from arbcli.commands._options import check_settings
from arbcli.commands._outputs import PICTURES, check_file, check_folder
from arbcli.config.presets import preset

RECORDED = Path(__file__).with_name("early_errors.txt").read_text(encoding="utf-8")
MISTAKES = re.findall(r"^\$ (.*)\n(.*)\n(.*)$", RECORDED, re.MULTILINE)
"""Commands, and the error and the hint of each; `…` stands for the rest of a line."""
MODEL = Path(__file__).parents[2] / "examples" / "arb-2b.toml"


def header_of(config):
    """Write the header of a checkpoint, which alone tells what model it is of."""
    about = {"__metadata__": {"arb": json.dumps({"config": dataclasses.asdict(config)})}}
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text


def options_of(command: str) -> set[str]:
    subcommand = typer.main.get_command(app).commands.get(command)
    params = subcommand.params if subcommand else ()
    return {name for one in params for name in (*one.opts, *one.secondary_opts)}


def test_mistakes_are_refused_without_torch(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, objective in (("made", "next"), ("masked", "masked"), ("fill", "fill")):
        (tmp_path / name).mkdir()
        header = header_of(preset("tiny", objective=objective))
        (tmp_path / name / "step-000001.safetensors").write_bytes(header)
    for name, content in (
        ("chats.jsonl", '\ufeff{"messages": []}\n{'),
        ("pairs.json", '[\n{"prompt": "a", "completion": "b"}]'),
        ("tokens.bin", "\1\0"),
        ("text.txt", "ternary weights"), ("empty.txt", ""), ("model.toml", MODEL.read_text()),
        ("preset.toml", 'preset = "tiny"\n[model]\nctx = 8'), ("steps.toml", "steps = 3"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
    (tmp_path / "shard.bin").write_bytes(b"\x88\xd84\1\1".ljust(1024, b"\0"))
    for name in ("empty", "folder.png", "run", "texts", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "texts" / "a.txt").write_text("ternary weights")
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "step-000001.safetensors").write_bytes(b"")
    there = {*tmp_path.rglob("*")}
    code = (
        "import sys; sys.modules |= {'torch': None, 'triton': None}\n"
        "import functools; from typer import main\n"
        "main.get_command = functools.cache(main.get_command)\n"  # a third of a call
        "from arbcli import cli; from arbcli.commands import _options\n"
        "_options.may_have_gpu = lambda: False\n"
        "sys.modules['arbcli.commands.train'].may_have_gpu = lambda: False\n"
        f"for words in {[words for words, *_ in MISTAKES]}:\n"
        "    sys.argv = ['arb', *words.split()]\n"
        "    try: cli.main()\n"
        "    except SystemExit as ended: print(ended.code)\n"
    )
    command = [sys.executable, "-OO", "-c", code]  # also without docstrings
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(RECORDED.splitlines()) == 3 * len(MISTAKES)
    assert done.stdout.split() == ["2"] * len(MISTAKES)
    lines = iter(done.stderr.splitlines())
    for (words, *wanted), *said in zip(MISTAKES, lines, lines, strict=True):
        for line, expected in zip(said, wanted, strict=True):
            beginning, cut, _ = expected.partition("…")
            assert line.startswith(beginning) if cut else line == expected, words
        named = {*re.findall(r"`(--[a-z-]+)", said[1])}
        assert named <= {"--help"} | options_of(words.split()[0]), (words, named)
    assert {*tmp_path.rglob("*")} == there


def test_gates_may_be_packed_in_the_dtype_of_the_device():
    check_settings({"pack": True})
    check_settings({"preset": "1b", "pack": True, "compute": "fp8"})


def test_places_that_may_not_be_written_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ArbError, match="Permission denied"):
        check_file(tmp_path / "a.png", "--plot", PICTURES)
    with pytest.raises(ArbError, match="Permission denied"):
        check_folder(tmp_path, "--ledger")
