"""An exported model is computed again by an equation of Qwen3 of its own, from files alone."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from arbcli.base.errors import ArbError
from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.generation.load import load_model
from arbcli.inspect.saved import open_saved
from arbcli.interop.exporting import export
from arbcli.interop.gguf.container import GGUFFile

OF_BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Names of Transformers by those of llama.cpp."""
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
KEYS = {
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "context_length": "sliding_window", "vocab_size": "vocab_size",
}  # fmt: skip


def qwen3(config: dict, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Compute (T, V) logits of (T,) ids, as `modeling_qwen3.py` of Transformers does."""
    width, groups = config["head_dim"], config["num_attention_heads"]
    groups //= config["num_key_value_heads"]
    places = torch.arange(len(ids), dtype=torch.float64)
    rates = config["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(places, rates).repeat(1, 2)
    apart = places[:, None] - places
    seen = (apart >= 0) & (apart < config["sliding_window"])

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        return x / (mean + config["rms_norm_eps"]).sqrt() * weights[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    x = weights["model.embed_tokens.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}."

        def linear(x: Tensor, name: str, block: str = block) -> Tensor:
            return x @ weights[f"{block}{name}.weight"].T

        y = norm(x, f"{block}input_layernorm")
        q, k, v = (
            linear(y, f"self_attn.{letter}_proj").unflatten(1, (-1, width)).transpose(0, 1)
            for letter in "qkv"
        )
        q, k = (turn(norm(p, f"{block}self_attn.{n}_norm")) for p, n in ((q, "q"), (k, "k")))
        k, v = (part.repeat_interleave(groups, dim=0) for part in (k, v))
        scores = (q @ k.mT / math.sqrt(width)).masked_fill(~seen, -math.inf)
        y = (scores.softmax(dim=-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(y, "self_attn.o_proj")
        y = norm(x, f"{block}post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(y, "mlp.gate_proj"))
        x = x + linear(gate * linear(y, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def read_gguf(path) -> tuple[dict, dict[str, Tensor]]:
    file = GGUFFile(path)
    config = {theirs: file.keys[f"qwen3.{ours}"] for ours, theirs in KEYS.items()}
    weights = {}
    for name, tensor in file.tensors():
        first, *rest = name.removesuffix(".weight").split(".")
        theirs = f"model.layers.{rest[0]}.{OF_BLOCK[rest[1]]}" if rest else OTHERS[first]
        weights[f"{theirs}.weight"] = tensor
    return config, weights


def read_folder(path) -> tuple[dict, dict[str, Tensor]]:
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def grouped(**options) -> ModelConfig:
    """Make a model with all that Qwen3 has."""
    about = {"kv_heads": 2, "head_width": 24, "query_key_norm": "gain", "sub_norm": False}
    mixer = AttentionConfig(heads=4, **about | {"rotary": RotaryConfig(base=500.0)} | options)
    block = BlockConfig(mixer=mixer, channel=MLPConfig(width=192, sub_norm=False))
    stage = StageConfig(dim=64, blocks=(block,) * 2)
    return ModelConfig(ctx=32, stages=(stage,), norm_gain=True)


@pytest.mark.parametrize(
    ("model", "format", "reader"), [("tiny", "hf", read_folder), (grouped(), "gguf", read_gguf)]
)
def test_exported_model_predicts_the_same_by_another_equation(
    format, reader, model, saved, tmp_path
):
    checkpoint = saved(model, **{"sub_norms": False} if model == "tiny" else {})
    export(checkpoint, format, out=tmp_path / "model", kind="f32")
    config, weights = reader(tmp_path / "model")
    ids = torch.randint(256, (32,), generator=torch.Generator().manual_seed(4))
    wanted = load_model(checkpoint, device="cpu", compute="fp32")(ids[None])[0].detach()
    logits = qwen3(config, {name: tensor.double() for name, tensor in weights.items()}, ids)
    assert float((logits - wanted).norm() / wanted.norm()) < 1e-6  # 1.5e-7 by float32
    assert open_saved(tmp_path / "model", print).report().num_weights > 0
    expected = {"hidden_size": 64, "intermediate_size": 192, "num_key_value_heads": 2}
    assert expected | {"sliding_window": 32, "vocab_size": 256} == {
        name: config[name] for name in (*expected, "sliding_window", "vocab_size")
    }


UNSAID = {
    "norms of queries and keys, and biases of the projections to them alone": {"bias": True},
    "biases of the output projection alone": {"output_bias": True},
    "sinks": {"sink": True},
    "rotary positions that are partial": {"rotary": RotaryConfig(share=0.5)},
}


@pytest.mark.parametrize("name", UNSAID)
def test_attention_that_no_architecture_has_is_refused_by_name(name, saved, tmp_path):
    with pytest.raises(ArbError, match=f"GGUF has no architecture with {name}") as caught:
        export(saved(grouped(**UNSAID[name])), "gguf", out=tmp_path / "model")
    assert "--to safetensors" in caught.value.hint
    assert not (tmp_path / "model").exists()
