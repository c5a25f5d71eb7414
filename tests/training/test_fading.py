"""Weights that fade from all digits to the trit, in the course of a run."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.base.run_files import checkpoint_path
from arbcli.config.training import FADE_FROM, FADING_SHARE
from arbcli.data.opening import open_texts
from arbcli.generation.generation import Sampling, generate
from arbcli.generation.load import load_model, saved_config
from arbcli.interop.exporting import export
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.checkpoint import load_checkpoint
from arbcli.model.rules import FADED, FADING, STAGES, find_rule, stage_rule
from arbcli.training import trainer as training
from arbcli.training.configure import new_config
from arbcli.training.observer import Observer
from arbcli.training.run import resume_run, start_run
from arbcli.training.schedule import fade_share, fade_stage, learning_rate
from arbcli.training.trainer import EAGER_STEPS, Trainer
from arbcli.verify.kernels.codec.decode_digits import digits_reference, scales_reference

FADES = (FADE_FROM, FADE_FROM + FADING_SHARE)
SMALL = {
    "dim": 32, "layers": 1, "heads": 1, "ffn": 32, "ctx": 16, "batch": 2, "steps": 20,
    "rule": "nibble", "digits": "fade", "device": "cpu", "warmup": 2,
}  # fmt: skip


def trainer_of(text: str, **options) -> Trainer:
    config = new_config(**SMALL | options, data=[text])
    return Trainer(config, open_texts(config.data, None, seed=0, context=16))


def test_stages_take_equal_turns_and_the_last_stage_stays():
    found = [fade_stage(step, 1000, FADES) for step in range(1001)]
    assert tuple(dict.fromkeys(found)) == STAGES
    assert found[int(1000 * FADE_FROM)] == "all" != found[int(1000 * FADE_FROM) + 1]
    turn = 1000 * FADING_SHARE / 16
    assert all(found.count(stage) == pytest.approx(turn, abs=1) for stage in STAGES[1:-1])
    assert [fade_stage(step, 1, FADES) for step in (0, 1)] == ["all", "trit"]
    early = [fade_stage(step, 1000, (0.0, 0.5)) for step in range(1001)]
    assert (early[0], early[1], early[500]) == ("all", "15/16", "trit")
    assert early[:600] == found[400:1000]
    assert [fade_stage(step, 1000, (0.0, 0.25)) for step in range(501)] == early[::2]


@pytest.mark.parametrize("rule", FADING)
@pytest.mark.parametrize("stage", STAGES)
def test_weight_is_all_digits_and_the_trit_each_by_its_share(rule, stage, text):
    trainer = trainer_of(text, rule=rule)
    tensor = trainer.model.blocks[0].mlp.output.weight
    packed, share = tensor.packed, STAGES.index(stage) / 16
    every, trit = digits_reference(packed), digits_reference(packed._replace(remainder=None))
    scale = scales_reference(packed).bfloat16().double()
    wanted = ((1 - share) * every + share * trit) * scale
    tensor.rule = stage_rule(rule, stage)
    assert torch.equal(tensor.weight(), wanted.bfloat16())
    assert tensor.rule.radix == find_rule(rule, "all").radix


@pytest.mark.parametrize("rule", FADING)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_steps_by_the_constants_of_all_digits(rule, stage):
    """Only what a forward reads differs: the rule of the trit alone has another moment and clip."""
    every, of_stage = find_rule(rule, "all"), stage_rule(rule, stage)
    names = {name for name in dir(every) if isinstance(getattr(every, name), int | float | str)}
    names -= {"reads_all", "kept", "read_radix", "fits_a_byte", "unit_std", "__module__"}
    assert {"radix", "remainder_max", "moment_range", "spread", "share_a_byte"} <= names
    assert type(of_stage) is type(every)
    assert {name for name in names if getattr(of_stage, name) != getattr(every, name)} == set()
    read = (True, 1 - STAGES.index(stage) / 16) if stage != "trit" else (False, 1)
    assert (of_stage.reads_all, of_stage.kept) == read


def test_first_steps_are_those_of_all_digits(text):
    fading, every = trainer_of(text), trainer_of(text, digits="all")
    for _ in range(int(SMALL["steps"] * FADE_FROM) + 1):
        assert torch.equal(fading.train_step(), every.train_step())
    assert not torch.equal(fading.train_step(), every.train_step())


@pytest.mark.parametrize("rules", [{}, {"rule": "moment", "mlp_rule": "nibble"}], ids=str)
def test_run_resumed_while_it_fades_ends_with_the_same_bits(rules, text, tmp_path):
    run, at = tmp_path / "run", 12
    start_run(new_config(**SMALL | rules, data=[text], save_every=at, keep=3), run, Observer())
    last = load_checkpoint(checkpoint_path(run, 20))
    middle = checkpoint_path(run, at)
    assert saved_config(load_checkpoint(middle)).digits == fade_stage(at, 20, FADES)
    assert saved_config(load_checkpoint(middle)).digits in FADED
    resume_run(middle, Observer())
    again = load_checkpoint(checkpoint_path(run, 20))
    assert again.digest == last.digest
    assert saved_config(again).digits == "trit"
    resume_run(run, Observer(), steps=28)  # which is in the middle of a longer run
    assert saved_config(load_checkpoint(checkpoint_path(run, 24))).digits == fade_stage(
        24, 28, FADES
    )
    assert saved_config(load_checkpoint(checkpoint_path(run, 28))).digits == "trit"


@pytest.mark.parametrize("rules", [{}, {"rule": "moment", "mlp_rule": "nibble"}], ids=str)
def test_checkpoints_of_the_middle_are_read_and_not_exported(rules, text, tmp_path):
    run = tmp_path / "run"
    start_run(new_config(**SMALL | rules, data=[text], save_every=12, keep=3), run, Observer())
    trainer = trainer_of(text, **rules)
    for _ in range(12):
        trainer.train_step()
    middle = checkpoint_path(run, 12)
    model, ids = load_model(middle, compute="fp32"), torch.arange(16)[None]
    trainer.model.compute_dtype = torch.float32
    assert torch.equal(model(ids), trainer.model(ids))
    assert len(b"".join(generate(model, b"a", 3, Sampling(seed=0)))) >= 3
    with pytest.raises(ArbError, match="fading"):
        export(middle, "safetensors", out=tmp_path / "weights")
    export(run, "safetensors", out=tmp_path / "weights")
    with pytest.raises(ArbError, match="middle of a run"):
        new_config(preset=saved_config(load_checkpoint(middle)))


def test_best_of_a_run_that_fades_is_refused():
    with pytest.raises(ArbError, match="from before the weights are ternary"):
        new_config(**SMALL | {"keep_best": True})


def test_rate_grows_to_that_of_the_trit_while_weights_fade():
    config = new_config(**SMALL | {"rule": "moment", "schedule": "constant", "warmup": 0})
    growth = find_rule("moment", "all").fade_growth
    for step in (0, 8, 13, 18, 20):
        wanted = config.lr * (1 + (growth - 1) * fade_share(step, 20, FADES))
        assert learning_rate(config, step) == pytest.approx(wanted)
    assert fade_share(8, 20, FADES) == 0 != fade_share(9, 20, FADES)
    assert fade_share(18, 20, FADES) == 1
    for given, step in (({"fade_from": 0.0}, 5), ({"fade_from": 0.2, "fade_to": 0.4}, 6)):
        early = dataclasses.replace(config, **given)
        assert learning_rate(early, step) == pytest.approx(config.lr * (1 + (growth - 1) / 2))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, FADES),
        ({"fade_from": 0.125}, (0.125, 0.625)),
        ({"fade_to": 0.625}, (0.125, 0.625)),
        ({"fade_to": 0.25}, (0.0, 0.25)),
        ({"fade_from": 0.5, "fade_to": 0.625}, (0.5, 0.625)),
    ],
)
def test_a_fade_takes_half_of_the_steps_unless_both_ends_are_given(given, wanted):
    assert new_config(**SMALL, **given).fades == wanted


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rules",
    [*({"rule": rule} for rule in FADING), {"rule": "moment", "mlp_rule": "nibble"}],
    ids=str,
)
def test_captured_steps_fade_with_the_bits_of_eager_steps(rules, text):
    found = []
    for capture in (False, True):
        config = new_config(**SMALL | rules | {"steps": 60, "device": "cuda"}, data=[text])
        texts = open_texts(config.data, None, seed=0, context=16)
        losses = []
        with deterministic():
            trainer = Trainer(config, texts, capture=capture)
            for _ in range(config.steps):
                losses.append(float(trainer.train_step()))
                if trainer.digits in FADED and len(losses) % 5 == 0:
                    list(generate(trainer.model, b"a", 2, Sampling(seed=0)))
        assert (trainer._graph is not None) == capture
        found.append((losses, {name: t.cpu() for name, t in trainer.model.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(part, found[1][1][name]) for name, part in found[0][1].items())
    assert EAGER_STEPS < 60 * FADING_SHARE / 4


class Graph:
    """Substitute of a CUDA graph on a CPU: a replay computes the step anew, to the same place."""

    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}
        self.replays, self.was_freed = 0, False

    def replay(self) -> None:
        assert not self.was_freed
        self.replays += 1
        for name, part in self.compute().items():
            self.parts[name].copy_(part)

    def reset(self) -> None:
        self.was_freed = True
        for part in self.parts.values():
            part.fill_(torch.nan)  # another's memory from now on


@pytest.fixture
def graphs(monkeypatch) -> list[Graph]:
    made = []

    @contextmanager
    def recording(graph: Graph, capture_error_mode: str) -> Iterator[None]:
        made.append(graph)
        graph.mode = capture_error_mode
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return made


def captured_on_a_cpu(trainer: Trainer, graphs: list[Graph]) -> Trainer:
    """Let a trainer capture its steps, without computing one while it does."""
    compute, parts = trainer._compute, {}

    def compute_or_record(batches, *told):
        if not graphs or graphs[-1].parts:
            parts.update(compute(batches, *told))
            return dict(parts)
        graphs[-1].compute = lambda: compute(trainer._micro_batches)
        graphs[-1].parts = {name: torch.full_like(part, torch.nan) for name, part in parts.items()}
        return graphs[-1].parts

    compute_or_record.dropout = None
    trainer._compute, trainer._capture_at = compute_or_record, training.EAGER_STEPS
    return trainer


def test_steps_are_captured_anew_at_every_stage(text, graphs, monkeypatch):
    """A few eager steps come first, and what is replayed is the step of the stage."""
    steps, start, eager_steps = 80, 3, 1
    monkeypatch.setattr(training, "EAGER_STEPS", eager_steps)
    config = new_config(**SMALL | {"steps": steps}, data=[text])
    texts = open_texts(config.data, None, seed=0, context=16)
    eager, captured = (Trainer(config, texts) for _ in range(2))
    captured_on_a_cpu(captured, graphs)
    stages, losses = [], ([], [])
    for step in range(steps):
        if step == start:
            saved = captured.checkpoint("text")
            tensors = {name: part.clone() for name, part in saved.tensors.items()}
        stages.append(captured.digits)
        before = stages.count(stages[-1]) - 1
        assert (captured._graph is not None) == (before > eager_steps), step
        for trainer, found in zip((eager, captured), losses, strict=True):
            found.append(trainer.train_step())
    assert losses[0] == losses[1]
    state = captured.model.state_dict()
    assert all(torch.equal(part, state[name]) for name, part in eager.model.state_dict().items())
    turns = [stages.count(stage) for stage in dict.fromkeys(stages)]
    assert [graph.replays for graph in graphs] == [turn - eager_steps for turn in turns]
    assert [graph.was_freed for graph in graphs] == [True] * (len(graphs) - 1) + [False]
    captured.restore(dataclasses.replace(saved, tensors=tensors))
    assert graphs[-1].was_freed
    assert captured.loss_parts["text"] == losses[0][-1]
    after = [captured.train_step() for _ in range(eager_steps + 2)]
    assert after == losses[0][start : start + len(after)]
    assert graphs[-1].replays == 2


@pytest.mark.parametrize(("size", "mode"), [(1, "global"), (2, "thread_local")])
def test_capture_leaves_room_for_tables_and_the_group_is_notified(size, mode, graphs, monkeypatch):
    rooms, remembered = [], []
    room = lambda *about: nullcontext(rooms.append(about))  # noqa: E731
    monkeypatch.setattr(training, "TABLES", SimpleNamespace(captured=room))
    trainer = SimpleNamespace(
        group=SimpleNamespace(size=size, remember=remembered.append),
        config=SimpleNamespace(backend=None),
        device="cpu",
        _table_numbers=7,
        _micro_batches="batches",
        _compute=lambda batches: {"text": batches},
    )
    Trainer._capture(trainer)
    assert remembered == graphs == [trainer._graph]
    assert (graphs[0].mode, rooms) == (mode, [(7, "cpu")])
    assert trainer._captured_parts == {"text": "batches"}
