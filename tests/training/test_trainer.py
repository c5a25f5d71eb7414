"""A step captured as a CUDA graph, and what eight bits can do."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from arbcli.base.errors import ArbError
from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.build import build_model
from arbcli.model.rules import RULES
from arbcli.training import step_inputs
from arbcli.training.configure import new_config
from arbcli.training.step import minimised
from arbcli.training.step_inputs import StepInputs
from arbcli.training.trainer import EAGER_STEPS, Trainer


def after_steps(text, small_graph, number=2, **options) -> dict[str, torch.Tensor]:
    """Train a model of iterated experts, and copy its state."""
    shape = small_graph | {"moe": True, "graph": True}
    config = new_config(**shape, device="cpu", compute="fp32", data=[text], **options)
    texts = open_texts(config.data, None, seed=0, context=config.model.ctx)
    trainer = Trainer(config, texts)
    for _ in range(options.get("steps", number)):
        trainer.train_step()
    return {name: part.clone() for name, part in trainer.model.state_dict().items()}


def test_scales_of_an_area_move_by_the_losses_that_are_named(text, small_graph):
    about = {"steps": 1, "lr": 16.0, "warmup": 0}
    plain = after_steps(text, small_graph, **about)
    routed = after_steps(text, small_graph, **about, scale_losses=["moe_graph=ponder"])
    differ = {name for name in plain if not torch.equal(plain[name], routed[name])}
    assert differ
    assert all(name.startswith("moe_graph.") for name in differ)
    assert {name.rpartition(".")[2] for name in differ} <= {"exponent", "fraction"}
    assert "moe_graph.inward.weight.fraction" in differ


@pytest.mark.parametrize(
    ("losses", "rule"), [("ponder+text+ponder", "moment"), ("text+ponder", "votes")]
)
def test_scales_that_all_losses_move_take_the_steps_of_before(losses, rule, text, small_graph):
    routes = [f"moe_graph={losses}", f"codebook={losses}", f"mlp={losses}"]
    plain = after_steps(text, small_graph, rule=rule)
    routed = after_steps(text, small_graph, rule=rule, scale_losses=routes)
    assert all(torch.equal(plain[name], routed[name]) for name in plain)


def test_scales_that_no_loss_reaches_stay(text, small_graph):
    none = after_steps(text, small_graph, 0)
    routed = after_steps(text, small_graph, scale_losses=["head=ponder"])
    for name in ("exponent", "fraction"):
        assert torch.equal(none[f"head.weight.{name}"], routed[f"head.weight.{name}"])
    assert not torch.equal(none["head.weight.trits"], routed["head.weight.trits"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_losses": ["mlp"]}, "`scale_losses` has `mlp`"),
        ({"scale_losses": ["mlp=words"]}, "`scale_losses` is `words`"),
        ({"scale_losses": ["wings=text"]}, "`scale_losses` names `wings`"),
    ],
)
def test_scale_losses_that_cannot_be_are_refused(options, message, text):
    texts = open_texts([text], None, seed=0, context=8)
    shape = {"preset": "tiny", "dim": 32, "heads": 2, "ctx": 8}
    with pytest.raises(ArbError, match=message):
        Trainer(new_config(**shape, data=[text], **options), texts)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("accum", [1, 3])
def test_windows_of_every_step_are_copied_to_the_same_memory_of_a_gpu(
    accum, parts, text, monkeypatch
):
    """A graph reads them from there; texts of documents have a third tensor."""
    config = new_config(preset="tiny", dim=32, heads=2, ctx=8, batch=2, accum=accum, device="cpu")
    trainer = Trainer(config, open_texts([text], None, seed=0, context=8))
    gpu = torch.device("cuda")
    trainer._step_inputs = StepInputs(config, gpu, None)
    trainer.fetch = lambda micro, device: tuple(
        torch.full((2, 8), 100 * trainer.step + 10 * micro + part) for part in range(parts)
    )
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda self, place: self.clone() if place == gpu else to(self, place),
    )
    places = []
    for trainer.step in range(2):
        trainer._load_batches()
        batches = trainer._micro_batches
        assert [len(each) for each in batches] == [parts] * accum
        for micro, each in enumerate(batches):
            for wanted, got in zip(trainer.fetch(micro, "cpu"), each, strict=True):
                assert torch.equal(wanted, got)
                assert got.is_contiguous()
        places.append([[part.data_ptr() for part in each] for each in batches])
    assert places[0] == places[1]


def test_inputs_of_a_step_stay_until_a_late_copy_has_run(text):
    """Also where a run ends or goes back, and a GPU has not begun the first step."""
    shape = {"dim": 32, "heads": 2, "ctx": 8, "batch": 2, "accum": 2, "steps": 45, "warmup": 5}
    config = new_config(preset="tiny", device="cpu", data=[text], **shape)
    trainer, late = Trainer(config, open_texts([text], None, seed=0, context=8)), []
    trainer._step_inputs = StepInputs(config, trainer.device, trainer.updater)
    trainer._load_batches()
    copy = lambda inputs, non_blocking: late.append(inputs)  # noqa: E731
    trainer._step_inputs._on_device = SimpleNamespace(copy_=copy)
    steps = [*range(1, 20), 7, 7, 8, *range(9, 47), 3]
    for trainer.step in steps:
        trainer._load_batches()
    for trainer.step, inputs in zip(steps, late, strict=True):
        windows = [part for micro in range(2) for part in trainer.fetch(micro, "cpu")]
        trainer.updater.set_step(trainer.step, trainer.lr, 2)
        parts = [*windows, trainer.updater._parameters]
        assert torch.equal(inputs, torch.cat([part.flatten() for part in parts]))


@pytest.mark.parametrize(
    ("steps", "room", "ahead"),
    [(1, 2**20, 1), (3, 2**20, 3), (40, 2**20, 32), (40, 767, 2), (40, 1, 1)],
)
def test_inputs_are_pinned_for_steps_of_the_run_whose_windows_fit(
    steps, room, ahead, text, monkeypatch
):
    """This rate would overflow after the last step, and windows of a step have 256 bytes."""
    monkeypatch.setattr(step_inputs, "PINNED_BYTES", room)
    shape = {"dim": 32, "heads": 2, "ctx": 8, "batch": 2, "steps": steps, "lr": 64.0}
    config = new_config(preset="tiny", device="cpu", data=[text], schedule="wsd", **shape)
    trainer = Trainer(config, open_texts([text], None, seed=0, context=8))
    trainer._step_inputs = StepInputs(config, trainer.device, trainer.updater)
    for trainer.step in range(steps):
        trainer._load_batches()
        last = min(steps, trainer.step // ahead * ahead + ahead)
        assert [*trainer._step_inputs._pinned] == [*range(trainer.step + 1, last)]


def small_config(folder, rule, compute="bf16"):
    path = folder / "text.txt"
    path.write_bytes(b"ternary weights learn to read. " * 400)
    shape = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 32, "batch": 8, "accum": 2}
    return new_config(data=[str(path)], rule=rule, device="cuda", compute=compute, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "compute"), [*((rule, "bf16") for rule in RULES), ("moment", "fp8")]
)
def test_captured_steps_give_the_bits_of_eager_steps(rule, compute, tmp_path):
    config = small_config(tmp_path, rule, compute)
    texts = open_texts(config.data, None, seed=0, context=32)
    states, losses = [], []
    with deterministic():
        for capture in (False, True):
            trainer = Trainer(config, texts, capture=capture)
            losses.append([float(trainer.train_step()) for _ in range(EAGER_STEPS + 6)])
            states.append({name: t.clone() for name, t in trainer.model.state_dict().items()})
            assert (trainer._graph is not None) == capture
    assert losses[0] == losses[1]
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_step_never_waits_for_the_gpu(rule, tmp_path):
    config = small_config(tmp_path, rule)
    with deterministic():
        texts = open_texts(config.data, None, seed=0, context=32)
        trainer = Trainer(config, texts, capture=True)
        trainer.train_step()  # copies its first batch to a new buffer, and compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(EAGER_STEPS + 3):
                trainer.train_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert trainer._graph is not None


def hnet_config(folder, **options):
    path = folder / "text.txt"
    path.write_bytes(b"chunks of ternary weights learn to read. " * 400)
    shape = {
        "preset": "hnet-tiny", "dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 64, "batch": 4,
        "outer_dim": (64, 64), "outer_layers": (1, 1), "outer_heads": (2, 2), "outer_ffn": (96, 96),
        "chunk_length": (3, 2), "window": 16, "accum": 2,
    }  # fmt: skip
    return new_config(data=[str(path)], device="cuda", steps=20, **shape | options)


HNETS = [
    {}, {"boundaries": "every"}, {"recompute": True}, {"compute": "fp8"},
    {"outer_blocks": "mamba", "states": 16}, {"outer_blocks": "mamba", "digits": "all"},
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("options", HNETS, ids=str)
def test_captured_steps_of_chunks_give_the_bits_of_eager_steps_and_never_wait(options, tmp_path):
    config = hnet_config(tmp_path, **options)
    texts = open_texts(config.data, None, seed=0, context=64)
    states, losses, gauges = [], [], []
    with deterministic():
        for capture in (False, True):
            trainer = Trainer(config, texts, capture=capture)
            of_steps = [trainer.train_step()]
            torch.cuda.set_sync_debug_mode("error")
            try:
                of_steps += [trainer.train_step() for _ in range(EAGER_STEPS + 6)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert (trainer._graph is not None) == capture
            losses.append([float(loss) for loss in of_steps])
            states.append({name: t.clone() for name, t in trainer.model.state_dict().items()})
            gauges.append(trainer.model.gauges())
    assert losses[0] == losses[1]
    assert gauges[0] == gauges[1]


def test_forward_without_a_backward_does_not_hold_the_next_step_back(tmp_path):
    """As where an error came between them; else no weight would step again, for ever."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"ternary weights learn to read. " * 40)
    shape = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2}
    config = new_config(data=[str(path)], device="cpu", compute="fp32", **shape)
    states = []
    for forwards in (0, 1):
        trainer = Trainer(config, open_texts(config.data, None, seed=0, context=16))
        for _ in range(forwards):
            trainer.model.loss(*trainer.fetch(0, "cpu"))
        trainer.train_step()
        states.append(trainer.model.state_dict())
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


