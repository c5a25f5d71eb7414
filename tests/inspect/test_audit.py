"""Live tensors and floats are counted and named, and the predicted peak is what is measured."""

import dataclasses
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from marks import mostly_slow
from torch.nn import functional

from arbcli.base.errors import ArbError
from arbcli.data.opening import open_texts
from arbcli.inspect import audit as audit_module
from arbcli.inspect.audit import _check_prediction, audit, check_fit, check_levels
from arbcli.inspect.floats import FloatTensor, FloatTensors
from arbcli.inspect.room import least_bytes
from arbcli.inspect.trace import LiveTensors, no_memory
from arbcli.kernels.runtime.backend import default_backend, use_backend
from arbcli.model.layers.rotary import fresh_tables
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer

TINY = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16, "batch": 2, "device": "cpu"}
CPU = torch.device("cpu")


def config_of(**changes):
    return new_config(**TINY | {"steps": 2, "compute": "bf16"} | changes)


def test_storage_that_no_operation_returned_is_found():
    with LiveTensors(CPU) as tensors:
        held = torch.frombuffer(bytearray(1000), dtype=torch.uint8)
        tensors.find()
        assert tensors.bytes == held.nbytes


@pytest.mark.parametrize(
    ("tied", "rule"), mostly_slow([(False, "moment"), (True, "nibble")], lambda tied, _: tied)
)
def test_audit_of_many_symbols_measures_the_predicted_peak(tied, rule):
    config = config_of(rule=rule, compute="fp32", batch=4, steps=2)
    model = dataclasses.replace(config.model, vocabulary=9001, tied=tied)
    config = dataclasses.replace(config, model=model)
    report = audit(config)
    assert report.passed
    assert report.peak_error == 0
    kept = 4 * (4 * 16 * 9001)  # logits, float32
    assert least_bytes(config) <= report.predicted_peak.peak_bytes <= 4 * least_bytes(config) + kept


def test_audit_measures_every_stage():
    config = config_of(accum=2)
    report = audit(config)
    trainer = Trainer(config, open_texts(config.data, config.val, seed=0, context=16))
    losses = [level.loss for level in report.levels if level.stage == "end"]
    assert losses == [float(trainer.train_step()) for _ in losses]
    stages = [(level.step, level.stage) for level in report.levels]
    step = ["forward", "backward"] * 2 + ["end"]
    assert stages == [(0, "load"), *((number, stage) for number in (1, 2) for stage in step)]
    assert all(level.peak_bytes >= level.live_bytes for level in report.levels)
    assert report.peak_bytes == max(level.peak_bytes for level in report.levels[1:])
    assert report.levels[-1].peak_bytes < report.peak_bytes  # of the end of a step, and no more
    assert (report.backend, report.compute) == (default_backend(CPU), "bf16")
    assert (report.device, report.batch, report.accum, report.steps) == ("cpu", 2, 2, 2)


def test_audit_without_memory_names_the_predicted_peak(monkeypatch):
    monkeypatch.setattr(audit_module, "_watched_step", mock.Mock(side_effect=MemoryError()))
    peak = SimpleNamespace(peak_bytes=12_345)
    monkeypatch.setattr(audit_module, "predict_peak", lambda *_, **__: peak)
    peaks = []
    with pytest.raises(ArbError, match="memory is not enough") as told:
        audit(config_of(), predicted=peaks.append)
    assert peaks == [peak]
    assert told.value.hint.startswith("a step needs 12,345 bytes: use a smaller")


