"""A step captured as a CUDA graph, and what eight bits can do."""

from types import SimpleNamespace

import pytest
import torch
from states import assert_same, state_of

from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import EAGER_STEPS, deterministic
from arbcli.model.rules import RULES
from arbcli.training.configure import new_config
from arbcli.training.step_inputs import StepInputs
from arbcli.training.trainer import Trainer


def after_steps(text, small_graph, number=2, **options) -> dict[str, torch.Tensor]:
    """Train a model of iterated experts, and copy its state."""
    shape = small_graph | {"moe": True, "graph": True}
    config = new_config(**shape, device="cpu", compute="fp32", data=[text], **options)
    texts = open_texts(config.data, None, seed=0, context=config.model.ctx)
    trainer = Trainer(config, texts)
    for _ in range(options.get("steps", number)):
        trainer.train_step()
    return state_of(trainer.model)


def test_scales_of_an_area_move_by_the_losses_that_are_named(text, small_graph):
    about = {"steps": 1, "lr": 16.0, "warmup": 0}
    plain = after_steps(text, small_graph, **about)
    routed = after_steps(text, small_graph, **about, scale_losses=["moe_graph=ponder"])
    differ = {name for name in plain if not torch.equal(plain[name], routed[name])}
    assert differ
    assert all(name.startswith("moe_graph.") for name in differ)
    assert {name.rpartition(".")[2] for name in differ} <= {"exponent", "fraction"}
    assert "moe_graph.inward.weight.fraction" in differ


AREAS = ("moe_graph", "codebook", "mlp", "sequencer")
"""Of stacks, matrices and tables."""


def test_scales_that_all_losses_move_take_the_steps_of_before(text, small_graph):
    routes = [f"{area}=ponder+text+ponder" for area in AREAS]
    plain = after_steps(text, small_graph)
    assert_same(plain, after_steps(text, small_graph, scale_losses=routes))


def test_inputs_of_a_step_stay_until_a_late_copy_has_run(text):
    """Also where a run ends or goes back, and a GPU has not begun the first step."""
    shape = {"dim": 32, "heads": 2, "ctx": 8, "batch": 2, "accum": 2, "steps": 45, "warmup": 5}
    config = new_config(preset="tiny", device="cpu", data=[text], **shape)
    trainer, late = Trainer(config, open_texts([text], None, seed=0, context=8)), []
    trainer._step_inputs = StepInputs(config, trainer.device, trainer.updater)
    trainer._load_batches()
    copy = lambda inputs, non_blocking: late.append(inputs)  # noqa: E731
    trainer._step_inputs._device_inputs = SimpleNamespace(copy_=copy)
    steps = [*range(1, 20), 7, 7, 8, *range(9, 47), 3]
    for trainer.step in steps:
        trainer._load_batches()
    for trainer.step, inputs in zip(steps, late, strict=True):
        windows = [part for micro in range(2) for part in trainer.fetch(micro, "cpu")]
        trainer.updater.set_step(trainer.step, trainer.lr, 2)
        parts = [*windows, trainer.updater._parameters]
        assert torch.equal(inputs, torch.cat([part.flatten() for part in parts]))


def small_config(text, rule, compute="bf16"):
    shape = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 32, "batch": 8, "accum": 2}
    return new_config(data=[text], rule=rule, device="cuda", compute=compute, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "compute"),
    [*((rule, "bf16") for rule in RULES), ("moment", "fp8"), ("moment", "fp8-backward")],
)
def test_captured_steps_give_the_bits_of_eager_steps(rule, compute, text):
    config = small_config(text, rule, compute)
    texts = open_texts(config.data, None, seed=0, context=32)
    states, losses = [], []
    with deterministic():
        for capture in (False, True):
            trainer = Trainer(config, texts, capture=capture)
            losses.append([float(trainer.train_step()) for _ in range(EAGER_STEPS + 6)])
            states.append(state_of(trainer.model))
            assert (trainer._graph is not None) == capture
    assert losses[0] == losses[1]
    assert_same(*states)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_step_never_waits_for_the_gpu(rule, text):
    config = small_config(text, rule)
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


def hnet_config(text, **options):
    shape = {
        "preset": "hnet-tiny", "dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 64, "batch": 4,
        "outer_dim": (64, 64), "outer_layers": (1, 1), "outer_heads": (2, 2), "outer_ffn": (96, 96),
        "chunk_length": (3, 2), "window": 16, "accum": 2,
    }  # fmt: skip
    return new_config(data=[text], device="cuda", steps=20, **shape | options)


HNETS = [
    {}, {"boundaries": "every"}, {"recompute": True}, {"compute": "fp8"},
    {"outer_blocks": "mamba", "states": 16}, {"outer_blocks": "mamba", "digits": "all"},
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("options", HNETS, ids=str)
def test_captured_steps_of_chunks_give_the_bits_of_eager_steps_and_never_wait(options, text):
    config = hnet_config(text, **options)
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
            states.append(state_of(trainer.model))
            gauges.append(trainer.model.gauges())
    assert losses[0] == losses[1]
    assert gauges[0] == gauges[1]


def test_forward_without_a_backward_does_not_hold_the_next_step_back(text):
    """As where an error came between them; else no weight would step again, for ever."""
    shape = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2}
    config = new_config(data=[text], device="cpu", compute="fp32", **shape)
    states = []
    for forwards in (0, 1):
        trainer = Trainer(config, open_texts(config.data, None, seed=0, context=16))
        for _ in range(forwards):
            trainer.model.loss(*trainer.fetch(0, "cpu"))
        trainer.train_step()
        states.append(trainer.model.state_dict())
    assert_same(*states)
