"""`arb generate` and `arb evaluate` as a person or a program meets them."""

import io
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from made_runs import train

from arbcli.commands._prompts import stdin_has_data
from arbcli.kernels.runtime.backend import default_backend

BACKEND = default_backend(torch.device("cpu"))
TEXT = "ternary weights read naïve text. " * 200


KINDS: dict[str, tuple[str, dict]] = {
    "plain": (TEXT, {"steps": 20, "batch": 8}),
    "masked": ("abcdefgh" * 400, {"objective": "masked", "steps": 100, "batch": 8}),
    "fill": ("abcd" * 400, {"objective": "fill", "steps": 30, "batch": 8, "ctx": 24}),
    "chunks": (TEXT, {"boundaries": "every", "steps": 2}), "tokens": (TEXT, {"steps": 1}),
}  # fmt: skip
"""Texts and settings of runs."""


@pytest.fixture(scope="module")
def run_of(small_hnet, tmp_path_factory, request) -> Callable[[str], str]:
    """Return a function that trains a run of a kind, once."""

    @cache
    def train_once(kind: str) -> str:
        text, settings = KINDS[kind]
        if kind in ("chunks", "tokens"):
            settings = small_hnet | settings
        if kind == "tokens":
            settings |= {"tokenizer": request.getfixturevalue("byte_tokenizer")}
        return str(train(tmp_path_factory.mktemp(kind), text.encode(), **settings))

    return train_once


@pytest.fixture
def run(run_of) -> str:
    return run_of("plain")


@pytest.fixture
def generate(run, arb_here):
    return partial(arb_here, "generate", "--checkpoint", run, "--device", "cpu")


def test_prompt_is_echoed_on_a_terminal_or_if_asked(generate, monkeypatch):
    words = ("--prompt", "ternary ", "--length", "4")
    plain = generate(*words).stdout
    assert generate(*words, "--echo").stdout == f"ternary {plain}"
    monkeypatch.setattr("arbcli.commands.generate.is_stdout_terminal", lambda: True)
    assert generate(*words).stdout == f"ternary {plain}"
    assert generate(*words, "--no-echo").stdout == plain
    assert generate(*words, "--bytes").stdout == plain
    assert generate("--length", "4").stdout == generate("--length", "4", "--no-echo").stdout


def test_eight_bits_take_half_the_cache_and_hardly_any_loss(run, arb_json):
    here = ["--checkpoint", run, "--device", "cpu", "--compute", "bf16"]
    sizes, losses = [], []
    for given in ([], ["--kv", "fp8"]):
        report = arb_json("generate", *here, "--length", "20", *given)
        read = arb_json("evaluate", *here, "--stride", "16", *given)
        assert report["kv"] == read["kv"] == (given or ["bf16"])[-1]
        sizes.append(report["cache_bytes"])
        losses.append(read["nats_per_byte"])
    assert sizes == [2 * 2 * 16 * 2 * 16, 2 * 2 * 16 * 17]  # keys and values, heads, window
    assert 0 < abs(losses[1] - losses[0]) < 0.02


def test_generate_writes_the_same_as_json_bytes_and_text(generate, monkeypatch):
    args = ["--length", "60", "--temperature", "3", "--seed", "7"]
    report = json.loads(generate(*args, "--json").stdout)
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written))
        generate(*args, "--bytes")
        raw = written.getvalue()
    assert len(raw) == 60
    assert report["text"] == raw.decode(errors="replace")
    done = generate(*args)
    assert (done.returncode, done.stdout) == (0, report["text"])
    assert "60 bytes, " in done.stderr
    assert f"bytes/s on cpu, backend {BACKEND}" in done.stderr
    assert "\ufffd" in report["text"]
    assert (report["prompt"], report["seed"], report["length"]) == ("\n", 7, 60)
    assert report["checkpoint"].endswith("step-000020.safetensors")
    assert report["bytes_per_second"] > 0