@pytest.mark.parametrize(("fixed", "window", "shares", "changes", "budget", "advice", "tries"), [
    (100, 50, (0.5, 1), {"batch": 16}, 700, "with --recompute, or with --batch 8 --accum 2", 3),
    (100, 50, (0.5, 1), {"batch": 16}, 140, "it fits with --batch 1 --accum 16 --recompute", 3),
    (100, 50, (0.0, 1), {"batch": 16}, 149, "it fits with --recompute", 2),
    (100, 50, (1.0, 1), {"batch": 16}, 149, "no batch fits", 2),
    (200, 50, (0.5, 1), {"batch": 16}, 150, "no batch fits", 1),
    (10, 45, (1, 8 / 9), {}, 90, "it fits with --pack", 2),
    (10, 45, (1, 8 / 9), {}, 89, "it fits with --batch 1 --accum 2", 4),
    (10, 45, (1, 8 / 9), {"compute": "fp32"}, 90, "it fits with --batch 1 --accum 2", 3),
    (10, 45, (1, 8 / 9), {"recompute": True}, 90, "it fits with --batch 1 --accum 2", 2),
    (10, 45, (1, 8 / 9), {"pack": True, "batch": 3}, 90, "it fits with --batch 1 --accum 3", 3),
    (10, 100, (0.5, 1), {"pack": True}, 100,
     "it fits with --batch 1 --accum 2 --recompute instead of --pack", 3),
    (10, 100, (0.5, 1), {"pack": True}, 110,
     "it fits with --recompute instead of --pack, or with --batch 1 --accum 2", 3),
])  # fmt: skip
def test_refusal_of_a_small_budget_names_settings_that_fit(
    fixed, window, shares, changes, budget, advice, tries, monkeypatch
):
    """Activations are a share of those of a window where they are recomputed or packed."""
    tried = []

    def predict(config, captured, progress):
        tried.append(config)
        share = (shares[0] if config.recompute else 1) * (shares[1] if config.pack else 1)
        size = round(fixed + window * share * config.batch)
        return SimpleNamespace(state_bytes=fixed, evaluated_bytes=size)

    monkeypatch.setattr(audit_module, "predict_peak", predict)
    report = check_fit(config_of(**{"layers": 2, "batch": 2} | changes), budget)
    assert not report.fits
    assert advice in report.advice
    assert len(tried) == tries  # each traces a step


def test_peak_of_an_absent_gpu_is_predicted():
    config = audit_module.config_of_any_gpu(dim=32, layers=1, heads=2, ffn=48, ctx=16)
    assert (config.device, config.backend, config.compute) == ("cuda", "triton", "bf16")
    assert audit_module.config_of_any_gpu(dim=32, heads=2, compute="fp32").compute == "fp32"
    report = check_fit(config, 2**30)
    assert report.fits
    assert report.budget_bytes == 2**30
    assert report.predicted_peak.captured


@pytest.mark.parametrize("mask", [None, torch.ones(4, 4, dtype=torch.bool)])
def test_attention_on_a_gpu_is_traced_with_a_mask_or_none(mask):
    with no_memory(torch.device("cuda")):
        q = torch.empty(1, 2, 4, 12, dtype=torch.bfloat16, device="cuda")
        mask = None if mask is None else mask.to("cuda")
        y = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=mask is None)
    assert y.is_meta
    assert y.shape == q.shape


@pytest.mark.parametrize(
    ("ends", "passed"), [([7, 7, 7], True), ([7, 8, 7], False), ([7, 7, 8], False)]
)
def test_every_step_returns_to_the_level_of_the_first(ends, passed):
    check = check_levels(ends)
    assert check.passed == passed
    every = f"after the steps: {', '.join(map(str, ends))} bytes"
    assert check.detail == ("7 bytes after every step" if passed else every)


@pytest.mark.parametrize(
    ("state", "loaded", "passed"),
    [
        (1000, 1000, True), (1010, 1010, True), (990, 990, True), (1000, 1010, True),
        (1011, 1000, False), (989, 1000, False), (1000, 1011, False), (1000, 989, False),
    ],
)  # fmt: skip
def test_state_is_as_predicted_in_the_model_and_in_all_that_loading_left(state, loaded, passed):
    """Tensors outside of the model count as much as those on it."""
    check = _check_prediction(1000, SimpleNamespace(state_bytes=state), loaded)
    assert check.passed == passed
    hidden = f", {loaded - state} outside it"
    assert (hidden in check.detail) == (loaded > state)


