"""Options of a command reach the function that does its work, each in its argument."""

import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from arbcli.base.errors import ArbError
from arbcli.base.run_files import COMPANIONS
from arbcli.commands import audit_memory, train
from arbcli.config.presets import preset
from arbcli.generation import load, tokens
from arbcli.model.rules import LR_OF_FADING_TUNING, LR_OF_TUNING
from arbcli.training import run as runs

SIZES = ["--dim", "32", "--layers", "1", "--heads", "2", "--ffn", "48", "--ctx", "16"]


@pytest.fixture(autouse=True)
def saved(tmp_path, monkeypatch):
    """Go where there is what commands are told to load, as far as names and beginnings tell."""
    monkeypatch.chdir(tmp_path)
    Path("some/run").mkdir(parents=True)
    for name in ("some/run/step-000001.safetensors", "x", "one", "two", "model"):
        Path(name).write_text("8 bytes {")
    Path("config.json").touch()


@pytest.fixture
def recorded_call(arb_here, monkeypatch):
    """Run a command up to the call of a function, and return how that was called."""

    def ask(function: str, *words: str):
        called = mock.Mock(side_effect=ArbError("enough"))
        monkeypatch.setattr(function, called)
        done = arb_here(*words)
        assert "enough" in done.stderr, done.stderr
        return called.call_args

    return ask


def test_start_is_called_with_its_options(recorded_call, monkeypatch):
    monkeypatch.setattr(load, "read_saved", lambda path, note: load.SavedModel(path, path))
    monkeypatch.setattr(load, "saved_config", lambda checkpoint: preset("small"))
    monkeypatch.setattr(tokens, "saved_tokenizer", lambda *_: None)
    words = ["train", "--out", "some/new", "--device", "cpu", "--minutes", "2.5", "--profile", "4"]
    words += ["--init-from", "model", "--ctx", "32", "--weights", "anneal", "--config", "run.json"]
    Path("run.json").write_text(json.dumps({"model": asdict(preset("small"))}))
    call = recorded_call("arbcli.training.run.start_run", *words)
    config, out, _ = call.args
    model = config.model
    assert (model.dim, model.ctx, model.digits, out) == (384, 32, "fade", Path("some/new"))
    assert call.kwargs["initial"].checkpoint == Path("model")
    assert (call.kwargs["minutes"], call.kwargs["profile"]) == (2.5, 4)
    with pytest.raises(ArbError, match="has another model than"):
        train._read_initial(Path("model"), {"preset": preset("tiny")}, mock.Mock())


@pytest.mark.parametrize(
    ("words", "step", "lr", "direction", "tokenizer"),
    [([], 0, LR_OF_TUNING, None, "some/run/tokenizer.json"),
     (["--weights", "anneal"], 0, LR_OF_FADING_TUNING, "orthogonal", "some/run/tokenizer.json"),
     (["--weights", "anneal"], 9, LR_OF_FADING_TUNING, None, "some/run/tokenizer.json"),
     (["--weights", "anneal", "--lr", "0.3", "--tokenizer", "x", "--optimizer", "adafactor"], 0,
      0.3, "factored", "x")],
)  # fmt: skip
def test_tuned_model_has_defaults_of_its_own(
    words, step, lr, direction, tokenizer, recorded_call, monkeypatch
):
    path = Path("some/run/step-000001.safetensors")
    path.with_name(COMPANIONS).mkdir()
    saved = load.SavedModel(path, mock.Mock(step=step))
    monkeypatch.setattr(load, "read_saved", lambda _path, _note: saved)
    monkeypatch.setattr(load, "saved_config", lambda _: preset("small", digits="all"))
    monkeypatch.setattr(tokens, "saved_tokenizer", lambda *_: "its own")
    new_config = "arbcli.training.configure.new_config"
    given = recorded_call(
        new_config, "train", "--init-from", "some/run", "--device", "cpu", *words
    ).kwargs
    assert (given["lr"], given.get("direction"), given["tokenizer"]) == (lr, direction, tokenizer)


