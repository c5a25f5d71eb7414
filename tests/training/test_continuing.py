"""Runs that go on further than they were to, begin with saved weights, or keep their best."""

import math
import shutil
from unittest import mock

import pytest
import torch
from made_runs import TINY, observer_with, read_records

import arbcli
from arbcli.base.atomic_files import write_json
from arbcli.base.errors import ArbError
from arbcli.base.run_files import checkpoints, missing_checkpoint
from arbcli.config.training import CHANGEABLE, train_config_from
from arbcli.generation.load import load_model, read_saved, saved_config
from arbcli.interop.exporting import export
from arbcli.kernels.runtime.backend import default_backend
from arbcli.model.checkpoint import load_checkpoint
from arbcli.training.check import check_run
from arbcli.training.configure import new_config
from arbcli.training.directory import read_facts
from arbcli.training.observer import Observer
from arbcli.training.resume import resume_run
from arbcli.training.run import start_run

SMALL = TINY | {"log_every": 1}


def test_extended_run_reports_the_change_of_its_rate(text, tmp_path):
    run, notes = tmp_path / "run", []
    observer = observer_with(noted=notes.append)
    start_run(new_config(**SMALL, data=[text], steps=2, warmup=0), run, Observer())
    assert resume_run(run, observer, steps=4).steps == 4
    assert [record["step"] for record in read_records(run)] == [1, 2, 3, 4]
    assert notes.pop() == (
        "4 steps instead of 2: the `cosine` schedule changes at step 2, where the learning"
        " rate is 0.3675 instead of 0.035"
    )
    assert read_records(run)[2]["lr"] == pytest.approx(0.3675)
    facts = read_facts(run)
    assert facts["config"]["steps"] == 4
    assert facts["extended"] == [{"at": 2, "from": 2, "to": 4}]
    assert resume_run(run, observer, steps=4).steps == 4  # as many as it has
    (note,) = notes
    assert note.startswith("the run is finished: all 4 steps are done")
    with pytest.raises(ArbError, match="has done 4 steps"):
        resume_run(run, Observer(), steps=3)


def test_extended_run_takes_its_own_older_checkpoints(text, tmp_path):
    run = tmp_path / "run"
    start_run(new_config(**SMALL, data=[text], steps=2, save_every=1, keep=9), run, Observer())
    with mock.patch("arbcli.training.resume.run_loop"):  # as if ended before it saved anything
        resume_run(run, Observer(), steps=4)
    assert check_run(run).resumes_at == 2
    assert check_run(run).passed
    with mock.patch("arbcli.training.resume.read_records", return_value=[]) as asked:
        assert resume_run(run / "step-000001.safetensors", Observer()).steps == 4
    assert {call.args for call in asked.mock_calls} == {(run,)}  # of the run, whatever was named


