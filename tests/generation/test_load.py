"""Models are loaded by what a file says, used deterministically, and launch as much as before."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_runs import model_of
from marks import needs_triton

from arbcli.base.errors import ArbError
from arbcli.config.presets import preset
from arbcli.data.text import Text
from arbcli.families.hnet.boundaries import chunk_depths
from arbcli.generation import load
from arbcli.generation.batch import Request, continue_batch, generate_batch
from arbcli.generation.decoder import OUT_OF_MEMORY
from arbcli.generation.evaluation import evaluate
from arbcli.generation.generation import continue_text, generate
from arbcli.generation.load import load_model, load_weights
from arbcli.generation.sampling import Sampling
from arbcli.kernels.runtime import backend as backends
from arbcli.kernels.runtime._triton import replaced_launches
from arbcli.kernels.runtime.backend import compile_for, use_backend
from arbcli.model.build import build_model
from arbcli.model.checkpoint import load_checkpoint, write_checkpoint
from arbcli.model.decoding import step_phases
from arbcli.model.language_model import LanguageModel


def rewritten(path: Path, saved: Path, **changes) -> Path:
    """Write a checkpoint again that differs in some of its parts."""
    write_checkpoint(path, dataclasses.replace(load_checkpoint(saved), **changes))
    return path


def test_single_process_loads_a_model_of_several_processes(saved, tmp_path):
    path = saved()
    checkpoint = load_checkpoint(path)
    alone = load_model(path, device="cpu")
    model = build_model(load.saved_config(checkpoint), torch.float32)
    model.load_state_dict(checkpoint.tensors)
    model.declare_wire()
    data, tensors = checkpoint.data | {"wire": "int8"}, model.state_dict()
    assert tensors.keys() > checkpoint.tensors.keys()
    shared = rewritten(tmp_path / "shared", path, data=data, tensors=tensors)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(load_model(shared, device="cpu")(ids), alone(ids))
    with pytest.raises(ArbError):  # none of them says that it has such tensors
        load_model(rewritten(tmp_path / "other", path, tensors=tensors), device="cpu")


def test_requested_dtype_overrides_that_of_the_run_which_must_have_one(saved, tmp_path):
    path, config = saved(), tmp_path / "config.json"
    config.write_text('{"config": {"compute": "bf16"}}')
    assert load_model(path, device="cpu").compute_dtype == torch.bfloat16
    assert load_model(path, device="cpu", compute="fp32").compute_dtype == torch.float32
    with pytest.raises(ArbError, match="`compute` is `fp64`"):
        load_model("nowhere", device="cpu", compute="fp64")
    config.write_text('{"config": {"compute": "fp8"}}')
    assert load_weights(path, print).compute == "fp8"
    for text, said in (
        ("[]", "in place of an object"), ('{"config": 3}', "no valid `config`"),
        ('{"config": {"compute": "fp64"}}', "`compute` is `fp64`"),
        ('{"config": {}}', r"no valid `config\.compute`: it is missing"),
    ):  # fmt: skip
        config.write_text(text)
        with pytest.raises(ArbError, match=said) as caught:
            load_weights(path, print)
    assert caught.value.hint == "give `--compute`"


SAMPLING = Sampling(seed=3)
REQUEST = Request(prompt=b"a", length=2, sampling=SAMPLING)


def evaluated(model: LanguageModel, tmp_path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"twelve bytes")
    evaluate(model, "", Text([path]), "", stride=None, batch=1, backend="torch")


USES: dict[str, tuple[Callable, bool, str]] = {
    "evaluate": (evaluated, True, "use a smaller `--batch`"),
    "continue_text": (
        lambda model, _: continue_text(model, "", b"a", 3, SAMPLING, backend="torch"), True,
        OUT_OF_MEMORY),
    "generate": (
        lambda model, _: list(generate(model, b"a", 3, backend="torch")), False, OUT_OF_MEMORY),
    "generate_batch": (
        lambda model, _: list(generate_batch(model, [REQUEST], backend="torch")), False,
        OUT_OF_MEMORY),
    "continue_batch": (
        lambda model, _: list(continue_batch(model, [REQUEST], backend="torch")), True,
        OUT_OF_MEMORY),
    "chunk_depths": (lambda model, _: chunk_depths(model, b"abcdefghij", "torch"), True, ""),
}  # fmt: skip
"""Functions that use a model, whether in deterministic mode, and the hint without memory."""


@pytest.mark.parametrize("name", USES)
def test_model_is_used_in_deterministic_mode_on_the_backend_without_gradients(
    name, small_hnet, tmp_path
):
    """And lack of memory is an error with a hint."""
    use, is_deterministic, hint = USES[name]
    model = build_model(model_of(small_hnet), torch.float32)
    seen = set()

    def look(*_) -> None:
        mode = torch.get_deterministic_debug_mode()
        seen.add((mode == 2, backends._forced, torch.is_grad_enabled()))

    def take(*_) -> None:
        raise torch.OutOfMemoryError("there is none")

    model.embedding.register_forward_hook(look)
    use(model, tmp_path)
    assert seen == {(is_deterministic, "torch", False)}
    assert torch.get_deterministic_debug_mode() == 1  # of these tests
    assert backends._forced is None
    model.embedding.register_forward_hook(take)
    if hint:
        with pytest.raises(ArbError, match="the GPU's memory is not enough") as caught:
            use(model, tmp_path)
        assert caught.value.hint == hint


IN_RANGE = {
    "temperature": (0, 1e-6, 1e6), "top_k": (1, 256), "top_p": (1e-9, 1.0), "seed": (0, 2**31 - 1),
}  # fmt: skip
OUT_OF_RANGE = {
    "temperature": (-1e-9, 9e-7, 1.1e6), "top_k": (0, 2**20 + 1), "top_p": (0.0, 1.0001),
    "seed": (-1, 2**31),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_RANGE)
def test_every_way_to_sample_is_taken_to_its_limits(name):
    for value in IN_RANGE[name]:
        assert getattr(Sampling(**{name: value}), name) == value
    for value in OUT_OF_RANGE[name]:
        with pytest.raises(ArbError, match=rf"`--{name.replace('_', '-')}` is {value}"):
            Sampling(**{name: value})


SHAPE = {"dim": 64, "layers": 2, "heads": 2, "ffn": 96, "ctx": 64}
OUTER = {"outer_dim": (32,), "outer_layers": (1,), "outer_heads": (2,), "outer_ffn": (48,)}


@needs_triton
@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        ("tiny", SHAPE, 12),  # 5 a block, the embedding and the head
        ("arb-long", SHAPE | {"head_width": 32, "rotary": 16}, 17),
        ("hnet-base", SHAPE | OUTER, 27),
        ("arb-tiny", {}, 88),
    ],
)
@torch.no_grad()
def test_byte_takes_so_many_launches(name, options, most, small_graph):
    config = preset(name, **options) if options else model_of(small_graph)
    lm = build_model(config, torch.bfloat16)
    launched: list[object] = []
    launches = replaced_launches(lambda kernel, *_, **__: launched.append(kernel))
    with lm.prepared_weights(), use_backend("interpreter"), compile_for((9, 0)), launches:
        phases = step_phases(lm, torch.zeros(1, 1, dtype=torch.int64), lm.new_cache(16))
        for _ in range(2):  # weights are prepacked by the first
            launched.clear()
            for phase in phases:
                phase.run()
    assert len(launched) == most