def test_every_option_reaches_the_prompt_loop(generate, monkeypatch):
    chat = mock.Mock()
    monkeypatch.setattr("arbcli.commands.generate.chat", chat)
    monkeypatch.setattr("arbcli.commands.generate.is_terminal", lambda: True)
    how = ["--temperature", "0.5", "--top-k", "3", "--top-p", "0.25", "--seed", "9"]
    how += ["--length", "4", "--kv", "int8", "--compute", "bf16", "--ahead", "2"]
    assert generate(*how).returncode == 0
    _, length, sampling, *others = chat.call_args.args
    assert (length, *others) == (4, BACKEND, "int8", None, 2)
    assert asdict(sampling) == {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 9}
    for other in (["--prompt", "a"], ["--json"], ["--bytes"], ["--chunks"]):
        generate("--length", "1", *other)
    assert chat.call_count == 1


def test_holes_are_filled_from_left_to_right_too(run_of, arb_here, arb_json):
    fill_run = run_of("fill")
    generate = partial(arb_here, "generate", fill_run, "--device", "cpu", "--temperature", "0")
    done = generate("--infill", "abc…bc…bcd", "--length", "2")
    assert done.stdout == "abcdabcdabcd"
    assert "4 symbols filled" in done.stderr
    assert generate("--prompt", "abcd", "--length", "4", "--bytes").stdout == "abcd"
    # each of four letters alone costs 1.39
    assert arb_json("evaluate", fill_run)["nats_per_byte"] < 1.2


def test_holes_are_filled_from_both_sides(run_of, arb_here, arb_json):
    masked_run = run_of("masked")
    generate = partial(arb_here, "generate", masked_run, "--device", "cpu", "--temperature", "0")
    done = generate("--infill", "abc…fg…bcd", "--length", "2")
    assert done.stdout == "abcdefghabcd"
    assert "4 symbols filled in 4 steps" in done.stderr
    report = json.loads(generate("--infill", "abc…fgh", "--length", "2", "--json").stdout)
    told = {key: report[key] for key in ("text", "length", "steps", "temperature", "top_k")}
    assert told == {"text": "abcdefgh", "length": 2, "steps": 2, "temperature": 0, "top_k": 256}
    after = ["--prompt", "abcd", "--length", "4", "--steps", "1"]
    report = json.loads(generate(*after, "--json").stdout)
    assert (report["text"][:4], len(report["text"]), report["steps"]) == ("abcd", 8, 1)
    assert generate(*after, "--bytes").stdout == report["text"]
    report = arb_json("evaluate", masked_run, "--draws", "3")
    assert (report["draws"], report["stride"]) == (3, 16)
    assert report["nats_per_byte"] < 1.5  # each of eight letters alone costs 2.08


def test_prompts_of_a_file_are_a_line_each(generate, tmp_path, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    lines = '{"prompt": "to", "seed": 7}', "", '"read"', '{"prompt": "na\u00efve", "length": 2}'
    path.write_text("\n".join(lines))
    how = ["--length", "5", "--temperature", "2", "--top-k", "9", "--seed", "3"]
    done = generate("--prompts", str(path), *how)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(text["index"], text["prompt"], text["length"], text["seed"]) for text in rows] == [
        (0, "to", 5, 7), (1, "read", 5, 3), (2, "naïve", 2, 3),
    ]  # fmt: skip
    assert {(text["temperature"], text["top_k"], text["top_p"]) for text in rows} == {(2.0, 9, 1.0)}
    alone = json.loads(generate("--prompt", "to", *how[:-1], "7", "--json").stdout)
    assert rows[0]["text"] == alone["text"]
    assert "3 texts, 12 bytes, " in done.stderr
    assert f"on cpu, backend {BACKEND}, 3 at once" in done.stderr
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert generate("--prompts", "-", *how).stdout == done.stdout
    alike = generate("--prompts", str(path), "--batch", "2", "--backend", "torch", "--length", "1")
    assert "backend torch, 2 at once" in alike.stderr