def test_settings_that_change_no_weight_may_be_changed(text, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    options = SMALL | {"data": [text], "steps": 8, "warmup": 0}
    start_run(new_config(**options), whole, Observer())
    stopped = options | {"sample_every": 2, "keep": 9, "save_every": 2}
    start_run(new_config(**stopped), run, Observer())
    changes = {
        "save_every": 3, "eval_every": 2, "log_every": 3, "sample_every": 5, "keep": 2,
        "keep_best": True, "patience": 5, "recompute": True,
    }  # fmt: skip
    assert changes.keys() == {*CHANGEABLE} - {"steps"}
    back = run / "step-000004.safetensors"
    assert not check_run(back).removes
    removed = check_run(back, **changes).removes
    assert removed == ("step-000002.safetensors", "step-000000.safetensors")
    assert arbcli.resume(back, **changes).steps == 8
    assert train_config_from(read_facts(run)) == new_config(**options | changes)
    assert [path.name for path in checkpoints(run)] == [
        "step-000008.safetensors",
        "step-000006.safetensors",
    ]
    records = read_records(run)
    assert [(r["step"], r["val_loss"] is not None) for r in records] == [
        (1, False), (2, False), (3, False), (4, True), (5, False), (6, True), (8, True)
    ]  # fmt: skip
    assert [record["step"] for record in records if record["sample"]] == [2, 5]
    assert (run / "best-000008.safetensors").exists()
    a, b = (load_checkpoint(folder / "step-000008.safetensors") for folder in (run, whole))
    assert all(torch.equal(a.tensors[name], tensor) for name, tensor in b.tensors.items())
    with pytest.raises(ArbError, match="`save_every` is 0"):
        resume_run(run, Observer(), save_every=0)
    with pytest.raises(ArbError, match="has done 8 steps"):
        resume_run(run, Observer(), steps=7, keep=1)
    with pytest.raises(ArbError, match="`lr` of a run cannot change"):
        arbcli.resume(run, lr=0.1, keep=1)
    assert read_facts(run)["config"]["keep"] == 2


def test_patience_that_begins_late_names_no_checkpoint(text, tmp_path):
    run, notes = tmp_path / "run", []
    config = new_config(**SMALL, data=[text], steps=9, eval_every=1, save_every=1, lr=64)
    with mock.patch("arbcli.training.trainer.Trainer.evaluate", side_effect=range(1, 99)):
        with mock.patch("arbcli.training.loop.Loop._is_over", side_effect=[False] * 3 + [True]):
            start_run(config, run, Observer())
        resume_run(run, observer_with(noted=notes.append), patience=5)
    assert notes[-1].endswith("nats a byte at step 1")


def test_run_extended_from_an_earlier_step_never_mixes_both_schedules(text, tmp_path):
    run, notes = tmp_path / "run", []
    start_run(new_config(**SMALL, data=[text], steps=2, save_every=1, keep=9), run, Observer())
    shutil.copytree(run, tmp_path / "whole")
    back, records = "step-000001.safetensors", (run / "metrics.jsonl").read_bytes()
    with mock.patch("arbcli.training.resume.run_loop"):  # as if ended before it saved anything
        resume_run(run / back, observer_with(noted=notes.append), steps=4)
    late = run / "step-000002.safetensors"
    assert f"`{late}.aside`" in notes[-1]
    assert (run / "metrics.jsonl.aside").read_bytes() == records
    assert check_run(run).resumes_at == 1
    shutil.copy(f"{late}.aside", late)
    for path in (run, late):
        with pytest.raises(ArbError, match="its `steps` is 2, not 4"):
            resume_run(path, Observer())
    assert "its `steps` is 2, not 4" in check_run(run).stops
    assert {f.name: f.state for f in check_run(run).findings}[late.name] == "refused"
    late.unlink()
    resume_run(run, Observer())
    resume_run(tmp_path / "whole" / back, Observer(), steps=4)
    a, b = (path / "step-000004.safetensors" for path in (run, tmp_path / "whole"))
    assert a.read_bytes() == b.read_bytes()


def test_run_begins_with_saved_weights(text, tmp_path):
    start_run(new_config(**SMALL, data=[text], steps=2), tmp_path / "a", Observer())
    other = tmp_path / "other.txt"
    other.write_bytes(b"Other words, of another kind. " * 100)
    initial = read_saved(tmp_path / "a", pytest.fail)
    sizes = {"ctx": 12, "batch": 2, "device": "cpu", "steps": 1, "lr": 0.25}
    sizes |= {"seed": 3, "data": [str(other)], "direction": "sign"}
    config = new_config(preset=saved_config(initial.checkpoint), **sizes)
    start_run(config, tmp_path / "b", Observer(), initial=initial)
    first = load_checkpoint(tmp_path / "b" / "step-000000.safetensors")
    assert first.step == 0
    assert first.tensors.keys() == initial.checkpoint.tensors.keys()
    assert all(torch.equal(first.tensors[n], t) for n, t in initial.checkpoint.tensors.items())
    assert read_facts(tmp_path / "b")["init_from"].endswith("a/step-000002.safetensors")
    assert load_model(tmp_path / "b").config.ctx == 12
    assert resume_run(tmp_path / "b", Observer()).steps == 1


def test_saved_weights_of_all_digits_fade_from_the_first_step_unless_it_is_said(text, tmp_path):
    sizes = SMALL | {"rule": "moment"}
    for digits in ("all", "fade"):
        config = new_config(**sizes | {"digits": digits}, data=[text], steps=1)
        start_run(config, tmp_path / digits, Observer())
    assert train_config_from(read_facts(tmp_path / "fade")).fade_from is None
    initial = read_saved(tmp_path / "all", pytest.fail)
    for given, wanted in (((None, 0.25), (0.0, 0.25)), ((0.4, None), (0.4, 0.9))):
        fades = dict(zip(("fade_from", "fade_to"), given, strict=True))
        fading = new_config(**sizes | {"digits": "fade"} | fades, data=[text], steps=1)
        run = tmp_path / f"{given}"
        start_run(fading, run, Observer(), initial=initial)
        assert train_config_from(read_facts(run)).fades == wanted


def test_weights_of_another_model_or_alone_are_refused(text, tmp_path):
    start_run(new_config(**SMALL, data=[text], steps=1), tmp_path / "a", Observer())
    initial = read_saved(tmp_path / "a", pytest.fail)
    changes = [("ffn", 32, "width"), ("sub_norms", False, "sub_norm")]
    changes += [("digits", "all", "digits=all")]
    for name, value, said in changes:
        other = new_config(**SMALL | {name: value}, data=[text], steps=1)
        with pytest.raises(ArbError, match=f"`{said}`"):
            start_run(other, tmp_path / "b", Observer(), initial=initial)
    export(tmp_path / "a", "safetensors", out=tmp_path / "weights.safetensors")
    alone = read_saved(tmp_path / "weights.safetensors", pytest.fail)
    config = new_config(**SMALL, data=[text], steps=1)
    with pytest.raises(ArbError, match="without training state"):
        start_run(config, tmp_path / "b", Observer(), initial=alone)
    assert not (tmp_path / "b").exists()


LOSSES = [3.0, 2.0, 2.5, 2.0, 1.0, 0.5]
"""With a patience of 2 a run stops after the fourth, as the second one is the lowest."""


@pytest.mark.parametrize("options", [{}, {"weights": "float"}], ids=["packed", "float"])
def test_run_stops_when_its_loss_has_not_fallen_and_keeps_the_best(
    options, text, tmp_path, monkeypatch
):
    to_come, notes, run = iter([3.0, 2.0, math.nan, 2.0]), [], tmp_path / "run"
    monkeypatch.setattr("arbcli.training.trainer.Trainer.evaluate", lambda self: next(to_come))
    options = options | {"steps": 6, "eval_every": 1, "patience": 2}
    observer = observer_with(noted=notes.append)
    report = start_run(new_config(**SMALL, data=[text], **options), run, observer)
    assert (report.steps, report.val_loss, report.stopped_by) == (4, 2.0, None)
    assert [record["val_loss"] for record in read_records(run)] == [3.0, 2.0, None, 2.0]
    (note,) = notes
    assert note.startswith(
        "stopped after step 4: the held-out loss has not fallen in 2 evaluations; the lowest was"
        " 2.0000 nats a byte at step 2, "
    )
    (best,) = run.glob("best-*")
    assert note.endswith(f"kept as `{best}`")
    assert load_checkpoint(best).step == 2
    assert f"`{best}`" in str(missing_checkpoint(run).hint)  # without those of steps
    assert report.checkpoint in map(str, run.glob("step-000004*.safetensors"))
    assert read_saved(run, notes.append).checkpoint.step == 4
    assert notes[1:] == [f"reading step 4; `{best}` had the lowest held-out loss"]
    with pytest.raises(ArbError, match="has not fallen in 2 evaluations"):  # of which one NaN
        resume_run(run, Observer(), steps=9)


def test_resumed_run_counts_the_evaluations_before_and_takes_no_more_steps(
    text, tmp_path, monkeypatch
):
    options = {"eval_every": 1, "save_every": 1, "keep": 9, "patience": 2}
    config = new_config(**SMALL, data=[text], steps=6, **options)
    to_come, run = iter(LOSSES), tmp_path / "run"
    monkeypatch.setattr("arbcli.training.trainer.Trainer.evaluate", lambda self: next(to_come))
    start_run(config, run, Observer())
    settings = (run / "config.json").read_bytes()
    with pytest.raises(ArbError, match="has not fallen in 2 evaluations"):
        resume_run(run, Observer(), steps=9)
    assert (run / "config.json").read_bytes() == settings
    assert check_run(run).has_ended
    assert "has not fallen in 2 evaluations" in str(check_run(run, 9).stops)
    back = check_run(run / "step-000003.safetensors", 9)
    assert (back.has_ended, back.resumes_at) == (False, 3)
    for back in (3, 4):  # in the middle, and once the run has stopped
        to_come = iter(LOSSES[back:])
        assert resume_run(run / f"step-{back:06d}.safetensors", Observer()).steps == 4
        assert [record["val_loss"] for record in read_records(run)] == LOSSES[:4]


def test_run_of_a_gpu_continues_on_the_requested_device(text, tmp_path, monkeypatch):
    """A run on another device does not use the backend of the first."""
    run = tmp_path / "run"
    start_run(new_config(**SMALL, data=[text], steps=1), run, Observer())
    facts = read_facts(run)
    facts["config"] |= {"device": "cuda", "backend": "triton"}
    write_json(run / "config.json", facts)
    (run / "step-000001.safetensors").unlink()
    places = []

    def started(run, trainer, facts):
        places.append((trainer.config.device, trainer.config.backend))
        raise KeyError

    for backend in (None, "torch"):
        with pytest.raises(KeyError):
            resume_run(run, observer_with(started=started), device="cpu", backend=backend)
    own = default_backend(torch.device("cpu"))
    assert places == [("cpu", own), ("cpu", "torch")]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ArbError, match="there is no CUDA device"):
        resume_run(run, Observer())
