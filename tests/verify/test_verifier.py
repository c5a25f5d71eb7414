"""A fault that any stage finds fails the verification, and the ledger says what was skipped."""

import json
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from checked import checked
from commands.pages import filled

from arbcli.verify import check_kernels, run
from arbcli.verify.kernels.codec.packing import pack_trits_verification
from arbcli.verify.ledger import ledger_page, write_ledger
from arbcli.verify.models import RAGGED
from arbcli.verify.run import VerifyRequest, verify
from arbcli.verify.subjects import Subject
from arbcli.verify.timing import TimingReport
from arbcli.verify.verification import EXACT

CPU = torch.device("cpu")
(RIGHT,) = checked(["pack_trits"], {"T32": 32}, CPU, ["torch"])
SUBJECT = Subject("ragged", RAGGED, 1, torch.float32, CPU, "torch")
PARITY = SUBJECT.result("output", "block 1", torch.ones(3), torch.ones(3), EXACT)


def pack_wrongly(trits):
    return pack_trits_verification.torch(trits) + 1


@pytest.fixture
def small(monkeypatch):
    """Leave one kernel, no other processes, and stages that find that all is well."""
    monkeypatch.setattr(check_kernels, "KERNELS", (pack_trits_verification,))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7}, raising=False)
    monkeypatch.setattr(run, "all_subjects", lambda *_: (SUBJECT,))
    monkeypatch.setattr(run, "check_model", lambda _: [PARITY])
    return monkeypatch


WHOLE = VerifyRequest(backend="torch", device="cpu")


def break_kernel(patch):
    patch.setattr(check_kernels, "KERNELS", (replace(pack_trits_verification, torch=pack_wrongly),))


def break_parity(patch):
    patch.setattr(run, "check_model", lambda _: [PARITY, replace(PARITY, passed=False)])


BREAKS = {break_kernel: "integer state", break_parity: "failures of `output`"}
COMMANDS = {break_kernel: "pack_trits", break_parity: "--tscale-type T32"}
"""Arguments of the commands that show the faults."""


def test_nothing_wrong_passes(small):
    report = verify(WHOLE)
    assert report.passed
    assert not report.failures
    for what in BREAKS.values():
        assert sum(what in item for item in report.ruled_out) == 1


@pytest.mark.parametrize("break_", BREAKS, ids=lambda break_: break_.__name__)
def test_one_fault_in_any_stage_fails_the_whole(break_, small, arb_here):
    """It fails, on the page and in the exit code, and what it casts doubt on is not excluded."""
    break_(small)
    report = verify(WHOLE)
    assert not report.passed
    assert len({failure.item for failure in report.failures}) == 1
    assert {f.command for f in report.failures} == {f"arb verify-kernels {COMMANDS[break_]}"}
    assert "FAILED" in ledger_page(report)
    ruled_out = {what: any(what in item for item in report.ruled_out) for what in BREAKS.values()}
    assert ruled_out == {what: what != BREAKS[break_] for what in BREAKS.values()}
    done = arb_here("verify-kernels", "--backend", "torch", "--device", "cpu", "--json")
    assert (done.returncode, json.loads(done.stdout)["passed"]) == (1, False)


@pytest.mark.parametrize("stage", ["kernel_jobs", "check_model"])
def test_unexpected_error_of_a_stage_ends_the_program_with_2(stage, small, arb_here):
    small.setattr(run, stage, mock.Mock(side_effect=RuntimeError("not foreseen")))
    done = arb_here("verify-kernels", "--backend", "torch", "--device", "cpu")
    assert done.returncode == 2
    assert "RuntimeError: not foreseen" in done.stderr


SKIPPED = {
    "the compiled kernels": {"backend": "torch"}, "bfloat16 in the kernels": {"backend": "torch"},
    "the real sizes of the presets": {"backend": "torch"},
    "the native backend": {"backend": "torch"}, "the torch backend": {"backend": "interpreter"},
    "other kernels, and the whole model": {"names": ("pack_trits",)},
    "cases of special values, and the whole model": {"fuzz": 1},
    "blocks of a preset after its second": {},
    "Mamba in bf16": {}, "scale types T4, T6, ": {},
    "float baselines and their optimizers": {}, "speed": {},
}  # fmt: skip
"""Parts that a request leaves out, by the beginning of how the ledger says so."""


@pytest.mark.parametrize("what", SKIPPED)
def test_skipped_checks_are_listed_once(what, small):
    small.setattr(run, "kernel_jobs", lambda *_, **__: [])
    listed = verify(replace(WHOLE, **SKIPPED[what])).not_verified
    assert sum(item.startswith(what) for item in listed) == 1, listed


def test_written_ledger_is_strict_json_and_a_page(small, tmp_path):
    report = replace(verify(WHOLE), timing=filled(TimingReport))
    data, page = write_ledger(report, tmp_path / "new" / "folder")
    assert page.read_text() == ledger_page(report)
    read = json.loads(data.read_text(), parse_constant=pytest.fail)
    assert read["kernels"][0]["kernel"] == "pack_trits"
    widths: list[int] = []
    for line in ledger_page(report).splitlines():
        widths = [*widths, line.count("|")] if line.startswith("|") else []
        assert len(set(widths)) <= 1
