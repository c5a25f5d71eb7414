"""`arb audit-memory`: what it prints, what it lets pass, and the faults that it catches."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from marks import mostly_slow
from typer.testing import CliRunner

from arbcli.cli import app
from arbcli.commands.audit_memory import LISTED, _live_table, _part_of
from arbcli.inspect.memory import predict
from arbcli.inspect.peak import AtPeak
from arbcli.model.language_model import LanguageModel
from arbcli.model.updater import Updater

SHAPE = ["--dim", "32", "--layers", "1", "--heads", "2", "--ffn", "48", "--ctx", "16"]
QUICK = [*SHAPE, "--batch", "2", "--device", "cpu"]


def run(*arguments):
    return CliRunner().invoke(app, ["audit-memory", *QUICK, *arguments])


def checks_of(result):
    return {check["name"]: check["passed"] for check in json.loads(result.stdout)["checks"]}


def test_audit_memory_prints_one_json_object(arb_here):
    done = arb_here("audit-memory", *QUICK, "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["measured"]["state_bytes"] == report["predicted"]["total"]["state_bytes"]
    assert report["measured"]["float_parameters"] == report["measured"]["float_buffers"] == 0
    assert [level["stage"] for level in report["levels"]].count("end") == report["steps"] == 3


@pytest.mark.slow  # ten seconds each; the audit of a graph is tested without the program too
@pytest.mark.parametrize("parts", [[], ["--moe", "--graph", "--memgram", "--recompute"]])
def test_audit_memory_of_a_graph_passes(parts):
    shape = ["--preset", "arb-tiny", "--ctx", "32", "--batch", "2", "--device", "cpu"]
    command = ["audit-memory", *shape, "--steps", "2", "--json", *parts]
    report = json.loads(CliRunner().invoke(app, command).stdout)
    assert report["passed"]
    assert report["measured"]["state_bytes"] == report["predicted"]["total"]["state_bytes"]
    assert report["peak_error"] == 0


def after_init(monkeypatch, owner, plant):
    init = owner.__init__

    def planted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        plant(self)

    monkeypatch.setattr(owner, "__init__", planted)


def test_audit_memory_fails_on_floats_wherever_they_are(monkeypatch):
    def plant(model):
        model.register_buffer("x", torch.zeros(2))
        model.head.gain = torch.nn.Parameter(torch.ones(3))

    after_init(monkeypatch, LanguageModel, plant)
    after_init(monkeypatch, Updater, lambda updater: setattr(updater, "scale", torch.ones(4)))
    result = run("--steps", "2", "--json")
    assert result.exit_code == 1
    assert checks_of(result)["no-float-state"] is False
    measured = json.loads(result.stdout)["measured"]
    counted = [measured[f"float_{kind}"] for kind in ("buffers", "parameters", "attributes")]
    assert counted == [2, 3, 4]
    assert sorted(measured["float_names"]) == ["head.gain", "scale", "x"]


def leak_by_operation():
    return torch.ones(3, dtype=torch.int8)


def leak_by_numpy():
    return torch.from_numpy(np.ones(3, dtype=np.int8))


@pytest.mark.parametrize(
    "make", mostly_slow([leak_by_operation, leak_by_numpy], lambda make: make is leak_by_numpy)
)
def test_audit_memory_fails_on_a_tensor_kept_each_step(monkeypatch, make):
    kept, finish = [], Updater.finish

    def leak(self):
        kept.append(make())
        finish(self)

    monkeypatch.setattr(Updater, "finish", leak)
    result = run("--steps", "2", "--json")
    assert result.exit_code == 1
    assert checks_of(result) == {
        "no-float-state": True,
        "state-as-predicted": True,
        "returns-to-level": False,
    }


def test_audit_memory_fails_on_state_outside_the_model(monkeypatch):
    hidden = []
    after_init(
        monkeypatch, LanguageModel, lambda _: hidden.append(torch.zeros(999, dtype=torch.int8))
    )
    result = run("--steps", "2", "--json")
    assert result.exit_code == 1
    assert checks_of(result)["state-as-predicted"] is False


def test_audit_memory_fails_on_a_wrong_prediction(monkeypatch):
    finer = lambda config: predict(replace(config, scale_type="T4"))  # noqa: E731
    monkeypatch.setattr("arbcli.inspect.audit.predict", finer)
    result = run("--steps", "2", "--json")
    assert result.exit_code == 1
    assert checks_of(result)["state-as-predicted"] is False


def test_exit_code_of_audit_memory_is_whether_a_step_fits():
    report = json.loads(run("--budget", "1MiB", "--json").stdout)
    assert report["fits"] is True
    assert report["predicted_peak"]["batch"] == 2


def test_audit_memory_predicts_every_rule_and_scale_type():
    report = json.loads(run("--what-if", "--json").stdout)
    assert len(report["choices"]) == 32
    shown = run("--what-if").stdout
    assert "nibble" in shown
    assert "T128" in shown


def test_memory_of_a_cpu_is_not_recorded(arb_here):
    done = arb_here("audit-memory", *QUICK, "--snapshot", "memory.pickle")
    assert (done.returncode, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()[-2:]
    assert error.endswith("records the CUDA allocator, and this run is on the CPU")
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("function", "shown"),
    [("kernels.matmul.ternary_matmul._ternary_matmul_torch", "ternary matmul"),
     ("data.batch", "data"), ("autograd", "autograd"), ("", ""),
     ("aten.mm.default in autograd", "autograd")],
)  # fmt: skip
def test_part_of_the_program_stands_for_its_functions(function, shown):
    assert _part_of(function) == shown


def test_smallest_tensors_of_a_peak_share_a_row():
    live = tuple(
        AtPeak(part="saved", made_in="a.b", tensor=f"int8 {n}", number=n, bytes=2**20 * (30 - n))
        for n in range(1, LISTED + 3)
    )
    shown = _live_table(SimpleNamespace(live=live))
    *_, number, size = [[*column.cells] for column in shown.columns]
    assert len(number) == LISTED + 1
    assert (str(number[-1]), str(size[-1])) == (f"{2 * LISTED + 3}", f"{57 - 2 * LISTED:.2f} MiB")
