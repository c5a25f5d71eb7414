"""The chosen step is the largest that fits, and the printed command trains with it."""

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from folders import plain_folder
from safetensors.torch import load_file

from arbcli.base.errors import ArbError
from arbcli.base.reading import read_json
from arbcli.base.run_files import checkpoint_path
from arbcli.config.training import TrainConfig
from arbcli.inspect import recipe as recipe_module
from arbcli.inspect.audit import config_of_any_gpu
from arbcli.inspect.peak import predict_peak
from arbcli.inspect.recipe import SEGMENT, choose_step
from arbcli.training import run as run_module
from arbcli.training import sample
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer

TINY = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48}
STATE, WINDOW = 2**40, 2**36
"""Bytes of an imagined state, and of the activations of a window that keeps them."""
SUMS = 2**30
"""Bytes of imagined sums of gradients."""


@pytest.fixture
def imagined(monkeypatch):
    """Predict peaks by a formula, and record of which steps."""
    steps: list[TrainConfig] = []

    def predict(config, *, captured, rank, size):
        assert captured
        steps.append(config)
        activations = WINDOW * config.batch // (8 if config.recompute else 1)
        state = STATE if config.model.rule == "moment" else STATE // 2
        sums = SUMS if config.reduce_dtype == "int16" else 0
        return SimpleNamespace(evaluated_bytes=state + activations + sums)

    monkeypatch.setattr(recipe_module, "predict_peak", predict)
    return steps


