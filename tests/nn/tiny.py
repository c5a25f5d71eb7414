"""Tiny random models of Transformers, from configurations."""

import pytest
import torch

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}

ARCHITECTURES = {
    "qwen3": (
        "Qwen3ForCausalLM", "Qwen3Config", HEADS | {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        HEADS | {
            "head_dim": 16, "sliding_window": 16, "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", HEADS),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        HEADS | {
            "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        },
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"state_size": 8}),
}  # fmt: skip


def build(name: str, **changes):
    """Build a model whose logits vary, float32."""
    import transformers

    model_class, config_class, settings = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**SIZES | settings | changes)
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).float().eval()


def tokenizer():
    """Build a tokenizer of three special tokens and the words `w3` to `w95`."""
    import transformers

    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `tokens`")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 96)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def batch(rows: int = 2, length: int = 24) -> torch.Tensor:
    """Return (rows, length) symbols in which each row repeats a sequence."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 96, (rows, length // 3), generator=generator).repeat(1, 3)
