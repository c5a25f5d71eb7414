"""Models of every kind go from Transformers to integers and back, and predict the same."""

import copy
import json

import pytest
import torch
from folders import KINDS, random_model
from torch import Tensor

from arbcli.base.reading import read_json
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.generation.load import load_weights
from arbcli.interop import importing, rounding
from arbcli.interop.exporting import export
from arbcli.interop.huggingface.config_json import read_config
from arbcli.interop.huggingface.dense import sources
from arbcli.interop.huggingface.folder import WeightFolder
from arbcli.interop.importing import import_folder
from arbcli.model.build import build_model


def read(folder, **storage) -> ModelConfig:
    return read_config(read_json(folder / "config.json"), "it", **storage)


def round_to_q8_0(weight: Tensor) -> Tensor:
    """Round as llama.cpp does: blocks of 32, whose largest has level 127, and an fp16 scale."""
    blocks = weight.reshape(-1, 32)
    step = blocks.abs().amax(dim=1, keepdim=True) / 127
    return ((blocks / step).round() * step.half().float()).view_as(weight)


def divergence(wanted: Tensor, logits: Tensor) -> float:
    wanted, logits = wanted.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - logits)).sum(dim=-1).mean())


def read_float(folder):
    """Read a folder into a float model, whose weights are not rounded."""
    saved = WeightFolder(folder)
    model = build_model(read(folder, weights="float"), torch.float32, seed=None)
    for source in sources(model):
        for part in source.parts:
            source.tensor.latent[part.rows] = saved.read(part.hugging_face).view(part.shape[0], -1)
    return model


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Qwen 3"])
@torch.no_grad()
def test_model_is_read_and_given_back(transformers, kind, tmp_path, monkeypatch):
    theirs = random_model(transformers, kind)
    folder, run, back = (tmp_path / name for name in ("folder", "run", "back"))
    theirs.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    about = read_json(folder / "config.json") | {"torch_dtype": "float16"}  # as Transformers 4 did
    (folder / "config.json").write_text(json.dumps(about))
    ids = torch.randint(320, (2, 64), generator=torch.Generator().manual_seed(1))
    twin = read_float(folder)
    for length in (1, 17, 64):
        wanted = theirs(ids[:, :length]).logits
        torch.testing.assert_close(twin(ids[:, :length]), wanted, rtol=0, atol=1e-4)
    assert wanted.std() > 0.3
    places = torch.arange(64)
    for there in (places < 17, places >= 47):  # 17 tokens, padded on the right or left
        padded = theirs(ids, attention_mask=there.expand(2, -1).long()).logits[:, there]
        torch.testing.assert_close(twin(ids[:, there]), padded, rtol=0, atol=1e-4)

    report = import_folder(folder, run)
    # of all matrices together
    errors = {tensor.name: tensor.relative_error for tensor in report.tensors}
    parts = {name: part for name, part in theirs.state_dict().items() if name in errors}
    parts = {name: part.double().square().sum() for name, part in parts.items() if part.dim() == 2}
    error = sum(errors[name] ** 2 * squares for name, squares in parts.items())
    assert report.relative_error == pytest.approx(float(error / sum(parts.values())) ** 0.5)
    assert 0.003 < report.relative_error < 0.006
    ours = load_weights(run, print).model
    logits, other = ours(ids), copy.deepcopy(theirs)
    for weight in other.parameters():
        if weight.dim() == 2:
            weight.copy_(round_to_q8_0(weight))
    assert divergence(wanted, logits) < 1.2 * divergence(wanted, other(ids).logits)

    export(run, "hf", out=back)
    about = read_json(back / "config.json")
    assert [about.get(name) for name in ("dtype", "torch_dtype")] == ["bfloat16", None]
    again = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32).eval()
    assert type(again) is type(theirs)
    torch.testing.assert_close(again(ids).logits, logits, rtol=0, atol=1e-4)
    if kind not in ("Qwen 3, tied", "Llama with biases and YaRN"):  # with all kinds of tensors
        return
    if kind == "Qwen 3, tied":  # some rows at a time, as of large ones
        monkeypatch.setattr(importing, "READ_AT_ONCE", 4000)
        monkeypatch.setattr(rounding, "ROUNDED_AT_ONCE", 2000)
    assert import_folder(back, tmp_path / "again").relative_error == 0
    second = load_weights(tmp_path / "again", print).model.state_dict()
    for name, part in ours.state_dict().items():
        assert torch.equal(part, second[name]), name


LLAMA3 = RotaryConfig(base=5e5, scaling="llama3", factor=8.0, low=1.0, high=4.0, original_ctx=16)
OURS = {
    "Qwen3ForCausalLM": ({"query_key_norm": "gain", "bias": True, "output_bias": True}, {}),
    "MistralForCausalLM": ({"window": 9}, {"norm_eps": 1e-5, "tied": True}),
    "LlamaForCausalLM": ({"bias": True, "output_bias": True, "rotary": LLAMA3}, {}),
    "Qwen2ForCausalLM": (
        {"head_width": 16, "bias": True, "rotary": RotaryConfig(scaling="linear", factor=2.0)},
        {"norm_eps": 1e-5},
    ),
}
"""Options of attention and model, by the class that computes the same."""


@torch.no_grad()
@pytest.mark.parametrize("kind", OURS)
def test_exported_model_computes_the_same(kind, transformers, saved, tmp_path):
    about, fields = OURS[kind]
    about = {"kv_heads": 2, "head_width": 24, "query_key_norm": "none", "sub_norm": False} | about
    mixer = AttentionConfig(heads=4, **about)
    rule = "nibble" if kind == "MistralForCausalLM" else None  # which no format mentions
    block = BlockConfig(mixer=mixer, channel=MLPConfig(width=96, sub_norm=False, rule=rule))
    stages = (StageConfig(dim=64, blocks=(block,) * 2),)
    config = ModelConfig(ctx=32, stages=stages, norm_gain=True, digits="all", **fields)
    checkpoint = saved(config)
    export(checkpoint, "hf", out=tmp_path / "back")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    ).eval()
    assert type(theirs).__name__ == kind
    ids = torch.randint(1, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    ours = load_weights(checkpoint, print).model(ids)
    torch.testing.assert_close(theirs(ids).logits, ours, rtol=0, atol=1e-4)
    assert read(tmp_path / "back", digits="all", mlp_rule=rule) == config
    if kind == "Qwen3ForCausalLM":  # which has no biases in llama.cpp
        return
    pytest.importorskip("xllamacpp", reason="the rest needs the extra `export-test`")
    from benchmarks.llama_cpp import Llama

    export(checkpoint, "gguf", out=tmp_path / "back.gguf", kind="f32")
    scores = Llama(tmp_path / "back.gguf", 64).log_probabilities(bytes(ids[0, :8].tolist()))
    torch.testing.assert_close(
        scores.double(), ours[0, 7].double().log_softmax(-1), rtol=0, atol=1e-4
    )
