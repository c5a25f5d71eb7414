"""Folders for Transformers: of every kind, tiny, with random weights, in shards."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip


def rope(base: float, **scaling) -> dict:
    return {"rope_parameters": {"rope_theta": base, "rope_type": "default"} | scaling}


LLAMA3 = rope(
    5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
KINDS = {
    "Llama 2": ("Llama", {"rms_norm_eps": 1e-5} | rope(1e4, rope_type="linear", factor=2.0)),
    "Llama 3": ("Llama", {"rms_norm_eps": 1e-5} | LLAMA3),
    "Llama with biases and YaRN": (
        "Llama",
        {"attention_bias": True}
        | rope(1e2, rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "Qwen 2": ("Qwen2", rope(1e6)),
    "Qwen 3": ("Qwen3", {"head_dim": 32} | rope(1e6)),
    "Qwen 3, tied": (
        "Qwen3",
        {
            "head_dim": 32, "tie_word_embeddings": True, "use_sliding_window": True,
            "sliding_window": 16, "max_window_layers": 1,
        },
    ),
    "Mistral": ("Mistral", {"rms_norm_eps": 1e-5, "sliding_window": 24}),
}  # fmt: skip
"""A class of Transformers, and its configuration besides `SIZES`."""
BITNET = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
"""Changes of `SIZES`, for which llama.cpp has types of trits."""


def random_model(transformers, kind: str, **others) -> nn.Module:
    """Make a model whose biases, gains and sharp attention count."""
    name, about = KINDS.get(kind, (kind, {}))
    config = getattr(transformers, f"{name}Config")(**SIZES | about | others)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
            weight.copy_(drawn + (weight.dim() == 1))
    return model


CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "vocab_size": 40, "rope_theta": 10000, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Of `plain_folder`, as an earlier Transformers wrote it."""
BLOCK = {
    "input_layernorm": (32,), "self_attn.q_proj": (32, 32), "self_attn.k_proj": (32, 32),
    "self_attn.v_proj": (32, 32), "self_attn.o_proj": (32, 32),
    "post_attention_layernorm": (32,), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}  # fmt: skip


def plain_folder(folder: Path, **config) -> dict[str, torch.Tensor]:
    """Write a Llama of one layer without Transformers; return its weights."""
    generator = torch.Generator().manual_seed(1)
    names = {f"model.layers.0.{name}.weight": shape for name, shape in BLOCK.items()}
    symbols = (CONFIG | config)["vocab_size"]
    names |= {"model.embed_tokens.weight": (symbols, 32), "model.norm.weight": (32,)}
    names |= {"lm_head.weight": (symbols, 32)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    weights = {name: (drawn[name] * 0.1).bfloat16() for name in drawn}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return weights
