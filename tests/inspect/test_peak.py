"""A step that is run without memory takes what a real one takes: to the byte on a CPU."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
import torch
from cells import Cell
from marks import mostly_slow
from operations import NotedOperations
from processes import run_processes

from arbcli.config.presets import preset
from arbcli.config.training import TrainConfig, train_config
from arbcli.data.opening import open_texts
from arbcli.families.media.config import CompositeConfig
from arbcli.inspect import peak
from arbcli.inspect.peak import predict_peak
from arbcli.inspect.ranks import share_out
from arbcli.inspect.trace import MARK, LiveTensors, no_compiler, no_memory
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.layers.rotary import fresh_tables
from arbcli.model.optimizers.orthogonal import orthogonalise
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer

DENSE = {"dim": 48, "layers": 2, "heads": 2, "ffn": 130, "ctx": 33, "batch": 3, "compute": "bf16"}
CPU = torch.device("cpu")


PARTS = ("saved", "transient", "constant")


def measured_peak(config):
    """Do two real steps, and count the bytes of all tensors that were alive at once."""
    texts = open_texts((), (), seed=0, context=config.model.ctx)
    tensors = LiveTensors(CPU)
    with deterministic(), fresh_tables(), tensors:
        trainer = Trainer(config, texts)
        tensors.start_stage()
        for _ in range(2):
            trainer.train_step()
    return tensors.stage_peak


CHANGES = {
    "moment": {},
    "nibble": {"rule": "nibble"},
    "carry": {"rule": "carry", "scale_type": "T4"},
    "votes": {"rule": "votes"},
    "rules of parts": {"mlp_rule": "nibble", "attention_rule": "carry"},
    "recompute": {"recompute": True, "layers": 3},
    "accum": {"accum": 3, "layers": 1},
    "fp32": {"compute": "fp32", "sub_norms": False},
    "fp8": {"compute": "fp8", "dim": 64, "ffn": 96, "heads": 4},
    "fp8-backward": {"compute": "fp8-backward", "dim": 64, "ffn": 96, "heads": 4},
}

DENSE_ONLY = ("dim", "ffn", "heads", "sub_norms")


def config_of(changes, base=DENSE):
    return new_config(**{"device": "cpu", "steps": 2, "compute": "bf16"} | base | changes)


def shapes_received(group, sizes: list[int]) -> list[tuple]:
    """Return the shapes and dtypes that a process receives in a step."""
    sent = torch.zeros(sum(sizes), dtype=torch.uint8)
    rows = [torch.zeros(3, 2, dtype=torch.int32)] * 2
    got = [
        group.send_to_owners(sent, sizes).wait(), group.broadcast(sent, 1).wait(),
        *group.gather(rows), group.sum(rows[0]), group.largest(rows[0]),
    ]  # fmt: skip
    return [(tuple(part.shape), part.dtype) for part in got]


def test_imagined_process_gets_the_tensors_of_a_real_process():
    """Of as many others, and of the part that it owns."""
    sizes = [4, 6]
    real = run_processes(2, shapes_received, sizes)
    assert real == [shapes_received(peak._SimulatedGroup(rank, 2), sizes) for rank in range(2)]
    assert real[0][0] != real[1][0]
    arrived = peak._SimulatedGroup(2, 5).send_to_owners(torch.zeros(15), [1, 2, 3, 4, 5]).wait()
    assert arrived.shape == (5, 3)


SIZES = {
    "dense": {}, "small_graph": {"memgram": True, "ctx": 33, "layers": 2, "max_moe_iters": 2},
    "small_hnet": {}, "small_compressed": {},
}  # fmt: skip
OF_EIGHT_BITS = {"small_graph": {"expert_dim": 32}, "small_hnet": {"outer_dim": (32, 32)}}
"""Sizes that products in eight bits need, by the fixture of a model."""


@pytest.mark.parametrize(
    ("family", "name"),
    mostly_slow(
        product(SIZES, CHANGES),
        lambda family, name: (
            name
            in {"dense": ("accum", "fp8-backward"), "small_graph": ("recompute",)}.get(family, ())
        ),
    ),
)
def test_predicted_peak_equals_the_measured_peak(family, name, request):
    changes, base = CHANGES[name], DENSE
    if family != "dense":
        base = request.getfixturevalue(family)
        changes = {key: value for key, value in changes.items() if key not in DENSE_ONLY}
    sizes = SIZES[family] | (OF_EIGHT_BITS.get(family, {}) if "fp8" in name else {})
    config = config_of(changes | sizes, base)
    assert predict_peak(config).peak_bytes == measured_peak(config)


PLAIN = preset("tiny", dim=32, layers=1, heads=2, ffn=48, ctx=32)
OTHERS = {
    "composite": {"preset": dataclasses.replace(PLAIN, composite=CompositeConfig())},
    "fill": {"preset": dataclasses.replace(PLAIN, objective="fill")},
    "packed gates": DENSE | {"pack": True, "dim": 64, "ffn": 208},
    **{
        f"attention without kernels in {compute}": {
            "preset": Cell("grouped", "mlp", 1, "plain").model(),
            "compute": compute, "batch": 3, "recompute": compute == "fp32",
        }
        for compute in ("bf16", "fp32")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(OTHERS, lambda name: "without" not in name))
def test_predicted_peak_of_other_models_equals_the_measured_peak(name):
    config = config_of(OTHERS[name], {})
    assert predict_peak(config).peak_bytes == measured_peak(config)


def test_packed_gates_take_three_quarters_on_a_gpu():
    shape = {"layers": 2, "dim": 64, "ffn": 512, "ctx": 128}
    of_gpu = {"device": "cuda", "backend": "triton", "batch": 8}
    kept, packed = (
        predict_peak(TrainConfig(model=preset("tiny", **shape), pack=pack, **of_gpu))
        for pack in (False, True)
    )
    rows = 8 * 128
    assert kept.saved_bytes - packed.saved_bytes == rows * (512 - 2)  # not of the last block


def test_predicted_peak_of_a_stack_that_is_orthogonalised_again_equals_the_measured_peak():
    def orthogonalise_twice():
        for _ in range(2):
            orthogonalise(torch.zeros(2, 5, 3, device="cpu"), torch.float32)

    with use_backend("torch"):
        with LiveTensors(CPU) as tensors:
            orthogonalise_twice()
        with peak._Trace(CPU) as trace, no_memory(CPU):
            trace.end_stage()
            orthogonalise_twice()
    assert trace.peak == tensors.stage_peak > 0


def test_predicted_peak_is_the_sum_of_its_parts_and_leaves_no_trace():
    functions = (
        (torch.nn.functional, "scaled_dot_product_attention"), (torch.nn.functional, "rms_norm"),
        (torch.Tensor, "data_ptr"), (torch.Tensor, "is_cuda"), (torch.Tensor, "pin_memory"),
    )  # fmt: skip
    before = [getattr(*function) for function in functions]
    config = config_of({"layers": 3})
    report = predict_peak(config)
    parts = report.saved_bytes, report.transient_bytes, report.constant_bytes
    assert min(parts) > 0
    assert sum(parts) + report.state_bytes == report.peak_bytes == report.reserved_bytes
    of = {part: sum(item.bytes for item in report.live if item.part == part) for part in PARTS}
    assert tuple(of.values()) == parts
    sizes = [item.bytes for item in report.live]
    assert sizes == sorted(sizes, reverse=True)
    numbers = Counter()
    for item in report.live:
        numbers[item.tensor] += item.number
    width = 2 * config.model.main.blocks[0].channel.width
    assert numbers[f"bfloat16 {config.batch * config.model.ctx}x{width}"] == 3
    assert predict_peak(config) == report
    assert [getattr(*function) for function in functions] == before


def test_memory_of_an_evaluation_is_predicted_and_is_none_of_a_step(monkeypatch):
    def evaluate(trainer, num_batches):
        torch.empty(10**7, dtype=torch.int8, device=trainer.device)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    report = predict_peak(config_of({"layers": 1, "rule": "votes", "batch": 1}))
    assert report.evaluated_bytes >= 10**7 > report.reserved_bytes


MEASURE = """
import sys, json, torch
from arbcli.base.environment import set_environment
set_environment()
from arbcli.data.opening import open_texts
from arbcli.kernels.runtime.device import deterministic
from arbcli.inspect import peak
from arbcli.inspect.peak import predict_peak
from arbcli.inspect.ranks import share_out
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
given, captured = json.loads(sys.argv[1])
config = new_config(**given)
predicted = predict_peak(config, captured=captured)
assert torch.cuda.memory_reserved() == 0
with deterministic():
    trainer = Trainer(
        config, open_texts((), (), seed=0, context=config.model.ctx), capture=captured
    )
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        float(trainer.train_step())
measured = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
trainer.evaluate(2)
measured += torch.cuda.max_memory_reserved(),
expected = predicted.peak_bytes, predicted.reserved_bytes, predicted.evaluated_bytes
print(json.dumps([expected, measured]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_predicted_peak_equals_that_of_this_gpu(name, captured):
    """In a process of its own, whose allocator nobody has used."""
    given = {"preset": name, "batch": 16, "steps": 100}
    command = [sys.executable, "-c", MEASURE, json.dumps([given, captured])]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    for expected, measured in zip(*json.loads(result.stdout), strict=True):
        assert -0.01 <= expected / measured - 1 <= 0.03


@pytest.mark.parametrize(
    ("direction", "compute"),
    mostly_slow([("orthogonal", "fp32"), ("factored", "bf16")], lambda *how: how[1] == "bf16"),
)
def test_a_step_on_a_gpu_of_apple_makes_no_float64(direction, compute):
    """It has none; `meta` stands for it. Nothing else of it can be tested without one."""
    settings = {"device": "mps", "backend": "torch", "compute": compute, "batch": 2}
    shape = {"dim": 32, "layers": 1, "heads": 2, "ffn": 48, "ctx": 16}
    config = train_config("tiny", direction=direction, **shape, **settings)
    made = []
    with NotedOperations(lambda name, x: made.append((name, x.device.type, x.dtype))):
        report = predict_peak(config)
    assert report.device == "mps"
    assert report.peak_bytes > report.state_bytes > 0
    assert any(device == "meta" for _, device, _ in made)
    assert not [name for name, *about in made if about == ["meta", torch.float64]]


def test_process_of_several_is_predicted_to_hold_its_share():
    config = new_config(
        dim=32, layers=1, heads=2, ffn=48, ctx=16, batch=2, accum=2, reduce_dtype="int12",
        device="cpu", compute="fp32",
    )  # fmt: skip
    shares = share_out(config, 2)
    report = predict_peak(config, rank=1, size=2)
    # the difference is of keys and counters
    assert report.state_bytes == pytest.approx(shares[1].state_bytes, abs=2000)
    assert abs(shares[0].state_bytes - shares[1].state_bytes) > 4000


def test_functions_that_torch_keeps_from_its_compiler_run_without_it(monkeypatch):
    """Else a prediction imports the compiler, for a second: torch's `_disable_dynamo` differs."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)

    def function() -> bool:
        return "torch._dynamo" in sys.modules

    kept_out, version = torch._disable_dynamo(function), f"torch {torch.__version__}"
    with no_compiler():
        assert getattr(function, MARK, None) is function, version
        assert not kept_out(), version
    assert not hasattr(function, MARK)
