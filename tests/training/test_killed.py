"""A run that is killed, stopped or ended by an error leaves the files of one that never was.

What a SIGKILL leaves is the directory as it is at that moment. So a run is watched, its directory
is copied whenever it changes, and a run goes on from each copy. That run is watched too, until no
state of the directory is new: after that any number of kills, at any times, is covered.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from apparatus.killing import write_tokenizer
from made_runs import observer_with, read_records
from marks import mostly_slow

from arbcli.base.errors import ArbError
from arbcli.base.run_files import COMPANIONS, checkpoints
from arbcli.config.training import TrainConfig
from arbcli.data.chat_template import SETTINGS, TEMPLATE
from arbcli.generation.load import SavedModel, read_saved
from arbcli.training import loop, record, sample, schedule
from arbcli.training import run as running
from arbcli.training.check import check_run
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.record import METRICS
from arbcli.training.resume import resume_run
from arbcli.training.run import start_run
from arbcli.training.trainer import Trainer

TINY = {"dim": 16, "layers": 1, "heads": 1, "ffn": 16, "ctx": 8, "batch": 2}
STEPS = 7
PLAN = {"steps": STEPS, "eval_every": 3, "save_every": 2, "sample_every": 5, "keep": 1}
RECORDED = [3, 4, 5, 6, 7]
BEST = 6
"""Step with the lowest held-out loss: it is saved, then evaluated. Step 3 is evaluated first."""
NEAR_END = 10
"""States of other runs than packed ones that are tried, from the last evaluation on."""


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    evaluate = Trainer.evaluate
    monkeypatch.setattr(schedule, "LOG_EVERY", 4)
    monkeypatch.setattr(sample, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(Trainer, "evaluate", lambda self: evaluate(self) - (self.step == BEST))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"ternary weights learn to read. " * 100)
    return str(path)


@pytest.fixture(scope="module")
def config(text) -> Callable[..., TrainConfig]:
    def make(**options) -> TrainConfig:
        return new_config(**{"data": [text], "device": "cpu", **TINY, **PLAN, **options})

    return make


def contents(run: Path) -> tuple[dict[str, bytes], list[dict]]:
    """Read the checkpoints of a run, and its records."""
    files = [*checkpoints(run), *run.glob("best-*.safetensors")]
    return {path.name: path.read_bytes() for path in files}, read_records(run)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[[TrainConfig], tuple]:
    """Return the contents of an uninterrupted run, which is run once."""
    made: dict[str, tuple] = {}

    def contents_of(options: TrainConfig) -> tuple:
        if repr(options) not in made:
            run = tmp_path_factory.mktemp("whole") / "run"
            start_run(options, run, Observer())
            made[repr(options)] = contents(run)
        return made[repr(options)]

    return contents_of


def state(run: Path) -> str:
    """Hash the names and contents of a directory, without what differs from run to run."""
    digest = sha256()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if "config.json" in path.name:
            content = b""
        elif METRICS in path.name:
            lines = content.decode().splitlines(keepends=True)
            steps = [json.loads(line)["step"] for line in lines if line.endswith("}\n")]
            content = repr((steps, [line[-1] for line in lines])).encode()
        name = re.sub(r"\.[0-9a-f]{8}\.tmp$", ".tmp", path.name)
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


class Watch:
    """Copies the directory of a run at each of its states that is new.

    Args:
        run: the directory.
        copies: where to put copies; a number is their name.
        seen: the states that have a copy.
    """

    def __init__(self, run: Path, copies: Path, seen: set[str]) -> None:
        self.run, self.copies, self.seen = run, copies, seen

    def look(self, torn: str = "") -> None:
        """Copy the directory, with part of a record after the others, if that is new."""
        if not self.run.exists():
            return
        copy = self.copies / str(len(self.seen))
        shutil.copytree(self.run, copy)
        if torn:
            with (copy / METRICS).open("a") as file:
                file.write(torn)
        digest = state(copy)
        if digest in self.seen:
            shutil.rmtree(copy)
        self.seen.add(digest)

    def around(self, work: Callable) -> Callable:
        """Look before and after."""

        def watched(*args, **kwargs):
            self.look()
            result = work(*args, **kwargs)
            self.look()
            return result

        return watched

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Look around all that changes a directory: writes, renames, links and removals."""
        for owner, name in (
            (os, "fsync"), (os, "link"), (os, "ftruncate"), (Path, "replace"), (Path, "rename"),
            (Path, "unlink"), (Path, "mkdir"),
        ):  # fmt: skip
            patch.setattr(owner, name, self.around(getattr(owner, name)))
        append = record._append_line

        def torn(run, line):
            self.look(line[:50].decode())
            self.look(line[:-1].decode())  # without its newline
            append(run, line)
            self.look()

        patch.setattr(record, "_append_line", torn)


