"""A tiny graph model, parts of it, and how they are compared with their reference."""

import math

import torch

from arbcli.config.layer_spec import LayerSpec
from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.model.language_model import LanguageModel
from arbcli.model.packed import TernaryTensor
from arbcli.verify.subjects import fill_memories as fill_parts

SHAPE = {
    "dim": 40, "layers": 2, "heads": 2, "ffn": 48, "ctx": 8,
    "latent": 24, "rotary": 8, "ngram_rows": 64, "ngram_dim": 16, "key_dim": 8,
    "codes": (4, 8), "code_dim": 36, "code_heads": 2,
    "knowledge": (8, 6), "knowledge_dim": 12, "knowledge_heads": 3, "top_k": 3,
    "experts": 4, "expert_dim": 24, "expert_ffn": 20, "gate_dim": 8, "adapter_rank": 4,
    "edges": (16, 2), "head_ffn": 44, "memory_rows": 64, "max_moe_iters": 3, "memgram": True,
    "moe": True, "graph": True,
}  # fmt: skip
"""Two groups of scales where a row has 36, 40, 44 or 48 weights."""
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
"""For float32: products of other shapes may add in another order, and processors differ in that."""


def graph_config(**options) -> ModelConfig:
    return preset("arb-tiny", **SHAPE | options)


def spec(**options) -> LayerSpec:
    """Describe where parts of such a model stand."""
    return graph_config(**options).layer_spec(-1)


def initialised(part: torch.nn.Module) -> torch.nn.Module:
    """Set the weights of a part that is not a whole model."""
    tensors = [tensor for tensor in part.modules() if isinstance(tensor, TernaryTensor)]
    for index, tensor in enumerate(tensors):
        tensor.std = 0.3  # large enough that choices differ between positions
        tensor.spread = 1.0  # tables too: rows of zeros would hide a lot
        tensor.initialise(seed=0, index=index)
    return part


def model(*, recompute=False, **options) -> LanguageModel:
    """Make a model whose integer memories hold something."""
    lm = LanguageModel(graph_config(**options), torch.float32, recompute=recompute)
    for tensor in lm.weights().values():
        tensor.spread = 1.0
    lm.initialise(0)
    fill_memories(lm)
    return lm


def fill_memories(part: torch.nn.Module) -> None:
    fill_parts(part, math.prod(SHAPE["codes"]))


def text(rows=2, length=6, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(97, 101, (rows, length), generator=generator)


def normal(*shape: int, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
