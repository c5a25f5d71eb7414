"""`arb probe-loss` as a person or a program meets it: exit codes, streams, errors before work."""

import json

import pytest
from typer.testing import CliRunner

from arbcli.base.errors import ArbError
from arbcli.cli import app
from arbcli.inspect import plots


def invoke(*args: str):
    return CliRunner().invoke(app, ["probe-loss", *args])


def test_probe_loss_plots_a_saved_model_and_does_not_change_it(finished_run, tmp_path):
    pytest.importorskip("matplotlib")
    args = ["--checkpoint", str(finished_run), "--device", "cpu", "--steps", "2", "--json"]
    args += ["--plot", str(tmp_path / "probe.png")]
    report = json.loads(invoke(*args).stdout)
    assert [reading["step"] for reading in report["readings"]] == [4, 5, 6]
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_probe_loss_asks_for_matplotlib_before_it_computes(monkeypatch):
    def never(**_):
        raise AssertionError("it computed")

    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    monkeypatch.setattr("arbcli.training.configure.new_config", never)
    result = invoke("--plot", "probe.png")
    assert isinstance(result.exception, ArbError)
    assert "matplotlib" in str(result.exception)
