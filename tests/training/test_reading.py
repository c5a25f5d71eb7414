"""The parts of each text that a run reads, their order, and what its records say."""

import dataclasses
import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from made_runs import observer_with

from arbcli.base.errors import ArbError
from arbcli.data.opening import open_texts
from arbcli.data.text import num_evaluation_batches
from arbcli.model.operations import step_operations
from arbcli.model.updater import Updater
from arbcli.training import loop, recorder, saving, schedule
from arbcli.training import run as runs
from arbcli.training import trainer as training
from arbcli.training.configure import new_config
from arbcli.training.directory import open_run_texts, reopen_texts, run_facts
from arbcli.training.observer import Observer
from arbcli.training.parallel.group import Group
from arbcli.training.run import start_run
from arbcli.training.trainer import Trainer

TRAIN, VAL = b"abcdefgh", b"WXYZ"
"""Alphabets of the training and of the held-out text: no byte is in both."""
OWN = (".wire_exponent", "_statistic")
"""Ends of the names of the measures of gradients."""
SHAPE = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 4, "accum": 2}


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict:
    """Options of a small run in float32 whose texts share no byte."""
    generator, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("texts")
    paths = {}
    for name, alphabet in (("data", TRAIN), ("val", VAL)):
        order = torch.randint(len(alphabet), (4000,), generator=generator).tolist()
        paths[name] = folder / f"{name}.txt"
        paths[name].write_bytes(bytes(alphabet[i] for i in order))
    texts = {name: [str(path)] for name, path in paths.items()}
    return SHAPE | texts | {"device": "cpu", "compute": "fp32", "steps": 6, "warmup": 2}


@pytest.fixture(scope="module", autouse=True)
def whole_evaluations():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer.evaluate.__wrapped__, "__defaults__", (None,))
        yield


def trainer_of(options: dict, **changes) -> Trainer:
    config = new_config(**options | changes)
    return Trainer(config, open_texts(config.data, config.val, seed=0, context=config.model.ctx))


def test_each_micro_batch_is_drawn_once_and_from_the_right_text(options, monkeypatch):
    trainer = trainer_of(options, seed=5, accum=3)
    drawn = mock.Mock(side_effect=training.batch_starts)
    monkeypatch.setattr(training, "batch_starts", drawn)
    for _ in range(2):
        trainer.train_step()
    for call, (step, micro) in zip(drawn.mock_calls, product(range(2), range(3)), strict=True):
        assert call.args == (trainer.texts.train, 5, step, micro, 4, 16)


@pytest.mark.parametrize("objective", ["next", "masked"])
def test_held_out_windows_do_not_depend_on_the_size_of_micro_batches(options, objective):
    def held_out(batch: int, accum: int) -> tuple[float, list[list[int]]]:
        trainer = trainer_of(options, batch=batch, accum=accum, objective=objective)
        windows, loss = [], trainer.model.loss
        trainer.model.loss = lambda *inputs: windows.extend(inputs[1].tolist()) or loss(*inputs)
        return trainer.evaluate(), sorted(windows)

    loss, windows = held_out(batch=4, accum=1)
    assert len(windows) == 160
    divided_loss, divided_windows = held_out(batch=2, accum=2)
    assert divided_windows == windows
    assert divided_loss == pytest.approx(loss, rel=1e-3)


def test_accumulation_beyond_the_limit_of_symbols_adds_no_held_out_windows():
    assert num_evaluation_batches(32, 1, 2048) == 40
    assert num_evaluation_batches(32, 4, 2048) == 40
    assert num_evaluation_batches(4, 8, 2048) == 64
    assert num_evaluation_batches(4, 8, 256) == 320


@pytest.mark.parametrize(
    ("setting", "before", "after", "has_own"),
    [("reduce_dtype", None, "int8", True), ("reduce_dtype", "int8", "int16", True),
     ("reduce_dtype", "int8", None, False), ("direction", "muon", "adafactor", True),
     ("direction", "adafactor", "muon", False)],
)  # fmt: skip
def test_weights_are_taken_from_a_run_of_other_gradients(setting, before, after, has_own, options):
    """Scales of gradients are measured anew: others would clip them, or round them too much."""
    first, second = (trainer_of(options, **{setting: value}, seed=seed) for seed, value in
                     enumerate((before, after)))  # fmt: skip
    first.train_step()
    first.train_step()
    initial = {name: part.clone() for name, part in second.model.state_dict().items()}
    checkpoint = first.checkpoint("digest")
    second.initialise_from(checkpoint)
    loaded = second.model.state_dict()
    assert loaded.keys() == initial.keys()
    for name, part in loaded.items():
        wanted = initial if name.endswith(OWN) else checkpoint.tensors
        assert torch.equal(part, wanted[name]), name
    assert any(name.endswith(OWN) for name in loaded) == has_own
    assert second.step == 0
    assert second.updater.counters() == {"nonfinite_steps": 0, "refused": 0}