@pytest.mark.parametrize(
    ("compute", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16),
     ("nvfp4", torch.bfloat16)],
)  # fmt: skip
@pytest.mark.parametrize("kept", ["recompute", "pack", ""])
def test_model_of_a_run_computes_as_its_settings_say(compute, dtype, kept, monkeypatch):
    how = {name: kept == name and compute != "fp32" for name in ("recompute", "pack")}
    config = new_config(device="cpu", compute=compute, **how)
    built = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr("arbcli.training.trainer.build_model", built)
    with pytest.raises(InterruptedError):
        Trainer(config, None)
    low = {name: compute == name for name in ("fp8", "nvfp4")}
    assert built.call_args == mock.call(config.model, dtype, **how, **low)


def test_matrices_of_other_sizes_and_the_head_are_multiplied_in_bf16(small_graph):
    config = new_config(device="cpu", compute="fp8", **small_graph | {"knowledge": (20, 32)})
    weights = build_model(config.model, fp8=True).weights()
    assert weights["blocks.0.mlp.gate_up.weight"].fp8
    assert not weights["knowledge.left.weight"].fp8
    assert not weights["head.weight"].fp8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": "float"}, "the products of a float baseline are in bf16"),
        ({"dim": 36, "heads": 2}, "sizes are multiples of 16, and this model has none"),
    ],
)
def test_limits_of_eight_bits_are_explained(given, message):
    with pytest.raises(ArbError, match=message) as caught:
        build_model(new_config(device="cpu", compute="fp8", **given).model, fp8=True)
    assert caught.value.hint


def test_other_parts_of_a_loss_count_by_their_weights():
    parts = {"text": torch.tensor(2.0), "ponder": torch.tensor(3.0)}
    weights = {"ponder": 0.01, "ratio": 0.3}
    assert float(minimised(parts, weights)) == pytest.approx(2.03)
    assert float(minimised({"text": parts["text"]}, weights)) == 2


@pytest.mark.parametrize("weights", ["ternary", "ste"])
def test_first_weights_are_those_of_the_seed(weights, tmp_path):
    shape = {"dim": 16, "layers": 1, "heads": 2, "ffn": 16, "ctx": 8, "weights": weights}
    path = tmp_path / "text.txt"
    path.write_bytes(b"seeds of weights " * 30)
    texts = open_texts((str(path),), (), seed=0, context=8)
    for seed in (0, 5):
        config = new_config(**shape, batch=1, steps=9, seed=seed, device="cpu", compute="fp32")
        model = build_model(config.model)
        model.initialise(seed)
        begun = Trainer(config, texts).model.state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(begun[name], tensor), name