def go_on(config: TrainConfig, run: Path, initial: SavedModel | None = None) -> None:
    """Resume a run, or start it if it was killed before there was anything to resume."""
    if (run / "config.json").exists():
        resume_run(run, Observer())
    else:
        start_run(config, run, Observer(), initial=initial)


@pytest.mark.parametrize(
    ("any_number", "kind"),
    [(False, "packed"), (False, "taught"), (False, "float"),
     pytest.param(True, "packed", marks=pytest.mark.slow)],
)  # fmt: skip
def test_killed_run_ends_with_the_files_and_records_of_a_whole_run(
    any_number, kind, config, tmp_path
):
    whole, copies, seen = tmp_path / "whole", tmp_path / "copies", set()
    copies.mkdir()
    options = config(keep_best=True)
    if kind == "taught":
        start_run(config(seed=5, steps=1), tmp_path / "teacher", Observer())
        options = config(keep_best=True, teacher=str(tmp_path / "teacher"))
    elif kind == "float":
        options = config(keep_best=True, weights="float", optimizer="muon", weight_average=3)
    with pytest.MonkeyPatch.context() as patch:
        Watch(whole, copies, seen).plant(patch)
        start_run(options, whole, Observer())
    expected = contents(whole)
    form = ".float" if kind == "float" else ""
    assert expected[0].keys() == {
        f"best-{BEST:06d}{form}.safetensors", f"step-{STEPS:06d}{form}.safetensors"
    }  # fmt: skip
    assert [record["step"] for record in expected[1]] == RECORDED
    first = len(seen)
    number = 0 if kind == "packed" else first - NEAR_END
    while number < (len(seen) if any_number else first):
        run = copies / str(number)
        with pytest.MonkeyPatch.context() as patch:
            if any_number:
                Watch(run, copies, seen).plant(patch)
            go_on(options, run)
        assert contents(run) == expected, f"state {number}"
        assert not [*run.glob(".*.tmp")]
        shutil.rmtree(run)
        number += 1
    assert first > 25
    assert (number > first) == any_number


def test_run_that_goes_back_and_is_killed_keeps_its_records_and_best(config, tmp_path):
    """Whether it is killed before the first save of the new branch, or within it."""
    whole, copies = tmp_path / "whole", tmp_path / "copies"
    copies.mkdir()
    start_run(config(keep_best=True, keep=9), whole, Observer())
    expected = contents(whole)
    back, seen = tmp_path / "back", set()
    shutil.copytree(whole, back)
    with pytest.MonkeyPatch.context() as patch:
        Watch(back, copies, seen).plant(patch)
        resume_run(back / "step-000004.safetensors", Observer())
    assert contents(back) == expected
    for number in range(len(seen)):
        run = copies / str(number)
        go_on(config(), run)
        assert contents(run) == expected, f"state {number}"
        assert not [*run.glob(".*.tmp")]
    assert len(seen) > 9