class PositionCounter(SimpleNamespace):
    """A clock that only stands or leaps: half a second a step, minutes for all else."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def take(self, monkeypatch, owner, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def slow(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, slow)


GOLDEN = [
    (1, 0.35, (6.07825, 1e-4), None, (188, 3)),
    (2, 0.655453, (6.07577, 0.003), None, (311, 15)),
    (3, 0.53375, (5.72606, 0.02), (6.0529, 0.06), (294, 24)),
    (4, 0.3675, (5.46257, 0.04), None, (185, 50)),
    (5, 0.20125, (5.31626, 0.08), None, (111, 60)),
    (6, 0.0795466, (5.32789, 0.12), (6.0225, 0.15), (47, 30)),
]
"""Step, learning rate, loss, held-out loss and number of flipped trits of the records below.

The last bits of a product depend on the instruction set and the backend, and a trit that they flip
changes all that follows. The numbers are those of one run by `native`. Tolerances are those of 600
runs of an earlier step, whose gradients were multiplied by 1 + e, e normal of 1e-7, 1e-6 and 1e-5,
and half as much again or more.
"""
TRITS = 25088


@pytest.fixture(scope="module")
def records(options, tmp_path_factory) -> list[dict]:
    clock, run = PositionCounter(), tmp_path_factory.mktemp("golden") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "LOG_EVERY", 1)
        for module in (loop, recorder, saving):
            patch.setattr(module, "time", clock)
        clock.take(patch, Trainer, "train_step", 0.5)
        clock.take(patch, Trainer, "evaluate", 100)
        clock.take(patch, saving, "save_checkpoint", 1000)
        # what is not timed falls between the same two records more than once
        planned = {"save_every": 1, "eval_every": 3}
        start_run(new_config(**options | planned), run, Observer())
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_records_of_a_run_are_pinned(records):
    for record, (step, lr, loss, val_loss, flips) in zip(records, GOLDEN, strict=True):
        assert record["step"] == step
        assert record["lr"] == pytest.approx(lr, rel=1e-5)
        assert record["loss"] == within(*loss)
        assert record["val_loss"] == (val_loss and within(*val_loss))
        assert record["flip_share"] * TRITS == within(*flips)
        assert (record["state_bytes"], record["parts"], record["gauges"]) == (57298, {}, {})


def within(value: float, tolerance: float):
    return pytest.approx(value, abs=tolerance, rel=0)


def test_records_have_the_right_units(records):
    for record in records:
        assert record["bits_per_byte"] == pytest.approx(record["loss"] / 0.693147, rel=1e-5)
        assert record["bytes_per_second"] == 2 * 4 * 16 / 0.5  # windows of 16 bytes, twice four
        assert record["seconds_left"] == 0.5 * (6 - record["step"])
        assert record["bytes_seen"] == 2 * 4 * 16 * record["step"]
        assert record["nonfinite_steps"] == 0
        assert record["peak_bytes"] > record["state_bytes"]


def test_time_of_a_run_is_all_that_it_takes(records):
    """Saves of 1000 seconds, evaluations of 100, and half a second a step."""
    assert [record["seconds"] for record in records] == [2000.5, 3001, 4101.5, 5102, 6102.5, 6203]


def several(first: bool, agree: Callable) -> SimpleNamespace:
    """Make the group of one of two processes, the other of which changes no trits."""
    return SimpleNamespace(
        size=2, first=first, agree=agree, sum=lambda tensor: tensor, device=torch.device("cpu")
    )


def test_record_of_several_processes_is_of_all_of_them(options, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "peak_operations", lambda device: 1e9)
    trainer, told = trainer_of(options), []
    observer = observer_with(recorded=told.append)
    for first in (True, False):
        trainer.group = several(first, lambda *values: (111, 222))
        running = loop.Loop(trainer, tmp_path, {}, observer, None, None)
        for _ in range(2):
            running._train_step()
        running._record(None)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 1  # the first process writes it, and all are told
    for record, step in zip(told, (2, 4), strict=True):
        assert (record.step, record.state_bytes, record.peak_bytes) == (step, 111, 222)
        needed = record.bytes_per_second * step_operations(trainer.config.model) / 16
        assert record.mfu == pytest.approx(needed / 2e9)


def test_everything_that_decides_a_run_is_compared_between_processes(options, monkeypatch):
    config = new_config(**options | {"keep_best": False, "reduce_dtype": "int8"})
    texts = open_texts(config.data, config.val, seed=0, context=16)
    before = runs.shared_settings(config, texts)
    changes = {
        "save_every": 7, "eval_every": 3, "keep_best": True, "reduce_dtype": "int16",
        "sample_every": 2, "log_every": 7, "patience": 3,
        "backend": "interpreter", "seed": 1, "lr": 0.5, "steps": 9, "compute": "bf16",
    }  # fmt: skip
    for name, value in changes.items():
        after = runs.shared_settings(dataclasses.replace(config, **{name: value}), texts)
        assert {key for key in before if before[key] != after[key]} == {name}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    swapped = dataclasses.replace(texts, train=texts.val)
    after = runs.shared_settings(config, swapped)
    assert {key for key in before if before[key] != after[key]} == {"text", "threads"}
    assert after["threads"] == 77


@pytest.mark.parametrize("rank", [0, 1])
def test_counters_that_are_added_up_go_on_in_one_process_alone(rank, options):
    trainer = trainer_of(options, reduce_dtype="int8")
    shared = trainer.shared
    shared.group = Group(rank, 2)
    shared.group.sum = lambda tensor: tensor + 1000 * rank  # of the other process
    shared.restore({"refused": 5, "nonfinite_steps": 2})
    assert Updater.counters(shared) == {"refused": 0 if rank else 5, "nonfinite_steps": 2}
    assert shared.counters() == {"refused": 1000 if rank else 5, "nonfinite_steps": 2}
    shared.received = 4 * shared.num_weights
    assert shared.bytes_per_weight() == 2  # of two processes


@pytest.mark.parametrize("split", ["files", "within"])
def test_texts_of_a_run_are_split_again_as_they_were(split, options, monkeypatch, tmp_path):
    """Wherever it goes on, and whatever would be chosen today."""
    (began := tmp_path / "[a]").mkdir()
    monkeypatch.chdir(began)
    for name, size in (("a.txt", 3000), ("b.txt", 400)):
        Path(name).write_bytes(Path(options["data"][0]).read_bytes()[:size])
    config = new_config(**options | {"data": ["a*.txt", "b.txt"], "val": ()})
    texts = open_run_texts(config, split=split)
    assert texts.split == split
    facts = run_facts(tmp_path, config, texts)
    for folder in ("..", "."):
        monkeypatch.chdir(began / folder)
        again = reopen_texts(facts, config)
        assert training.text_digest(again) == facts["text"]["digest"]
        assert again.split == split
    del facts["text"]["paths"]  # as an earlier version had it
    assert reopen_texts(facts, config).split == split


def test_text_that_cannot_be_read_again_is_named_with_its_reason(options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(Path(options["data"][0]).read_bytes())
    config = new_config(**options | {"data": ["a.txt"], "val": ()})
    facts = run_facts(tmp_path, config, open_run_texts(config))
    Path("a.txt").write_bytes(b"")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ArbError, match=f"there is no text in `{tmp_path / 'a.txt'}`"):
        reopen_texts(facts, config)


def test_counters_go_on_through_a_resume(options):
    """One step without a finite gradient is counted once before, and still after."""
    trainer, resumed = trainer_of(options), trainer_of(options)
    losses = trainer.model.losses
    trainer.model.losses = lambda *pair: {k: v * math.nan for k, v in losses(*pair).items()}
    trainer.train_step()
    del trainer.model.losses
    trainer.train_step()
    checkpoint = trainer.checkpoint("of a text")
    assert checkpoint.counters["nonfinite_steps"] == 1
    assert checkpoint.counters["refused"] > 1
    resumed.restore(checkpoint)
    resumed.train_step()
    assert resumed.checkpoint("of a text").counters == checkpoint.counters
