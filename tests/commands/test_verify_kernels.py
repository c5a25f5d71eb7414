"""`arb verify-kernels` as a user runs it."""

import json
import signal
from dataclasses import replace
from unittest import mock

import pytest
from marks import needs_triton

from arbcli.base.signals import Interrupted
from arbcli.verify import check_kernels as verify
from arbcli.verify.kernels.codec.packing import pack_trits_verification
from arbcli.verify.ledger import verdict


def test_json_is_one_object_with_pinned_fields(arb_json):
    report = arb_json("verify-kernels", "pack_trits")
    assert list(report) == [
        "date", "device", "versions", "commit", "scale_types", "kernels", "parity",
        "failures", "ruled_out", "not_verified", "seconds", "passed", "timing", "interrupted",
        "sampled",
    ]  # fmt: skip
    assert list(report["kernels"][0]) == [
        "kernel", "backend", "scale_type", "kind", "shapes", "outputs", "elements", "unwritten",
        "gate", "reason", "unequal", "max_error", "relative_error", "cosine", "seconds", "passed",
        "failures", "left_out",
    ]  # fmt: skip


@needs_triton
def test_random_failure_is_reproduced_by_its_command(monkeypatch, arb_here):
    def pack_wrongly(trits):
        return pack_trits_verification.triton(trits) + 1

    monkeypatch.setattr(verify, "KERNELS", (replace(pack_trits_verification, triton=pack_wrongly),))
    command = "arb verify-kernels pack_trits --fuzz {} --seed {}"
    first = arb_here(*command.format(3, 50).split()[1:], "--json")
    *_, last = json.loads(first.stdout)["failures"]
    assert last["command"] == command.format(1, 52)
    again = arb_here(*last["command"].split()[1:], "--json")
    (failure,) = json.loads(again.stdout)["failures"]
    assert (failure["label"], failure["error"]) == (last["label"], last["error"])


@pytest.mark.gpu
def test_kernels_are_timed_after_they_are_verified(tmp_path, arb_json):
    report = arb_json("verify-kernels", "pack_trits", "--time", "--ledger", str(tmp_path))
    (timed,) = report["timing"]["timings"]
    assert (timed["kernel"], timed["shape"]) == ("pack_trits", "11264x2048")
    assert report["timing"]["roofline"]["bytes_per_second"] > 0
    assert not any(item.startswith("speed") for item in report["not_verified"])
    assert "## speed on" in (tmp_path / "ledger.md").read_text()


def test_every_kernel_is_a_line_as_it_is_done_and_results_need_no_ledger(tmp_path, arb_here):
    (tmp_path / "ledger.json").mkdir()
    words = ("pack_trits", "step_scales", "pack_trits", "--backend", "torch", "--json")
    done = arb_here("verify-kernels", *words, "--ledger", str(tmp_path))
    lines = "verified  1/2  pack_trits  pass\nverified  2/2  step_scales  pass\nerror: cannot write"
    assert done.stderr.startswith(lines)
    assert (done.returncode, json.loads(done.stdout)["passed"]) == (2, True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stop_before_anything_is_verified_is_not_an_error(number, code, arb_here, monkeypatch):
    monkeypatch.setattr(
        "arbcli.verify.run.resolve_device", mock.Mock(side_effect=Interrupted(number.name))
    )
    done = arb_here("verify-kernels", "pack_trits")
    said = f"stopped by {number.name}: nothing was verified\n"
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_ledger_of_an_interrupted_check_lists_the_verified_kernels(tmp_path, arb_here, monkeypatch):
    """Stopped after the second kernel, before its line is shown."""
    signals = iter((signal.SIGINT,))

    def stop(results):
        if results[0].kernel == "step_scales":
            signal.raise_signal(next(signals))
        return verdict(results)

    monkeypatch.setattr("arbcli.verify.run.verdict", stop)
    words = ("pack_trits", "step_scales", "rms_norm", "--backend", "torch", "--json")
    done = arb_here("verify-kernels", *words, "--ledger", str(tmp_path))
    assert (done.returncode, done.stderr[:12]) == (130, "verified  1/")
    assert "stopped by SIGINT" in done.stderr
    report = json.loads(done.stdout)
    assert json.loads((tmp_path / "ledger.json").read_text()) == report
    assert "Stopped by SIGINT; no checks failed" in (tmp_path / "ledger.md").read_text()
    assert (report["interrupted"], report["passed"], report["failures"]) == ("SIGINT", False, [])
    verified = {(result["kernel"], result["scale_type"]) for result in report["kernels"]}
    said, _, missing = report["not_verified"][0].partition(": ")
    assert said.startswith("stopped by SIGINT before these checks")
    assert verified
    assert verified.isdisjoint({(*item.split(), None)[:2] for item in missing.split(", ")})