def write_chats(folder: Path) -> dict[str, object]:
    """Write chats, and a tokenizer with a template; return the options that name them."""
    pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    pytest.importorskip("jinja2", reason="needs the package jinja2")
    write_tokenizer(folder / "tokenizer.json", ("<end>",))
    (folder / TEMPLATE).write_text(
        "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    (folder / SETTINGS).write_text('{"eos_token": "<end>"}')
    messages = [{"role": role, "content": role * 2} for role in ("user", "assistant")]
    chats = [
        json.dumps({"messages": messages + messages[:1] * (n % 9) + messages}) for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(chats))
    return {
        "data": [str(folder / "chats.jsonl")], "field": "messages", "ctx": 64, "batch": 1,
        "tokenizer": str(folder / "tokenizer.json"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["chats", "weights"])
def test_start_that_is_killed_ends_with_the_files_of_a_whole_run(kind, config, tmp_path, own_cache):
    """With the template that it began with, and from the weights that it began with."""
    options, initial, seen = {"steps": 1, "eval_every": 0}, None, set()
    whole, copies, left = (tmp_path / name for name in ("whole", "copies", "left"))
    copies.mkdir()
    if kind == "chats":
        options |= write_chats(tmp_path)
        for name, content in ((TEMPLATE, "{{ messages }}"), (SETTINGS, '{"eos_token": "e"}')):
            (left / COMPANIONS).mkdir(parents=True, exist_ok=True)  # of an earlier run
            (left / COMPANIONS / name).write_text(content)
    else:
        start_run(config(**options | {"seed": 5}), tmp_path / "other", Observer())
        initial = read_saved(tmp_path / "other", pytest.fail)
    start_run(config(**options), whole, Observer(), initial=initial)
    expected = contents(whole)
    with pytest.MonkeyPatch.context() as patch:
        Watch(left, copies, seen).plant(patch)
        start_run(config(**options), left, Observer(), initial=initial)
    assert contents(left) == expected
    for number in range(len(seen)):
        go_on(config(**options), copies / str(number), initial)
        assert contents(copies / str(number)) == expected, f"state {number}"
    assert len(seen) > 4


def test_run_whose_template_or_first_weights_have_changed_is_refused(config, tmp_path, own_cache):
    run = tmp_path / "run"
    start_run(config(steps=1, **write_chats(tmp_path)), run, Observer())
    (run / COMPANIONS / SETTINGS).write_text('{"eos_token": "<other>"}')
    with pytest.raises(ArbError, match=r"the chat template of .* are not those of its start"):
        resume_run(run, Observer(), steps=2)
    other, whole, later = (tmp_path / name for name in ("other", "whole", "later"))
    start_run(config(steps=1), other, Observer())
    start_run(config(steps=2, save_every=1), whole, Observer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "run_loop", lambda *_: None)  # killed before it saves
        start_run(config(), later, Observer(), initial=read_saved(other, pytest.fail))
    assert check_run(later).resumes_at == 0
    shutil.copy(whole / "step-000002.safetensors", other / "step-000001.safetensors")
    with pytest.raises(ArbError, match="does not have the weights that the run began with"):
        resume_run(later, Observer())
    assert check_run(later).stops


def killed_before_record(config: TrainConfig, run: Path, step: int) -> None:
    """Leave a run that was killed once a step was saved, and before its record was written."""

    def kill(self, *_):
        if self.trainer.step == step:
            raise KeyboardInterrupt
        record(self, *_)

    record = loop.Loop._record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_record", kill)
        with pytest.raises(KeyboardInterrupt):
            start_run(config, run, Observer())
    assert checkpoints(run)[0].name == f"step-{step:06d}.safetensors"


@pytest.mark.parametrize(
    "kind",
    mostly_slow(["small_hnet", "small_graph", "small_compressed"], lambda k: k == "small_hnet"),
)
def test_record_after_a_resume_has_the_parts_and_gauges_of_its_step(
    kind, config, uninterrupted, tmp_path, request
):
    options = config(**request.getfixturevalue(kind))
    run = tmp_path / "run"
    killed_before_record(options, run, 6)
    resume_run(run, Observer())
    assert contents(run) == uninterrupted(options)
    assert read_records(run)[-1]["parts"]


@pytest.mark.parametrize("step", mostly_slow(range(1, STEPS + 1), lambda step: step in (1, STEPS)))
def test_stopped_run_ends_with_the_files_and_records_of_a_whole_run(
    step, config, uninterrupted, tmp_path, monkeypatch
):
    options = config(keep_best=True, accum=2, rule="nibble")
    expected = uninterrupted(options)
    run, train_step = tmp_path / "run", Trainer.train_step
    stops = iter([step])
    # a terminal that is closed sends it more than once
    name, times = ("SIGHUP", 2) if step == 1 else ("SIGTERM", 1)

    def stopped(trainer):
        loss = train_step(trainer)
        if trainer.step == step and next(stops, None):
            for _ in range(times):
                signal.raise_signal(signal.Signals[name])
        return loss

    monkeypatch.setattr(Trainer, "train_step", stopped)
    report = start_run(options, run, Observer())
    assert (report.stopped_by, report.steps, report.val_loss) == (name, step, None)
    assert report.checkpoint == str(checkpoints(run)[0])
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert read_records(run)[-1]["step"] == (step if step < STEPS else 6)
    predicted = check_run(run)
    assert (predicted.drops_records, predicted.evaluates_first) == (step in (1, 2), step == STEPS)
    resume_run(run, Observer())
    assert contents(run) == expected


@pytest.mark.parametrize("step", [3, STEPS])
def test_evaluation_that_failed_is_done_first_by_the_resume(
    step, config, uninterrupted, tmp_path, monkeypatch
):
    options = config(keep_best=True)
    run, evaluate = tmp_path / "run", Trainer.evaluate

    def failing(trainer):
        if trainer.step == step:
            raise ArbError("the GPU's memory is not enough")
        return evaluate(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", failing)
        with pytest.raises(ArbError, match="not enough"):
            start_run(options, run, Observer())
    report = check_run(run)
    assert (report.resumes_at, report.evaluates_first) == (step, True)
    told = []
    resume_run(run, observer_with(recorded=told.append))
    assert contents(run) == uninterrupted(options)
    assert told[0].step == step
    assert (told[0].bytes_per_second, told[0].seconds_left) == (None, None)


def test_last_checkpoint_is_kept_as_the_best_where_a_kill_came_before(config, tmp_path):
    run = tmp_path / "run"
    start_run(config(keep_best=True, eval_every=STEPS), run, Observer())
    expected = contents(run)
    assert len(expected[0]) == 2
    (run / f"best-{STEPS:06d}.safetensors").unlink()
    resume_run(run, Observer())
    assert contents(run) == expected
