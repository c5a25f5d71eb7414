"""A run is verified file by file, nothing of it changes, and a resume does what was predicted."""

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from made_runs import TINY

from arbcli.base.atomic_files import _create
from arbcli.base.errors import ArbError
from arbcli.base.run_files import checkpoints
from arbcli.model.checkpoint import load_checkpoint
from arbcli.training.check import check_run
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.resume import resume_run
from arbcli.training.run import start_run


class Stop(Observer):
    def recorded(self, record):
        if record.step == 3:
            raise KeyError


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Leave a run of four steps that an error ended after three, and all of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_bytes(b"ternary weights learn to read. " * 100)
    options = {"steps": 4, "save_every": 1, "eval_every": 2, "log_every": 1, "keep": 9}
    options["data"] = [str(folder / "text.txt")]
    with pytest.raises(KeyError):
        start_run(new_config(**TINY, **options), folder / "run", Stop())
    return folder


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """Copy the run and its text."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    facts = tmp_path / "run" / "config.json"
    facts.write_text(facts.read_text().replace(str(whole), str(tmp_path)))
    return tmp_path / "run"


def test_checkpoint_that_a_training_run_removes_meanwhile_is_no_finding(run, monkeypatch):
    listed = checkpoints(run)
    listed[-1].unlink()
    monkeypatch.setattr("arbcli.training.check.checkpoints", lambda _: listed)
    monkeypatch.setattr("arbcli.training.check.best_checkpoints", lambda _: [run / "best-2"])
    report = check_run(run)
    assert listed[0].name in states(report)
    assert listed[-1].name not in states(report)
    assert report.passed


def contents(run: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in run.iterdir()}


def states(report) -> dict[str, str]:
    return {finding.name: finding.state for finding in report.findings}


def test_whole_run_passes_and_nothing_of_it_changes(run):
    before = contents(run)
    report = check_run(run)
    assert report.passed
    assert contents(run) == before
    assert (report.resumes_at, report.steps, report.drops_records) == (3, 4, 0)
    assert (report.steps_before, report.removes, report.sets_aside) == (None, (), ())
    assert set(states(report).values()) == {"ok"}
    said = {finding.name: finding.detail for finding in report.findings}
    begun = json.loads((run / "config.json").read_text())["started"]
    assert said["config.json"] == f"4 steps, begun {begun[: len('2026-01-31T12:00:00')]}"
    assert said["metrics.jsonl"] == "3 records"
    assert {"config.json", "metrics.jsonl", "text", "step-000003.safetensors"} <= said.keys()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damage_is_found_and_a_resume_does_as_predicted(run):
    flip(run / "step-000003.safetensors")
    (run / ".step-000009.safetensors.0123abcd.tmp").write_bytes(b"half")
    _create(run / "step-000004.safetensors", 0o600)  # by a run that is training
    with (run / "metrics.jsonl").open("a") as file:
        file.write("no record\nnor this\n")
    report = check_run(run)
    assert not report.passed
    said = {finding.name: finding.detail for finding in report.findings}
    assert said["text"] == f"{run.parent / 'text.txt'} (1 file), 2,790 + 310 bytes"
    assert said["metrics.jsonl"] == "3 records, and 2 invalid lines"
    tensors = load_checkpoint(run / "step-000002.safetensors").tensors.values()
    size = sum(tensor.nbytes for tensor in tensors)
    assert said["step-000002.safetensors"] == f"{size:,} bytes of state, as written"
    assert "was altered" in said["step-000003.safetensors"]
    assert said[".step-000009.safetensors.0123abcd.tmp"] == "temporary file of a killed process"
    damaged = {name for name, state in states(report).items() if state == "damaged"}
    assert damaged == {"step-000003.safetensors", "metrics.jsonl"}
    assert (report.resumes_at, report.drops_records) == (2, 1)
    assert report.sets_aside == ("step-000003.safetensors",)
    assert report.removes == (".step-000009.safetensors.0123abcd.tmp",)
    assert resume_run(run, Observer()).steps == 4
    there = contents(run)
    assert "step-000003.safetensors.aside" in there
    assert not set(report.removes) & there.keys()


def test_best_checkpoint_and_those_set_aside_are_looked_at(run):
    best, aside = run / "best-000002.safetensors", run / "step-000003.safetensors.aside"
    for copy in (best, aside):
        copy.write_bytes((run / "step-000002.safetensors").read_bytes())
    stale = shutil.copy(run / "step-000001.safetensors", run / "best-000001.safetensors")
    report = check_run(run)
    state_of = states(report)
    assert (state_of[best.name], state_of[aside.name]) == ("ok", "left over")
    assert report.removes == (stale.name,)
    assert report.passed
    flip(best)
    report = check_run(run)
    assert states(report)[best.name] == "damaged"
    # which a resume does not need
    assert (report.passed, report.resumes_at) == (False, 3)


CHANGES = {
    "text": lambda run: (run.parent / "text.txt").write_bytes(b"Another text. " * 300),
    "no text": lambda run: (run.parent / "text.txt").unlink(),
    "config": lambda run: (run / "config.json").write_text("{}"),
    "no checkpoint": lambda run: [path.unlink() for path in run.glob("*.safetensors")],
    "all damaged": lambda run: [flip(path) for path in run.glob("*.safetensors")],
    "another run's": lambda run: os.rename(
        run / "step-000002.safetensors", run / "step-000008.safetensors"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_faulty_run_does_not_pass(change, run):
    CHANGES[change](run)
    report = check_run(run)
    assert not report.passed
    if change != "another run's":
        assert report.resumes_at is None
        assert report.stops
        with pytest.raises(ArbError):
            resume_run(run, Observer())


def test_command_reports_it_and_so_does_a_dry_run(run, arb_here, arb_done, arb_json):
    before = contents(run)
    assert "goes on at step 3, 1 step to the end" in arb_done("check", str(run)).stdout
    assert arb_json("train", "--resume", str(run), "--dry-run")["resumes_at"] == 3
    dry_run_of = ["train", "--resume", str(run / "step-000002.safetensors"), "--dry-run", "--steps"]
    given = "9", "2", "9 --gpus 2", "9 --device cpu --backend triton"
    longer, shorter, shared, other = (arb_here(*dry_run_of, *words.split()) for words in given)
    assert "would not start: 1 micro-batches cannot be divided evenly" in shared.stdout
    assert "would not start: the `triton` backend needs a CUDA device" in other.stdout
    assert "sets aside at once: step-000003.safetensors" in longer.stdout
    assert shorter.returncode == 1
    assert "would not start: the run has done 2 steps" in shorter.stdout
    assert contents(run) == before
    flip(run / "step-000003.safetensors")
    assert arb_here("check", str(run)).returncode == 1
