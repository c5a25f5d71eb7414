"""Each process of a shared run holds the memory that was predicted."""

import dataclasses
from types import SimpleNamespace

import pytest
from processes import run_processes

from arbcli.base.errors import ArbError
from arbcli.inspect import ranks
from arbcli.inspect.ranks import audit_ranks, predict_ranks, share_out
from arbcli.training.configure import new_config

SHAPE = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2, "steps": 2}
SHARED = SHAPE | {"accum": 4, "reduce_dtype": "int12", "device": "cpu", "compute": "fp32"}


def audited(group, config):
    report = audit_ranks(config, group)
    assert group.collect(report) == [report] * group.size
    return report


@pytest.mark.slow
def test_two_processes_hold_the_predicted_memory():
    config = new_config(**SHARED)
    predicted = predict_ranks(config, 2, budget=2**30)
    assert predicted.passed
    report = run_processes(2, audited, config)[0]
    assert report.passed
    for before, after in zip(predicted.ranks, report.ranks, strict=True):
        assert before.share == after.share
        assert after.measured.measured.state_bytes == after.share.state_bytes
        assert before.predicted_peak.peak_bytes == pytest.approx(
            after.measured.peak_bytes, rel=0.02
        )
    assert not predict_ranks(config, 2, budget=1000).passed


def test_report_of_ranks_has_state_and_budget(monkeypatch):
    asked = []

    def predicted(config, **about):
        asked.append(about)
        return SimpleNamespace(evaluated_bytes=5)

    monkeypatch.setattr(ranks, "predict_peak", predicted)
    config = new_config(**SHARED | {"reduce_dtype": "int16"})
    report = predict_ranks(config, 2, 4)
    about = report.device, report.batch, report.accum, report.reduce_dtype
    assert about == ("cpu", 2, 4, "int16")
    assert report.state_bytes == share_out(config, 1)[0].state_bytes
    assert (report.budget_bytes, report.passed) == (4, False)
    assert asked == [{"captured": True, "rank": rank, "size": 2} for rank in range(2)]
    assert [process.share for process in report.ranks] == share_out(config, 2)
    with pytest.raises(ArbError, match="4 micro-batches cannot be divided evenly") as refused:
        predict_ranks(config, 3)
    assert "a number of processes that divides it" in refused.value.hint  # as of `--resume`
    assert predict_ranks(config, 2).passed
    of_second = dataclasses.replace(config, device="cuda:1")
    assert ranks._report(of_second, [], None).device == "cuda"


def test_process_that_does_not_fit_or_fails_is_enough(monkeypatch):
    sizes = SimpleNamespace(evaluated_bytes=[10, 20, 10])

    def predicted(config, rank, **about):
        return SimpleNamespace(evaluated_bytes=sizes.evaluated_bytes[rank])

    monkeypatch.setattr(ranks, "predict_peak", predicted)
    config = new_config(**SHARED | {"accum": 3})
    assert [predict_ranks(config, 3, budget).passed for budget in (19, 20)] == [False, True]
    for second in (True, False):
        measurements = [SimpleNamespace(passed=passed) for passed in (True, second, True)]
        reports = [SimpleNamespace(measured=one) for one in measurements]
        monkeypatch.setattr(ranks, "RanksReport", lambda **fields: fields)
        assert ranks._report(config, reports, None)["passed"] == second