def test_room_for_a_trace_is_that_of_all_batches_of_a_step(monkeypatch):
    asked = []
    monkeypatch.setattr(audit_module, "check_room", lambda *about: asked.append(about))
    monkeypatch.setattr(audit_module, "predict_peak", mock.Mock(side_effect=ArbError("enough")))
    config = new_config(dim=32, heads=2, ctx=16, batch=4, accum=3, device="cpu")
    with pytest.raises(ArbError, match="enough"):
        check_fit(config, 10**9)
    ((needed, what, hint),) = asked
    assert (needed, what) == (4 * 3 * 16 * 16, "to trace such a step")
    assert "`--batch`" in hint


CONFIG = TINY | {"layers": 2, "backend": "torch", "compute": "fp32", "steps": 2}
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


@pytest.mark.parametrize("trainer", [{"accum": 3}], indirect=True)
def test_each_matrix_has_one_gradient_which_dies(trainer):
    """In every micro-batch, and under the name of its own layer."""
    floats = floats_of(trainer)
    sizes = {
        tensor.module: (tensor.stage, tensor.survives, tensor.count)
        for tensor in floats
        if tensor.made_in == "model.layers.products.gradient"
    }
    names = [f"blocks.{block}.{name}" for block in range(2) for name in MATRICES]
    assert sizes == dict.fromkeys([*names, "head"], ("backward", False, 3))
    products = [tensor for tensor in floats if tensor.module == "blocks.1.mlp.output"]
    assert {tensor.stage for tensor in products} == {"forward", "backward"}
    widths = {tensor.shape[-1] for tensor in products if tensor.stage == "forward"}
    assert widths == {32, 48}  # the product, and the decoded weight


@pytest.mark.parametrize("trainer", [{"rule": "votes", "batch": 5}], indirect=True)
def test_rule_of_signs_forms_no_float_gradient(trainer):
    """Decoding allocates one weight, and nothing else has the shape of a weight of the blocks."""
    layers = [f"blocks.{block}.{name}" for block in range(2) for name in MATRICES]
    weights = {name: trainer.model.get_submodule(name).weight for name in layers}
    trits = {name: weight.trits.clone() for name, weight in weights.items()}
    floats = floats_of(trainer)
    for _ in range(2):
        trainer.train_step()
    assert all(not torch.equal(trits[name], weight.trits) for name, weight in weights.items())
    shapes = {(weight.out_features, weight.in_features) for weight in weights.values()}
    shaped = {tensor.made_in for tensor in floats if tensor.shape[-2:] in shapes}
    assert shaped == {"kernels.codec.packing.unpack_trits_torch"}
    functions = {tensor.made_in for tensor in floats}
    assert "kernels.update.sign_gradient._sign_gradient_torch" in functions
    assert "model.layers.products.gradient" not in functions


VOCABULARY, CHUNK = 5003, 2560
"""Symbols, and of how many a chunk is: two of them."""


@pytest.mark.parametrize(("tied", "rule"), [(False, "moment"), (True, "carry")])
def test_no_tensor_has_the_logits_or_the_gradient_of_all_symbols(text, rule, tied):
    config = new_config(**CONFIG, rule=rule, data=[text], accum=2)
    model = dataclasses.replace(config.model, vocabulary=VOCABULARY, tied=tied)
    config = dataclasses.replace(config, model=model, batch=8)  # 128 positions
    floats = floats_of(Trainer(config, open_texts(config.data, None, seed=0, context=16)))
    sizes = {tensor.shape: math.prod(tensor.shape) for tensor in floats}
    assert max(sizes.values()) == 128 * CHUNK, max(sizes, key=sizes.get)
    wide = {shape for shape in sizes if VOCABULARY in shape or -(-VOCABULARY // 2) in shape}
    assert all(math.prod(shape) < 32 * VOCABULARY for shape in wide)
    gradients = [size for shape, size in sizes.items() if shape[-2:] == (CHUNK, 32)]
    assert gradients
