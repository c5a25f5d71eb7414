"""A ledger says what was found, reads back, and shows what changed."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.verify import check_kernels as verify
from arbcli.verify import ledger as ledgers
from arbcli.verify.check_kernels import Checks, verify_kernels
from arbcli.verify.compile_ahead import CompileResult
from arbcli.verify.kernels.codec.packing import pack_trits_verification
from arbcli.verify.ledger import (
    compare_ledgers,
    ledger_page,
    new_ledger,
    read_ledger,
    write_ledger,
)
from arbcli.verify.parity import _rotary
from arbcli.verify.timing import Roofline, TimingReport, TimingResult

CPU = torch.device("cpu")
COMPILED = CompileResult("pack_trits", "sm_90", 2, 40, 0, 1024, passed=True, error=None)

TIMED = TimingResult(
    "rms_norm", "11264x2048", us=20.0, peer="torch", peer_us=30.0, ratio=1.5, moved_bytes=10**7,
    flops=0, floor_us=10.0, bound="memory", share=0.5, turns=90,
)  # fmt: skip
TIMING = TimingReport(Roofline(4e12, 7e14, 3.0), (TIMED,), {"pack_trits": "it did not pass"})


@cache
def verified(names, checks):
    return verify_kernels(names, {"T6": 6, "T32": 32}, CPU, ["torch"], checks)


@cache
def rotary():
    return tuple(_rotary(CPU))


def make(names=("pack_trits", "rms_norm"), checks=None, compiled=(COMPILED,), timing=None):
    found = verified if names and checks is None else verified.__wrapped__  # kernels are altered
    report = found((*names,), checks)
    parity = rotary()
    left_out = ["the moon"]
    return new_ledger(CPU, ["T6", "T32"], report.kernels, parity, compiled, left_out, 1.25, timing)


def off_by_one(trits):
    return pack_trits_verification.torch(trits) + 1


def test_every_row_of_a_table_is_as_wide_as_its_head():
    widths: list[int] = []
    for line in ledger_page(make(timing=TIMING)).splitlines():
        widths = [*widths, line.count("|")] if line.startswith("|") else []
        assert len(set(widths)) <= 1


def test_only_checked_errors_are_ruled_out():
    ruled_out = " ".join(make(["rms_norm"], compiled=()).ruled_out)
    assert "rotary" in ruled_out
    assert "causality" not in ruled_out
    assert "integer state" not in ruled_out
    assert "compile" not in ruled_out


def test_written_ledger_is_strict_json_and_compares_equal(tmp_path):
    found = make(timing=TIMING)
    data, page = write_ledger(found, tmp_path / "new" / "folder")
    assert page.read_text() == ledger_page(found)
    read = json.loads(data.read_text(), parse_constant=pytest.fail)
    assert read["kernels"][0]["kernel"] == "pack_trits"
    assert compare_ledgers(read_ledger(data), found) == ()


def test_comparison_shows_changes(tmp_path, monkeypatch):
    data, _ = write_ledger(make(), tmp_path)
    monkeypatch.setattr(verify, "KERNELS", (replace(pack_trits_verification, torch=off_by_one),))
    changes = compare_ledgers(
        read_ledger(data), make([], compiled=(replace(COMPILED, registers=41),))
    )
    assert "pack_trits torch cases: passed True -> False" in changes
    assert "pack_trits torch cases: unequal 0 -> 2048" in changes
    assert "rms_norm torch T6 cases: not compared now" in changes
    assert "pack_trits sm_90: registers 40 -> 41" in changes


@pytest.mark.parametrize("part", ["kernels", "parity", "compiled"])
def test_comparison_keeps_every_row_apart(part, tmp_path):
    """A row that was taken for another one would hide that it failed."""
    checks = Checks(fuzz=1)
    found = make(["rms_norm"])
    fuzzed, other = make(["rms_norm"], checks).kernels, replace(COMPILED, target="sm_80")
    found = replace(found, kernels=found.kernels + fuzzed, compiled=(COMPILED, other))
    old = read_ledger(write_ledger(found, tmp_path)[0])
    rows = getattr(found, part)
    assert len(rows) > 1
    for index, row in enumerate(rows):
        after = [*rows]
        after[index] = replace(row, passed=False)
        changes = compare_ledgers(old, replace(found, **{part: tuple(after)}))
        assert len([c for c in changes if "passed True -> False" in c]) == 1, row


@pytest.mark.parametrize(("us", "count"), [(21.9, 0), (22.1, 1), (18.1, 1)])
def test_comparison_shows_speed_that_changed_by_a_tenth(tmp_path, us, count):
    old = read_ledger(write_ledger(make(timing=TIMING), tmp_path)[0])
    new = replace(TIMING, timings=(replace(TIMED, us=us),))
    assert compare_ledgers(old, make(timing=new)) == (
        f"rms_norm 11264x2048: 20.0 us -> {us} us",
    ) * count  # fmt: skip
    assert compare_ledgers(old, make()) == ()


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 99}'])
def test_file_that_is_not_a_ledger_is_refused(content, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(content)
    with pytest.raises(ArbError, match="is not a ledger of format 1"):
        read_ledger(path)


def test_unwritable_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArbError, match="cannot write"):
        write_ledger(make(), tmp_path / "file")


def test_commit_is_none_outside_a_checkout(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(ledgers, "__file__", str(tmp_path / "ledger.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert ledgers._commit() is None


@pytest.mark.parametrize(("factor", "count"), [(3.9, 0), (4.1, 1), (0.24, 1)])
def test_comparison_shows_errors_that_grew_or_shrank_fourfold(tmp_path, factor, count):
    found = make(["rms_norm"], compiled=())
    before = tuple(replace(result, relative_error=1e-4) for result in found.kernels)
    old = read_ledger(write_ledger(replace(found, kernels=before), tmp_path)[0])
    first, *others = before
    after = (replace(first, relative_error=1e-4 * factor), *others)
    assert len(compare_ledgers(old, replace(found, kernels=after))) == count


def test_bar_stays_within_its_cell():
    assert "| b\\|c | d |" in ledgers._section("title", ["one", "two"], [["b|c", "d"]])
