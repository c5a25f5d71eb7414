"""A plain Llama, Qwen or Mistral: the float baseline gives the logits of Transformers.

Random weights of a model of Transformers are copied into the baseline, matrix by matrix.
"""

import pytest
import torch
from torch import nn

from arbcli.config.model import BlockConfig, ModelConfig, StageConfig
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.model.build import build_model

DIM, LAYERS, HEADS, KV_HEADS, WIDTH, CTX = 48, 2, 4, 2, 20, 40
COMMON = {
    "vocab_size": 256, "hidden_size": DIM, "intermediate_size": 72, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": CTX,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip


def rope(base: float, **scaling) -> dict:
    return {"rope_parameters": {"rope_theta": base, "rope_type": "default"} | scaling}


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"kv_heads": KV_HEADS, "query_key_norm": "none"}
MODELS = {
    "Llama": ("Llama", rope(500.0, **LLAMA3) | {"head_dim": WIDTH}, PLAIN | {"head_width": WIDTH},
        {"base": 500.0, "scaling": "llama3", "factor": 8.0, "original_ctx": 16}),
    "Llama of interpolated positions": ("Llama",
        rope(1e4, rope_type="linear", factor=3.0) | {"attention_bias": True},
        PLAIN | {"bias": True, "output_bias": True}, {"scaling": "linear", "factor": 3.0}),
    "Llama with YaRN": ("Llama", rope(100.0, **YARN), PLAIN,
        {"base": 100.0, "scaling": "yarn", "factor": 4.0, "original_ctx": 16}),
    "Qwen2": ("Qwen2", rope(1e6), PLAIN | {"bias": True}, {"base": 1e6}),
    "Qwen3": ("Qwen3", rope(1e6) | {"head_dim": WIDTH},
        {"kv_heads": KV_HEADS, "head_width": WIDTH, "query_key_norm": "gain"}, {"base": 1e6}),
    "Mistral": ("Mistral", rope(1e4) | {"sliding_window": 7}, PLAIN | {"window": 7}, {}),
}  # fmt: skip
"""The name of a class, its configuration, and the fields of ours; all have the common ones."""


@torch.no_grad()
def copy_weights(theirs: nn.Module, ours: nn.Module) -> None:
    def copy(to, *given: torch.Tensor) -> None:
        values = torch.cat(given)
        to.weight.latent.copy_(values.view_as(to.weight.latent))

    copy(ours.embedding, theirs.model.embed_tokens.weight)
    for layer, block in zip(theirs.model.layers, ours.blocks, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        copy(block.attention_norm, layer.input_layernorm.weight)
        copy(block.attention.qkv, *(one.weight for one in projections))
        copy(block.attention.output, attention.o_proj.weight)
        if block.attention.bias:
            copy(block.attention.bias, *(one.bias for one in projections))
        if block.attention.output_bias:
            copy(block.attention.output_bias, attention.o_proj.bias)
        if block.attention.query_gain:
            copy(block.attention.query_gain, attention.q_norm.weight)
            copy(block.attention.key_gain, attention.k_norm.weight)
        copy(block.mlp_norm, layer.post_attention_layernorm.weight)
        copy(block.mlp.gate_up, mlp.gate_proj.weight, mlp.up_proj.weight)
        copy(block.mlp.output, mlp.down_proj.weight)
    copy(ours.norm, theirs.model.norm.weight)
    copy(ours.head, theirs.lm_head.weight)


@pytest.mark.parametrize("name", MODELS)
def test_twin_gives_the_logits_of_transformers(name):
    transformers = pytest.importorskip("transformers", reason="needs the extra `export-test`")
    kind, about, fields, rotary = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**COMMON | about)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for weight in theirs.parameters():  # biases, gains and sharp attention count
            weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5 + (weight.dim() == 1))
    mixer = AttentionConfig(heads=HEADS, sub_norm=False, rotary=RotaryConfig(**rotary), **fields)
    block = BlockConfig(mixer=mixer, channel=MLPConfig(width=72, sub_norm=False))
    stage = StageConfig(dim=DIM, blocks=(block,) * LAYERS)
    ours = build_model(
        ModelConfig(ctx=CTX, stages=(stage,), weights="float", norm_gain=True),
        torch.float32,
    )
    copy_weights(theirs, ours)
    ids = torch.randint(256, (2, CTX))
    with torch.no_grad():
        wanted = theirs(ids).logits
        torch.testing.assert_close(ours(ids), wanted, rtol=0, atol=1e-4)
        cache = ours.new_cache(CTX)
        found = [ours(part, cache) for part in ids[:1].split([7, *[1] * (CTX - 7)], dim=1)]
        torch.testing.assert_close(torch.cat(found, dim=1), wanted[:1], rtol=0, atol=1e-4)
    assert wanted.std() > 0.5