def test_generate_stops_quietly_when_nobody_reads(generate, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    done = generate("--length", "9")
    assert "Traceback" not in done.stderr
    with suppress(BrokenPipeError):
        sys.stdout.close()


def test_generate_refuses_a_prompt_and_length_beyond_any_text(run, arb_here, monkeypatch):
    monkeypatch.setattr("arbcli.generation.decoder.MAX_LENGTH", 20)
    done = arb_here("generate", "--checkpoint", run, "--length", "20", "--prompt", "ab")
    assert "prompt and generated text have 22 bytes" in done.stderr
    assert arb_here("generate", "--checkpoint", run, "--length", "18", "--prompt", "ab").stdout


def test_evaluate_takes_the_held_out_text_of_the_last_run(
    run, arb_here, arb_json, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(Path(run).parent)
    report = arb_json("evaluate", "--checkpoint", "auto", "--device", "cpu")
    assert report["text"].startswith("held out of ")
    assert report["bytes"] == len(TEXT.encode()) // 10
    assert report["checkpoint"] == "runs/run/step-000020.safetensors"
    told = "the text is not the one that"
    text = Path(run).parent / "text.txt"
    text.write_bytes(TEXT.encode() + b"more")
    try:
        assert told in arb_here("evaluate", "--checkpoint", run, "--device", "cpu").stderr
    finally:
        text.write_text(TEXT, encoding="utf-8")


def test_evaluate_tells_how_far_it_is_unless_it_is_quiet(run, tmp_path, arb_here):
    path = tmp_path / "book.txt"
    path.write_text(TEXT[:1000], encoding="utf-8")
    args = ["evaluate", "--checkpoint", run, "--data", str(path), "--device", "cpu"]
    assert "100 %" in arb_here(*args).stderr
    quiet = arb_here(*args, "--json", "--quiet")
    assert (quiet.returncode, quiet.stderr) == (0, "")


RECORDED = Path(__file__).with_name("late_errors.txt").read_text(encoding="utf-8")
ERRORS = re.findall(r"^\$ (.*)\n(.*)\n(.*)$", RECORDED, re.MULTILINE)
"""Commands with both lines of their errors, which depend on a model or a text; `early_errors.txt`
has those of options alone."""


@pytest.mark.parametrize(("words", "error", "hint"), ERRORS)
def test_a_mistake_is_explained_in_two_lines(words, error, hint, run_of, tmp_path, arb_error):
    files = {"bad": tmp_path / "bad", "good": tmp_path / "good"}
    files["bad"].write_text('"a"\n{"promt": "b"}\n')
    files["good"].write_text('{"prompt": "a", "length": 3}\n')
    files |= {kind: run_of(kind) for kind in KINDS if f"{{{kind}}}" in words}
    said = arb_error(*words.format(**files).split())
    for name, path in files.items():
        said = said.replace(str(path), f"{{{name}}}")
    assert said == f"{error}\n{hint}\n"


def test_generate_marks_chunks_where_nobody_watches(run_of, arb_here, arb_json):
    here = ["generate", run_of("chunks"), "--device", "cpu", "--prompt", "abcdefg"]
    here += ["--length", "5", "--chunks"]
    assert arb_here(*here).stdout.startswith("││abc│def││g")
    assert arb_json(*here)["chunk_depths"] == [2, 0, 0, 1, 0, 0, 2, 0, 0, 1, 0, 0]


def test_input_that_is_not_read_is_noticed(tmp_path):
    (tmp_path / "text").write_text("It was")
    (tmp_path / "empty").touch()
    before, (reader, writer) = os.dup(0), os.pipe()
    try:
        os.dup2(reader, 0)
        assert not stdin_has_data()
        os.write(writer, b"It was")
        assert stdin_has_data()
        for name, has_data in (("text", True), ("empty", False)):
            with (tmp_path / name).open() as file:
                os.dup2(file.fileno(), 0)
            assert stdin_has_data() == has_data
    finally:
        os.dup2(before, 0)
        for descriptor in (before, reader, writer):
            os.close(descriptor)
