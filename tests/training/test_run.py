"""Runs: stopped and resumed equals never stopped, and nothing that was saved is ever lost."""

import copy
import dataclasses
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from made_runs import observer_with, read_records

from arbcli import load
from arbcli.base.atomic_files import write_json
from arbcli.base.errors import ArbError
from arbcli.base.run_files import checkpoints
from arbcli.config.training import TrainConfig, train_config_from
from arbcli.data.text import EVAL_BATCHES
from arbcli.model.checkpoint import load_checkpoint, save_checkpoint
from arbcli.training import run as run_module
from arbcli.training.check import check_run
from arbcli.training.configure import new_config
from arbcli.training.directory import field_digests, make_next_directory, read_facts
from arbcli.training.minutes import steps_that_fit
from arbcli.training.observer import Observer
from arbcli.training.parallel.group import Group
from arbcli.training.record import Record, RunRecords, keep_records
from arbcli.training.resume import checkpoint_check, resume_run
from arbcli.training.run import start_run
from arbcli.training.saving import SAVE_SECONDS
from arbcli.training.schedule import learning_rate
from arbcli.training.step import TrainingStep
from arbcli.training.trainer import Trainer

SMALL = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 4}


def config(text: str, device, **options):
    given = SMALL | {"data": [text], "steps": 12, "save_every": 5, "eval_every": 6} | options
    return new_config(device=str(device), **given)


