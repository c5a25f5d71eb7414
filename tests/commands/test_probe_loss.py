"""`arb probe-loss` as a person or a program meets it: exit codes, streams, errors before work."""

import pytest

from arbcli.inspect import plots


def test_probe_loss_plots_a_saved_model_and_does_not_change_it(finished_run, tmp_path, arb_json):
    pytest.importorskip("matplotlib")
    args = ["--checkpoint", str(finished_run), "--device", "cpu", "--steps", "2"]
    args += ["--plot", str(tmp_path / "probe.png")]
    report = arb_json("probe-loss", *args)
    assert [reading["step"] for reading in report["readings"]] == [4, 5, 6]
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_probe_loss_asks_for_matplotlib_before_it_computes(monkeypatch, arb_error):
    def never(**_):
        raise AssertionError("it computed")

    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    monkeypatch.setattr("arbcli.training.configure.new_config", never)
    assert "matplotlib" in arb_error("probe-loss", "--plot", "probe.png")