@pytest.mark.parametrize(
    ("words", "processes", "reduce_dtype"),
    [([], 1, None), ([], 2, "int16"), (["--reduce-dtype", "int12"], 2, "int12"),
     (["--weights", "float"], 2, None), (["--accum", "4"], 1, None), (["--accum", "6"], 1, "int16"),
     (["--accum", "32"], 1, "int12"), (["--accum", "32"], 2, "int12"),
     (["--accum", "6", "--reduce-dtype", "none"], 1, None),
     (["--accum", "6", "--weights", "float"], 1, None)],
)  # fmt: skip
def test_sixteen_or_twelve_bits_are_sent_and_summed_by_default(
    words, processes, reduce_dtype, recorded_call, monkeypatch
):
    monkeypatch.setattr(train, "this_process", lambda: (0, processes))
    call = recorded_call(
        "arbcli.training.run.start_run", "train", "--device", "cpu", "--accum", "2", *words
    )
    assert call.args[0].reduce_dtype == reduce_dtype
    # a run that goes on has its own
    call = recorded_call("arbcli.training.resume.resume_run", "train", "--resume", "x")
    assert call.args[0] == Path("x")


@pytest.mark.parametrize("weights", ["ternary", "float"])
def test_threads_of_a_baseline_spin_as_libgomp_has_it(weights, recorded_call, monkeypatch):
    spins = mock.Mock()
    monkeypatch.setattr(train, "set_spins", spins)
    Path("settings.toml").write_text(f'[model]\nweights = "{weights}"\n')
    name = {"ternary": "step-000001.safetensors", "float": "step-000001.float.safetensors"}[weights]
    Path(name).write_text("8 bytes {")
    options = {"run.start_run": "--config settings.toml", "resume.resume_run": f"--resume {name}"}
    for function, words in options.items():
        recorded_call(f"arbcli.training.{function}", "train", "--device", "cpu", *words.split())
        assert spins.called == (weights == "ternary")
        spins.reset_mock()


@pytest.mark.parametrize("rank", [0, 1])
def test_first_process_alone_prints_and_plots(rank, arb_here, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "this_process", lambda: (rank, 2))
    report = SimpleNamespace(run=str(tmp_path), stopped_by="SIGTERM", as_json=lambda: {"a": 1})
    report.steps, report.checkpoint = 3, "a.safetensors"
    monkeypatch.setattr(runs, "start_run", lambda *_, **__: report)
    drawn = mock.Mock(side_effect=lambda *_: sys.stdout.write("plot\n"))
    monkeypatch.setattr("arbcli.inspect.plots.require_matplotlib", lambda: None)
    monkeypatch.setattr("arbcli.inspect.plots.plot_training", drawn)
    words = ["--device", "cpu", "--accum", "2", "--json", "--plot", str(tmp_path / "a.svg")]
    done = arb_here("train", *words)
    assert drawn.call_count == (not rank)
    assert done.stdout == ("" if rank else '{"a": 1}\nplot\n')  # a plot may fail
    assert done.returncode == (0 if rank else 143)


def test_prompt_is_taken_byte_for_byte(recorded_call, monkeypatch):
    model = SimpleNamespace(config=SimpleNamespace(is_masked=False))
    monkeypatch.setattr(load, "load_named_model", lambda *_: (model, "its name"))
    words = ["generate", "--checkpoint", "x", "--device", "cpu", "--backend", "torch"]
    continues = "arbcli.generation.generation.continue_text"
    for given, prompt in (
        ([], b"\n"), (["--prompt", os.fsdecode(b"t\xff ")], b"t\xff "),
        (["--prompt", "-"], b" a\r\n\xff\n"),
    ):  # fmt: skip
        stdin = SimpleNamespace(buffer=io.BytesIO(b" a\r\n\xff\n"), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert recorded_call(continues, *words, *given).args[2] == prompt


def test_audit_of_ranks_is_called_with_its_options(recorded_call, monkeypatch):
    words = ["audit-memory", *SIZES, "--device", "cpu", "--ranks", "2"]
    predict = "arbcli.inspect.ranks.predict_ranks"
    config, ranks, budget, _ = recorded_call(predict, *words, "--budget", "3KB").args
    assert (config.accum, config.reduce_dtype, ranks, budget) == (2, "int16", 2, 3000)
    config, ranks, *_ = recorded_call(predict, *words, "--budget", "3KB", "--accum", "4").args
    assert (config.accum, config.reduce_dtype, ranks) == (4, "int16", 2)
    assert recorded_call("arbcli.commands.audit_memory.start_processes", *words).args == (2,)
    monkeypatch.setattr(audit_memory, "this_process", lambda: (1, 2))
    call = recorded_call("arbcli.commands.audit_memory._audit_ranks", *words)
    assert call.args[0].accum == 2
