"""Configurations as the makers of models publish them: their weights are as many as is known."""

import json

import pytest
import torch

from arbcli.config.file import read_model
from arbcli.imports.config_json import read_config
from arbcli.imports.dense import shape_of
from arbcli.model.build import build_model

COMMON = {
    "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.43.0", "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "num_hidden_layers": 32, "num_attention_heads": 32,
    "hidden_size": 4096,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "pretraining_tp": 1}
MISTRAL = {
    "model_type": "mistral", "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
    "intermediate_size": 14336, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000, "use_sliding_window": False}
MODELS = {
    "Llama-2-7b-hf": (6_738_415_616, LLAMA | {"_name_or_path": "meta-llama/Llama-2-7b-hf",
        "intermediate_size": 11008, "max_position_embeddings": 4096, "num_key_value_heads": 32,
        "rope_scaling": None, "vocab_size": 32000, }),
    "Llama-3.1-8B": (8_030_261_248, LLAMA | {"attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False, "eos_token_id": [128001, 128008, 128009], "intermediate_size": 14336,
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_scaling": LLAMA3,
        "rope_theta": 500000.0, "vocab_size": 128256, }),
    "SmolLM2-135M": (134_515_008, LLAMA | {"attention_bias": False, "attention_dropout": 0.0,
        "mlp_bias": False, "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, }),
    "Qwen2.5-7B": (7_615_616_512, QWEN | {"model_type": "qwen2", "attention_dropout": 0.0,
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "sliding_window": 131072, "use_mrope": False,
        "vocab_size": 152064, }),
    "Qwen3-8B": (8_190_735_360, QWEN | {"model_type": "qwen3", "attention_bias": False,
        "attention_dropout": 0.0, "head_dim": 128, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_scaling": None, "sliding_window": None,
        "vocab_size": 151936, }),
    "Mistral-7B-v0.1": (7_241_732_096,
        MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000, }),
    "Mistral-7B-v0.3": (7_248_023_552, MISTRAL | {"attention_dropout": 0.0, "head_dim": 128,
        "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768, }),
}  # fmt: skip
"""How many weights there are, and what `config.json` says besides `COMMON`."""


@pytest.mark.parametrize("name", MODELS)
def test_published_model_is_known(name):
    number, about = MODELS[name]
    config = read_config(COMMON | about, name, digits="all")
    with torch.device("meta"):
        model = build_model(config)
    assert sum(weight.num_weights for weight in model.weights().values()) == number
    shape = shape_of(config)
    assert set(shape.windows) == ({4096} if name == "Mistral-7B-v0.1" else {None})
    assert (shape.rotary.scaling == "llama3") == (name == "Llama-3.1-8B")
    assert shape.rotary.base == about.get("rope_theta", 10000)


def test_model_is_printed_as_a_file_without_its_weights(tmp_path, arb_here):
    """So that its memory is known before it is fetched."""
    _, about = MODELS["Qwen3-8B"]
    (tmp_path / "config.json").write_text(json.dumps(COMMON | about))
    done = arb_here("import", str(tmp_path), "--print-config", "--rule", "nibble")
    (tmp_path / "model.toml").write_text(done.stdout)
    about = {"digits": "all", "rule": "nibble", "direction": "orthogonal"}
    config = read_model(tmp_path / "model.toml")
    assert config == read_config(json.loads((tmp_path / "config.json").read_text()), "it", **about)