@pytest.mark.parametrize(("room", "changes", "arguments", "options", "tries"), [
    (32, {}, {}, "--batch 32 --accum 1", 1), (8, {}, {}, "--batch 8 --accum 4", 3),
    (4.5, {}, {}, "--batch 4 --accum 8", 4), (0.1, {}, {}, None, 6),
    (4, {}, {}, "--batch 4 --accum 8 --reduce-dtype none", 4),
    (4.5, {}, {"sums": False}, "--batch 4 --accum 8 --reduce-dtype none", 3),
    (3.9, {}, {}, "--batch 16 --accum 2 --recompute", 7),
    (0.145, {}, {}, "--batch 1 --accum 32 --recompute", 8),
    (4, {"recompute": True}, {}, "--batch 32 --accum 1 --recompute", 1),
    (4.5, {"pack": True, "layers": 2}, {}, "--batch 4 --accum 8", 4),
    (3.9, {"pack": True, "layers": 2}, {}, None, 3),
    (32, {"reduce_dtype": "int12"}, {"processes": 2}, "--batch 16 --accum 2", 1),
    (8, {"reduce_dtype": "int12"}, {"processes": 2}, "--batch 8 --accum 4", 3),
    (8, {"reduce_dtype": "int12"}, {"processes": 64}, "--batch 1 --accum 64", 1),
    (32, {}, {"text_tokens": 6_553_600}, "--batch 32 --accum 1", 1),
    (32, {}, {"text_tokens": 6_553_599}, "--batch 16 --accum 1", 1),
    (1, {}, {"text_tokens": 9}, "--batch 2 --accum 1 --recompute", 2),
    (32, {"ctx": 70_000}, {}, "--batch 1 --accum 1", 1),
])  # fmt: skip
def test_largest_micro_batch_is_chosen(room, changes, arguments, options, tries, imagined):
    config = config_of_any_gpu(**TINY | {"ctx": 2048} | changes)
    recipe = choose_step(config, int(STATE + room * WINDOW) + SEGMENT, **arguments)
    context = config.model.ctx
    assert (recipe and recipe.options) == (options and f"--ctx {context} {options}")
    assert len(imagined) == tries  # each traces a step, of few micro-batches
    processes = arguments.get("processes", 1)
    assert {step.accum // processes for step in imagined} <= {1, 2}
    if recipe:
        assert (recipe.speed is None) == (processes > 1)
        last = {step.batch: step.accum for step in imagined}[recipe.batch]
        assert last == min(recipe.accum, 2 * processes)


def test_step_of_a_cpu_is_short_and_recomputes_as_a_last_resort(imagined):
    config = new_config(**TINY, ctx=2048, device="cpu")
    for room, options in ((2, "--batch 2 --accum 1"), (1, "--batch 1 --accum 2")):
        assert choose_step(config, STATE + room * WINDOW).options == f"--ctx 2048 {options}"
    assert choose_step(config, STATE + WINDOW // 2).recompute
    imagined.clear()
    assert choose_step(config_of_any_gpu(**TINY, ctx=2048), 2**10) is None
    assert not imagined  # of a step that cannot fit


def test_predicted_memory_is_that_of_the_chosen_step(monkeypatch):
    monkeypatch.setattr(recipe_module, "STEP_TOKENS", 2**15)
    monkeypatch.setattr(recipe_module, "MIN_KEPT_TOKENS", 2**12)
    config = config_of_any_gpu(**TINY, ctx=64)
    budget = 203 * 2**20
    recipe = choose_step(config, budget)
    assert recipe.accum > 2
    given = {name: getattr(recipe, name) for name in ("batch", "accum", "reduce_dtype")}
    peak = predict_peak(dataclasses.replace(config, **given), captured=True)
    assert peak.evaluated_bytes <= recipe.reserved_bytes <= budget
    assert recipe.reserved_bytes - peak.evaluated_bytes <= SEGMENT


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Go where there are a text and a model of bytes; evaluations and samples are short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sample, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(Trainer.evaluate.__wrapped__, "__defaults__", (1,))
    for name, tokens in (("STEP_TOKENS", 4096), ("MIN_KEPT_TOKENS", 512), ("MIN_STEP_TOKENS", 512)):
        monkeypatch.setattr(recipe_module, name, tokens)
    plain_folder(tmp_path / "folder", vocab_size=256)
    (tmp_path / "text.txt").write_bytes(b"ternary weights learn to read. " * 300)


CPU = ["--steps", "1", "--device", "cpu", "--eval-every", "0"]
SHOWN = ("batch", "accum", "recompute")


def settings_of(run: str) -> dict:
    config = read_json(Path(run, "config.json"))["config"]
    return {name: config[name] for name in SHOWN} | {"ctx": config["model"]["ctx"]}


def test_printed_command_trains_with_what_fits(place, arb_done):
    done = arb_done("import", "folder", "--budget", "170MiB", "--out", "a run")
    *_, summary, command = done.stderr.splitlines()
    assert summary.startswith("with rule moment, 4,096 tokens a step, 0.")
    assert re.search(r"predicted, about [\d,]+ tokens/s on an NVIDIA \w+", summary)
    words = shlex.split(command)
    assert words[:4] == ["arb", "train", "--init-from", "a run"]
    done = arb_done(*words[1:], *CPU, "--out", "tuned")
    assert settings_of("tuned") == {"batch": 32, "accum": 2, "recompute": False, "ctx": 64}
    assert "chosen" not in done.stderr


def test_rule_is_the_one_that_fits(place, arb_done, arb_json, imagined):
    budget = ["--budget", f"{STATE}"]
    for words, rule in (
        ([], "nibble"),
        (["--rule", "moment"], None),
        (["--rule", "nibble"], "nibble"),
    ):
        report = arb_json("import", "folder", "--out", f"run{words}", *budget, *words)
        assert (report["recipe"] or {"rule": None})["rule"] == rule
        assert ("--batch" in report["command"]) == (rule is not None)
    printed = arb_done("import", "folder", *budget, "--print-config")
    assert 'rule = "nibble"' in printed.stdout
    assert printed.stderr.splitlines()[-1].startswith("arb train --init-from runs/imported-folder")
    done = arb_done("import", "folder", "--out", "other", "--budget", f"{STATE // 4}")
    assert done.stderr.splitlines()[-2:] == [
        "no training step fits into 256.00 GiB", "arb train --init-from other --data text.txt"
    ]  # fmt: skip


def test_tuning_chooses_its_step_and_a_resume_keeps_it(place, arb_here, arb_done, monkeypatch):
    arb_done("import", "folder", "--out", "run")
    tune = ["train", "--init-from", "run", "--data", "text.txt", *CPU]
    done = arb_done(*tune, "--out", "chosen")
    assert "chosen: --ctx 64 --batch 8 --accum 1 (512 tokens a step, " in done.stderr
    given = ["--ctx", "64", "--batch", "8", "--accum", "1"]
    assert "chosen" not in arb_here(*tune, *given, "--out", "given").stderr
    first, second = (load_file(checkpoint_path(Path(run), 1)) for run in ("chosen", "given"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    done = arb_here(*tune, "--ctx", "32", "--recompute", "--out", "partly")
    assert "chosen: --ctx 32 --batch 16 --accum 1 --recompute (512" in done.stderr
    monkeypatch.setattr(recipe_module, "usable_bytes", lambda *_: 2**10)
    done = arb_here(*tune, "--out", "none")
    assert "error: no window of 64 tokens fits into 0.00 GiB" in done.stderr
    assert not Path("none").exists()
    arb_done("train", "--resume", "partly", "--steps", "2")
    assert settings_of("partly") == {"batch": 16, "accum": 1, "recompute": True, "ctx": 32}


def test_memory_is_left_for_what_is_not_predicted(monkeypatch):
    monkeypatch.setattr(recipe_module, "free_bytes", lambda _: 1000)
    assert recipe_module.usable_bytes(torch.device("cuda"), 2) == 950
    assert recipe_module.usable_bytes(torch.device("cpu"), 2) == 375


@pytest.mark.parametrize(
    ("given", "steps"), [([], 5), (["--steps", "7"], 7), (["--weights", "anneal"], 400)]
)
def test_a_short_text_is_read_three_times(given, steps, place, arb_here, monkeypatch):
    Path("text.txt").write_bytes(b"ternary weights learn to read. " * 30)  # 837 are trained on
    assert arb_here("import", "folder", "--out", "run").returncode == 0
    tune = ["train", "--init-from", "run", "--data", "text.txt", "--device", "cpu", *given]
    monkeypatch.setattr(run_module, "build_trainer", mock.Mock(side_effect=ArbError("enough")))
    arb_here(*tune, "--out", "tuned")
    assert run_module.build_trainer.call_args.args[0].steps == steps


def test_windows_of_an_imported_model_are_bounded_in_training_and_audits(
    place, arb_done, arb_json, monkeypatch
):
    monkeypatch.setattr(recipe_module, "WINDOW", 16)
    arb_done("import", "folder", "--out", "run")
    for number, given in enumerate(([], ["--batch", "2"], ["--accum", "2"])):
        words = ["--init-from", "run", "--data", "text.txt", *given, "--out", f"a{number}"]
        arb_done("train", *CPU, *words)
        assert settings_of(f"a{number}")["ctx"] == 16
    words = ["audit-memory", "run", "--batch", "2", "--budget", "1GiB", "--device", "cpu"]
    peaks = [
        arb_json(*words, *ctx)["predicted_peak"] for ctx in ([], ["--ctx", "16"], ["--ctx", "32"])
    ]
    assert peaks[0] == peaks[1]
    assert peaks[0]["saved_bytes"] < peaks[2]["saved_bytes"]