class StopAt(Observer):
    """Sends this process a signal once a record of `step` is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def recorded(self, record):
        if record.step >= self.step:
            signal.raise_signal(signal.SIGTERM)


def final(run: Path, step: int = 12) -> bytes:
    return (run / f"step-{step:06d}.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"eval_every": 0}, [10, 12]), ({"log_every": 5, "eval_every": 6}, [5, 6, 10, 12])],
)
def test_records_come_as_often_as_requested(options, steps, text, tmp_path, device):
    run = tmp_path / "run"
    settings = config(text, device, batch=1, **options)
    report = start_run(settings, run, Observer())
    records = read_records(run)
    assert [record["step"] for record in records] == steps
    rates = [learning_rate(settings, step - 1) for step in steps]
    assert [record["lr"] for record in records] == rates
    evaluated = [record["step"] for record in records if record["val_loss"] is not None]
    assert evaluated == ([6, 12] if options["eval_every"] else [])
    assert (report.val_loss is None) == (report.bits_per_byte is None) == (not evaluated)


def test_long_interval_of_records_survives_a_stop(text, tmp_path, device):
    """Its record averages more steps than a checkpoint holds by default."""
    run, notes = tmp_path / "run", []
    options = {"batch": 1, "log_every": 12, "eval_every": 0, "save_every": 11, "steps": 13}
    start_run(config(text, device, **options), run, Observer())
    before = read_records(run)
    assert [record["step"] for record in before] == [12, 13]
    losses = []
    each = observer_with(recorded=lambda record: losses.append(record.loss))
    start_run(config(text, device, **options | {"log_every": 1}), None, each, save=False)
    assert before[0]["loss"] == pytest.approx(sum(losses[:12]) / 12, rel=1e-12)
    resume_run(run / "step-000011.safetensors", Observer())
    assert read_records(run) == before
    assert resume_run(run, observer_with(noted=notes.append)).val_loss is None
    assert notes[0].startswith("the run is finished: all 13 steps are done; `--resume")


def test_no_step_is_left_out_when_records_become_more_frequent(text, tmp_path, device):
    run = tmp_path / "run"
    options = {"batch": 1, "eval_every": 0, "steps": 20}
    start_run(config(text, device, **options, log_every=15, save_every=12), run, Observer())
    losses, notes = [], []
    each = observer_with(recorded=lambda record: losses.append(record.loss))
    start_run(config(text, device, **options, log_every=1), None, each, save=False)
    signalled = observer_with(
        stepped=lambda _: notes.append(signal.raise_signal(signal.SIGTERM)), noted=notes.append
    )
    assert resume_run(run / "step-000012.safetensors", signalled, log_every=7).steps == 13
    assert notes[:2] == ["stopping by SIGTERM after this step; a second signal stops at once", None]
    resume_run(run, Observer())
    first, *_ = read_records(run)
    assert (first["step"], first["loss"]) == (14, pytest.approx(sum(losses[:14]) / 14, rel=1e-12))


def test_unsaved_run_is_the_same_run_and_leaves_nothing(text, tmp_path, device, monkeypatch):
    folder, notes, ends = tmp_path / "here", [], []
    folder.mkdir()
    monkeypatch.chdir(folder)
    settings = config(text, device, batch=1, log_every=1, save_every=1)
    saved = start_run(settings, tmp_path / "run", Observer())
    observer = observer_with(
        recorded=lambda record: notes.append(record.loss),
        started=lambda run, trainer, facts: ends.append((run, facts["number"])),
    )
    report = start_run(settings, None, observer, save=False)
    assert notes == [record["loss"] for record in read_records(tmp_path / "run")]
    assert ends == [(None, None)]
    assert (report.run, report.checkpoint) == (None, None)
    assert (report.val_loss, report.sample) == (saved.val_loss, saved.sample)
    assert list(folder.iterdir()) == []


def test_run_goes_on_with_the_threads_that_it_began_with(text, tmp_path, device, monkeypatch):
    monkeypatch.setattr("arbcli.training.trainer.Trainer.evaluate", lambda self: 1.0)
    begun, notes, seen = tmp_path / "run", [], []
    start_run(config(text, device, steps=2, batch=1, log_every=1), begun, StopAt(1))
    facts = read_facts(begun)
    assert facts["threads"] == 1
    write_json(begun / "config.json", facts | {"threads": 2})
    threads = lambda _record: seen.append(torch.get_num_threads())  # noqa: E731
    observer = observer_with(noted=notes.append, recorded=threads)
    resume_run(begun, observer)
    assert set(seen) == {2 if device.type == "cpu" else 1}
    assert torch.get_num_threads() == 1
    if device.type == "cpu":
        assert notes == ["threads: 2 as before, as 1 would round differently"]
    context, refused = nullcontext(Group(rank=1)), mock.Mock(side_effect=ArbError("no memory"))
    other = mock.patch("arbcli.training.resume.joined", return_value=context)
    with other, pytest.raises(ArbError, match="no memory"):
        resume_run(begun, observer_with(noted=pytest.fail), check=refused)
    for number in (0, "2"):
        write_json(begun / "config.json", facts | {"threads": number})
        with pytest.raises(ArbError, match="threads"):
            resume_run(begun, Observer())


def test_text_that_is_overwritten_while_it_is_read_is_noticed(text, tmp_path):
    """Nothing that was trained on it is saved; a change of the time alone is none."""
    path = Path(tmp_path, "copy.txt")
    path.write_bytes(Path(text).read_bytes())
    begun, size, seen = tmp_path / "run", path.stat().st_size, []

    def stepped(step):
        seen.append(step)
        if step == 2:
            os.utime(path, ns=(1, 1))
        if step == 4:
            with path.open("r+b") as file:
                file.write(b"?" * (size // 2))

    observer = observer_with(stepped=stepped)
    with pytest.raises(ArbError, match="the text was changed while the run read it") as told:
        start_run(config(str(path), "cpu", steps=8, save_every=1), begun, observer)
    assert f"--resume {begun}" in told.value.hint
    assert seen[-1] == 4
    names = [path.name for path in checkpoints(begun)]
    assert names == ["step-000003.safetensors", "step-000002.safetensors"]


def test_error_between_steps_is_raised_after_a_save(text, tmp_path, device):
    notes: list[str] = []
    observer = observer_with(recorded=lambda record: 1 / 0, noted=notes.append)
    with pytest.raises(ZeroDivisionError):
        start_run(config(text, device, log_every=3), tmp_path / "run", observer)
    assert notes == ["step 3 is saved: continue with `--resume`"]
    assert load_checkpoint(checkpoints(tmp_path / "run")[0]).step == 3


def test_error_within_a_step_saves_no_half_of_it(text, tmp_path, device, monkeypatch):
    monkeypatch.setattr(TrainingStep, "__call__", mock.Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        start_run(config(text, device), tmp_path / "run", Observer())
    assert load_checkpoint(*checkpoints(tmp_path / "run")).step == 0


def test_run_is_saved_at_the_start_and_by_time(text, tmp_path, device, monkeypatch):
    saved = []

    def note(run, checkpoint, keep):
        saved.append(checkpoint.step)

    monkeypatch.setattr("arbcli.training.saving.save_checkpoint", note)
    start_run(config(text, device, steps=3, save_every=500), tmp_path / "a", Observer())
    assert saved == [0, 3]
    passed, apart = [0], SAVE_SECONDS * 3 // 5
    observer = observer_with(stepped=lambda step: passed.append(apart * step))
    clock = SimpleNamespace(perf_counter=lambda: passed[-1])
    monkeypatch.setattr("arbcli.training.saving.time", clock)
    start_run(config(text, device, steps=7, save_every=500), tmp_path / "b", observer)
    assert saved == [0, 3, 0, 2, 4, 6, 7]


def test_samples_and_a_trace_change_nothing_of_a_run(text, tmp_path, device, monkeypatch):
    monkeypatch.setattr("arbcli.training.trainer.Trainer.evaluate", lambda self: 1.0)
    start_run(config(text, device), tmp_path / "plain", Observer())
    run, notes = tmp_path / "run", []
    observer = observer_with(noted=notes.append)
    start_run(config(text, device, sample_every=5), run, observer, profile=2)
    assert final(run) == final(tmp_path / "plain")
    records = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [record["step"] for record in records if record["sample"]] == [5, 10]
    first = 3 if device.type == "cpu" else 6
    path = run / f"trace-{first:06d}.json.gz"
    assert notes == [f"the trace is `{path}`: open it at https://ui.perfetto.dev"]
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    steps = sorted(name for name in names if name and name.startswith("ProfilerStep"))
    assert steps == [f"ProfilerStep#{first + n - 1}" for n in range(2)]
    assert [trace.name for trace in run.glob("*trace*")] == [path.name]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't")])
def test_memory_of_a_cpu_that_is_not_enough_is_explained(error, text, tmp_path, monkeypatch):
    monkeypatch.setattr("arbcli.training.run.Trainer", mock.Mock(side_effect=error))
    with pytest.raises(ArbError, match="machine's memory is not enough"):
        start_run(config(text, "cpu"), tmp_path / "run", Observer())


def test_non_finite_number_is_null_in_a_record(tmp_path):
    values = dict.fromkeys(Record.__dataclass_fields__, 0.0)
    values |= {"loss": float("nan"), "gauges": {}, "parts": {"ponder": float("inf")}}
    RunRecords(tmp_path).append(Record(**values))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["loss"], line["parts"], line["lr"]) == (None, {"ponder": None}, 0.0)


@pytest.mark.parametrize("damage", [b"\xff\n", b"5\n", b"[]\n", b'{"step": 9', b"[" * 10**5])
def test_records_are_cut_whole_or_not_at_all(damage, tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    before = b'{"step": 1}\n{"step": 2}\n' + damage
    path.write_bytes(before)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", mock.Mock(side_effect=OSError(28, "No space left")))
        with pytest.raises(ArbError, match="No space left"):
            keep_records(tmp_path, lambda record: record["step"] <= 1)
    assert path.read_bytes() == before
    keep_records(tmp_path, lambda record: record["step"] <= 1)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_next_directory_is_never_another_run_s(tmp_path, monkeypatch):
    options, root = new_config(device="cpu"), tmp_path / "runs"
    name = "256x4-ternary-moment-muon-lr0.7-seed0"
    assert make_next_directory(options, root).name == f"001-{name}"
    seen = iter([[], ["001-"]])
    monkeypatch.setattr(os, "listdir", lambda _: next(seen))
    assert make_next_directory(options, root).name == f"002-{name}"  # another was faster
    monkeypatch.undo()
    for number in (999, 1000):
        (root / f"{number}-x").mkdir()
    assert make_next_directory(options, root).name == f"1001-{name}"


def test_two_starts_in_one_directory_cannot_overwrite_each_other(text, tmp_path, device):
    run = tmp_path / "run"

    def lock(directory):
        (run / "config.json").write_text("of another start, which has ended")
        return nullcontext()

    with mock.patch("arbcli.training.run.run_lock", lock), pytest.raises(ArbError, match="already"):
        start_run(config(text, device), run, Observer())
    assert (run / "config.json").read_text().startswith("of another")


def test_resume_of_a_finished_run_says_so_without_its_text_or_a_model(
    text, tmp_path, device, monkeypatch
):
    first = start_run(config(text, device), tmp_path / "run", Observer())
    Path(text).unlink()
    monkeypatch.setattr(run_module, "Trainer", mock.Mock(side_effect=AssertionError))
    observer = observer_with(noted=mock.Mock())
    again = resume_run(tmp_path / "run", observer)
    assert again == dataclasses.replace(first, seconds=0.0, sample="", first_step=None)
    (said,) = observer.noted.call_args.args
    assert said == (
        f"the run is finished: all 12 steps are done, held-out loss {first.val_loss:.4f} nats a"
        f" byte; `--resume {tmp_path / 'run'} --steps N` continues it to step N"
    )


def test_resume_whose_text_has_moved_says_how_to_continue(text, tmp_path):
    run = tmp_path / "a run"
    start_run(config(text, "cpu", steps=2), run, Observer())
    Path(text).unlink()
    with pytest.raises(ArbError, match="nothing matches") as caught:
        resume_run(run, Observer(), steps=4)
    assert caught.value.hint == (
        "put the text back at its path, or start a new run from its weights:"
        f" `--init-from '{run}' --data TEXT`"
    )


def test_surplus_checkpoints_are_removed_before_anything_is_written(text, tmp_path):
    """On a full disk there is no other space for it."""
    run = tmp_path / "run"
    start_run(config(text, "cpu", save_every=2, keep=9), run, StopAt(6))
    with (run / "metrics.jsonl").open("a") as file:
        file.write("not whole")
    left = []

    def write(path, *_):
        left.append([checkpoint.name for checkpoint in checkpoints(run)])
        raise OSError("full")

    for name in ("resume.write_json", "record.write_file"):
        with mock.patch(f"arbcli.training.{name}", write), pytest.raises(OSError, match="full"):
            resume_run(run, Observer(), keep=1)
    assert left == [["step-000006.safetensors"]] * 2


@pytest.fixture
def started(text, tmp_path) -> Path:
    """Stop a run after its first step."""
    start_run(config(text, "cpu", steps=11, log_every=1), tmp_path / "run", StopAt(0))
    return tmp_path / "run"


def test_runs_from_before_a_part_had_a_rule_of_its_own_continue(started):
    facts = json.loads((started / "config.json").read_text())
    model = facts["config"]["model"]
    for part in model["stages"][0]["blocks"][0].values():
        del part["rule"]
    stages = dataclasses.asdict(train_config_from(facts).model)["stages"]
    for part in stages[0]["blocks"][0].values():
        del part["rule"]
    of_earlier_version = json.dumps(stages).encode()
    facts["digests"]["model.stages"] = hashlib.sha256(of_earlier_version).hexdigest()
    write_json(started / "config.json", facts)
    model["stages"][0]["blocks"][0]["channel"]["rule"] = "nibble"
    changed = started.with_name("changed")
    shutil.copytree(started, changed)
    write_json(changed / "config.json", facts)
    with pytest.raises(ArbError, match=r"was changed since the run began: `model\.stages`"):
        resume_run(changed, Observer())
    assert resume_run(started, Observer()).steps == 11


FREE = {
    # the text itself is compared, wherever it lies
    "data", "val", "field", "data_format", "sound", "picture",
    "save_every", "eval_every", "log_every", "sample_every", "keep", "keep_best", "patience",
    "recompute", "device", "backend",
    # a checkpoint says them, or their digests, and is compared
    "reduce_dtype", "weight_average", "tokenizer", "teacher",
}  # fmt: skip
"""Settings that change no bit of a checkpoint, that a resume may change, or that are seen besides.
"""


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TrainConfig)])
def test_change_of_any_other_setting_is_seen_by_its_name(field):
    given = config("text.txt", "cpu", steps=11)
    other = {
        "model": dataclasses.replace(given.model, ctx=7), "data": ("a",), "val": ("b",),
        "schedule": "wsd", "optimizer": "adamw", "compute": "other", "field": "c",
        "device": "cuda", "backend": "triton", "scale_losses": ("a",),
    }.get(field)  # fmt: skip
    if other is None:
        before = getattr(given, field)
        other = not before if type(before) is bool else (before or 0) + 1
    changed = copy.copy(given)
    object.__setattr__(changed, field, other)  # whether or not it could be run
    before, now = field_digests(given), field_digests(changed)
    assert before.keys() == now.keys()
    seen = {name for name in now if before[name] != now[name]}
    assert seen == (set() if field in FREE else {"model.ctx" if field == "model" else field})


def test_checkpoint_of_another_run_is_refused_by_field(started):
    saved = load_checkpoint(checkpoints(started)[0])
    facts = read_facts(started)
    config = train_config_from(facts)
    accept = checkpoint_check(started, facts, config)
    accept(saved)
    settings = saved.data["settings"]
    assert {*settings, "seed"} == {*config.decisive(), "seed", "init_from"}
    others = [(saved.config, "heads", "heads", 1), (saved.config, "ctx", "ctx", 8)]
    others += [(saved.config, "direction", "direction", "sign")]
    others += [(saved.data, "seed", "seed", 3), (saved.data, "digest", "text", 3)]
    others += [(settings, name, name, 3) for name in (*settings, "of a newer version")]
    others += [(saved.data, "settings", "settings", [3])]
    for place, name, field, value in others:
        before = dict(place)
        place[name] = value
        named = re.escape(f" its `{field}` is {value}, not")
        with pytest.raises(ArbError, match=f"does not belong to .*{named}"):
            accept(saved)
        place.clear()
        place.update(before)
    names = config.decisive().keys() - {"scale_losses"}
    saved.data["settings"] = settings | dict.fromkeys(names, 7)
    first = r"its `accum` is 7, not 1, its `attention_dropout` .*, and 14 more"
    with pytest.raises(ArbError, match=first):
        accept(saved)


def test_checkpoint_of_an_earlier_version_goes_on_as_before(text, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    start_run(config(text, "cpu", save_every=10), whole, Observer())
    shutil.copytree(whole, run)
    (run / "step-000012.safetensors").unlink()
    saved = load_checkpoint(run / "step-000010.safetensors")
    del saved.data["settings"]
    save_checkpoint(run, saved)
    assert check_run(run).resumes_at == 10
    resume_run(run, Observer())
    assert final(run) == final(whole)


def test_resume_stops_at_a_checkpoint_that_may_be_whole(own_run):
    newest = own_run / "step-000099.safetensors"
    newest.symlink_to(newest)  # as unreadable as a file can be, for root too
    with pytest.raises(ArbError, match=f"cannot read `{newest}`"):
        resume_run(own_run, Observer())
    newest.unlink()
    newer = final(own_run, 4).replace(b'\\"format\\":1', b'\\"format\\":2')
    newest.write_bytes(newer)
    with pytest.raises(ArbError, match="newer arb"):
        resume_run(own_run, Observer())
    assert newest.read_bytes() == newer


def test_train_stops_after_three_steps_without_finite_gradients(
    text, tmp_path, device, monkeypatch
):
    loss_of = Trainer.train_step

    def poisoned(self):
        if self.step >= 5:
            self._graph = self._capture_at = None  # a replayed step would not see the poison
            self.model.losses = lambda *given: {
                name: part * float("nan")
                for name, part in type(self.model).losses(self.model, *given).items()
            }
        return loss_of(self)

    monkeypatch.setattr(Trainer, "train_step", poisoned)
    with pytest.raises(ArbError, match="3 steps had gradients that are not finite"):
        start_run(config(text, device, log_every=1), tmp_path / "run", Observer())
    kept = load_checkpoint(checkpoints(tmp_path / "run")[0])
    assert kept.step == 5
    assert kept.counters["nonfinite_steps"] == 0


@pytest.mark.parametrize(("every", "why"), [(1, "weights are not finite"), (9, "the loss is nan")])
def test_twin_stops_where_it_is_not_finite(every, why, text, tmp_path, monkeypatch):
    step = Trainer.train_step

    def poisoned(self):
        loss = step(self)
        if self.step == 2:
            next(self.model.parameters()).data.fill_(torch.nan)
        return loss

    monkeypatch.setattr(Trainer, "train_step", poisoned)
    settings = config(text, "cpu", weights="float", log_every=1, keep=1, save_every=every)
    with pytest.raises(ArbError, match=why) as caught:
        start_run(settings, tmp_path / "run", Observer())
    assert "run` are intact; try a smaller `--lr`" in caught.value.hint
    assert [load_checkpoint(path).step for path in checkpoints(tmp_path / "run")] == [every % 9]


def test_load_warns_of_a_checkpoint_that_it_passes_over(started):
    newest = started / "step-000009.safetensors"
    newest.write_bytes(b"")
    with pytest.warns(UserWarning, match=f"`{newest}`: refused: .*; using the one before it"):
        load(started, device="cpu")


def test_minutes_become_a_recorded_number_of_steps(text, tmp_path, device):
    settings = config(text, device, steps=10**6)
    report = start_run(settings, tmp_path / "run", Observer(), minutes=0.02)
    facts = json.loads((tmp_path / "run" / "config.json").read_text())
    assert report.steps == facts["config"]["steps"] < 10**5


@pytest.mark.parametrize(("minutes", "of_building"), [(0.3, 2.0), (10, 5.0), (10, 0.0)])
def test_minutes_count_everything(minutes, of_building, text, monkeypatch):
    """The trial is a tenth at most, and it, the building and evaluations come off the minutes."""
    clock, of_step, of_batch = [0.0], 0.5, 0.125

    def pass_time(seconds):
        clock[0] += seconds
        return torch.tensor(1.0)

    settings = config(text, "cpu", eval_every=None)
    trainer = SimpleNamespace(
        captures=False, config=settings, group=Group(), num_evaluation_batches=EVAL_BATCHES,
        train_step=lambda: pass_time(of_step), release_graph=lambda: None,
        evaluate=lambda batches: pass_time(batches * of_batch),
    )  # fmt: skip
    now = SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr("arbcli.training.minutes.time", now)
    pass_time(of_building)
    steps = steps_that_fit(minutes, trainer, 0.0)
    evaluations = -(-steps // dataclasses.replace(settings, steps=steps).eval_interval)
    whole = clock[0] + steps * of_step + evaluations * 40 * of_batch
    assert 0.95 * minutes * 60 <= whole <= minutes * 60
    assert clock[0] - of_building <= 0.1 * minutes * 60 + 3 * of_step


def test_first_step_is_reported_with_the_loss_before_it(text, tmp_path, device):
    run, firsts = tmp_path / "run", []
    observer = StopAt(2)
    observer.first_step = firsts.append
    report = start_run(config(text, device, log_every=1), run, observer)
    assert firsts == [report.first_step]
    (first,) = firsts
    assert (first.step, first.loss) == (1, read_records(run)[0]["loss"])
    assert first.seconds >= first.compile_seconds >= 0
    first = resume_run(run, Observer()).first_step
    assert (first.step, first.loss) == (3, read_records(run)[2]["loss"])
    assert resume_run(run, Observer()).first_step is None
