"""`arb audit-memory`: what it prints, what it lets pass, and the faults that it catches."""

import json

import numpy as np
import torch

from arbcli.base import output
from arbcli.config.training import TrainConfig
from arbcli.model.language_model import LanguageModel
from arbcli.model.updater import Updater

SHAPE = ["--dim", "32", "--layers", "1", "--heads", "2", "--ffn", "48", "--ctx", "16"]
QUICK = [*SHAPE, "--batch", "2", "--device", "cpu"]


def test_audit_memory_prints_one_json_object_and_tells_how_far_it_is(arb_done, monkeypatch):
    monkeypatch.setattr(output, "PIPE_SECONDS", 0.0)
    done = arb_done("audit-memory", *QUICK, "--steps", "2", "--json")
    assert json.loads(done.stdout)["passed"]
    lines = done.stderr.splitlines()
    predicting = [f"predicting step {step} of 2" for step in (1, 2)]
    assert lines[:4] == ["loading", "predicting", *predicting]
    assert lines[-2:] == ["step 1 of 2", "step 2 of 2"]


def test_prediction_of_processes_tells_how_far_it_is(monkeypatch, arb_done):
    monkeypatch.setattr(output, "PIPE_SECONDS", 0.0)
    words = ["audit-memory", *QUICK, "--budget", "1GB", "--ranks", "2"]
    of_two = [f"predicting process {number} of 2" for number in (1, 2)]
    assert arb_done(*words).stderr.splitlines() == ["loading", *of_two]


def test_audit_of_a_run_has_its_settings_unless_an_option_changes_them(finished_run, arb_json):
    def peak(*more):
        words = ["audit-memory", "--budget", "1GB", "--device", "cpu"]
        return arb_json(*words, *more)["predicted_peak"]

    config = json.loads((finished_run / "config.json").read_text())["config"]
    path = next(finished_run.glob("step-*"))
    of_run = peak(str(finished_run))
    assert of_run["batch"] == config["batch"] != TrainConfig.batch
    assert of_run == peak(str(path))
    changed = peak(str(finished_run), "--batch", "5", "--rule", "nibble")
    assert changed["batch"] == 5
    assert changed["state_bytes"] < of_run["state_bytes"]


def patch_init(monkeypatch, owner, plant):
    init = owner.__init__

    def planted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        plant(self)

    monkeypatch.setattr(owner, "__init__", planted)


def test_audit_memory_fails_on_floats_on_hidden_state_and_on_a_tensor_kept_each_step(
    monkeypatch, arb_here
):
    """The last one is made by numpy, so that no operation of torch allocates it."""
    kept, finish = [], Updater.finish

    def plant(model):
        model.register_buffer("x", torch.zeros(2, dtype=torch.complex64))
        model.head.gain = torch.nn.Parameter(torch.ones(3))
        kept.append(torch.zeros(999, dtype=torch.int8))

    def leak(self):
        kept.append(torch.from_numpy(np.ones(3, dtype=np.int8)))
        finish(self)

    patch_init(monkeypatch, LanguageModel, plant)
    patch_init(monkeypatch, Updater, lambda updater: setattr(updater, "scale", torch.ones(4)))
    monkeypatch.setattr(Updater, "finish", leak)
    done = arb_here("audit-memory", *QUICK, "--steps", "2", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert {check["name"]: check["passed"] for check in report["checks"]} == dict.fromkeys(
        ("no-float-state", "state-as-predicted", "returns-to-level"), False
    )
    measured = report["measured"]
    counted = [measured[f"float_{kind}"] for kind in ("buffers", "parameters", "attributes")]
    assert counted == [2, 3, 4]
    assert sorted(measured["float_names"]) == ["head.gain", "scale", "x"]
