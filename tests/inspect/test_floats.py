"""Every float tensor of a step is listed, where it was made, and whether it survives."""

import dataclasses
import math

import pytest
import torch

from arbcli.data import open_texts
from arbcli.inspect.audit import audit
from arbcli.inspect.floats import OUTSIDE, FloatTensor, FloatTensors
from arbcli.kernels.runtime.backend import use_backend
from arbcli.model.layers.rotary import fresh_tables
from arbcli.train.configure import new_config
from arbcli.train.trainer import Trainer

SHAPE = {"dim": 32, "layers": 2, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2}
CONFIG = {"device": "cpu", "backend": "torch", "compute": "fp32", "steps": 2} | SHAPE
MATRICES = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.output")


@pytest.fixture
def trainer(text, request) -> Trainer:
    config = new_config(**CONFIG | getattr(request, "param", {}), data=[text])
    return Trainer(config, open_texts(config.data, None, seed=0, context=16))


def floats_of(trainer: Trainer) -> list[FloatTensor]:
    watch = FloatTensors(trainer.device, trainer.model)
    with fresh_tables(), use_backend("torch"), watch.watching():
        trainer.train_step(watch.reached)
        return [*watch.report()]


def test_rotary_tables_and_the_loss_alone_survive(trainer):
    kept = [each for each in floats_of(trainer) if each.survives]
    told = {(each.module, each.made_in): each.bytes * each.count for each in kept}
    tables = 2 * 16 * 8 * 4  # cosines and sines of half a head's width of angles, float32
    assert told == {
        ("blocks.0.attention", "model.layers.rotary.rows"): tables,
        (OUTSIDE, "train.step.__call__"): 4,
    }


@pytest.mark.parametrize(("trainer", "micro"), [({}, 1), ({"accum": 3}, 3)], indirect=["trainer"])
def test_each_matrix_has_one_gradient_which_dies(trainer, micro):
    """In every micro-batch, and under the name of its own layer."""
    found = floats_of(trainer)
    made = {
        each.module: (each.stage, each.survives, each.count)
        for each in found
        if each.made_in == "model.layers.linear.gradient"
    }
    names = [f"blocks.{block}.{name}" for block in range(2) for name in MATRICES]
    assert made == dict.fromkeys([*names, "head"], ("backward", False, micro))
    products = [each for each in found if each.module == "blocks.1.mlp.output"]
    assert {each.stage for each in products} == {"forward", "backward"}
    widths = {each.shape[-1] for each in products if each.stage == "forward"}
    assert widths == {32, 48}  # the product, and the decoded weight


@pytest.mark.parametrize("trainer", [{"rule": "votes", "batch": 5}], indirect=True)
def test_rule_of_signs_forms_no_float_gradient(trainer):
    """What decodes trits is there, and nothing else of the shape of a weight of the blocks."""
    layers = [f"blocks.{block}.{name}" for block in range(2) for name in MATRICES]
    weights = {name: trainer.model.get_submodule(name).weight for name in layers}
    trits = {name: weight.trits.clone() for name, weight in weights.items()}
    found = floats_of(trainer)
    for _ in range(2):
        trainer.train_step()
    assert all(not torch.equal(trits[name], weight.trits) for name, weight in weights.items())
    shapes = {(weight.out_features, weight.in_features) for weight in weights.values()}
    shaped = {each.made_in for each in found if each.shape[-2:] in shapes}
    assert shaped == {"kernels.codec.packing.unpack_trits_torch"}
    made = {each.made_in for each in found}
    assert "kernels.update.sign_gradient._sign_gradient_torch" in made
    assert "model.layers.linear.gradient" not in made


def test_float_that_a_layer_keeps_is_named(trainer):
    layer = trainer.model.blocks[1].mlp
    layer.register_forward_hook(lambda *_: layer.__dict__.update(kept=torch.ones(7).double()))
    found = [each for each in floats_of(trainer) if each.shape == (7,)]
    told = [(each.module, each.stage, each.dtype, each.bytes, each.survives) for each in found]
    assert told == [
        ("blocks.1.mlp", "forward", "float32", 28, False),
        ("blocks.1.mlp", "forward", "float64", 56, True),
    ]


@pytest.mark.slow
def test_list_changes_neither_checks_nor_levels(text):
    plain, listed = (audit(new_config(**CONFIG, data=[text]), floats=each) for each in (0, 1))
    assert plain.floats is None
    assert len(listed.floats) > 50
    assert plain.checks == listed.checks
    assert plain.peak_bytes == listed.peak_bytes
    levels = ([level.live_bytes for level in each.levels] for each in (plain, listed))
    assert next(levels) == next(levels)
    assert listed.passed


VOCABULARY, CHUNK = 5003, 2560
"""Symbols, and of how many a chunk is: two of them."""


@pytest.mark.parametrize(("tied", "rule"), [(False, "moment"), (True, "carry"), (False, "nibble")])
def test_neither_logits_nor_gradient_of_many_symbols_ever_exist(text, rule, tied):
    config = new_config(**CONFIG, rule=rule, data=[text], accum=2)
    model = dataclasses.replace(config.model, vocabulary=VOCABULARY, tied=tied)
    config = dataclasses.replace(config, model=model, batch=8)  # 128 positions
    found = floats_of(Trainer(config, open_texts(config.data, None, seed=0, context=16)))
    sizes = {each.shape: math.prod(each.shape) for each in found}
    assert max(sizes.values()) == 128 * CHUNK, max(sizes, key=sizes.get)
    wide = {shape for shape in sizes if VOCABULARY in shape or -(-VOCABULARY // 2) in shape}
    assert all(math.prod(shape) < 32 * VOCABULARY for shape in wide)
    gradients = [size for shape, size in sizes.items() if shape[-2:] == (CHUNK, 32)]
    assert gradients
