"""Construction of a model from its configuration."""

import torch

from arbcli.base.errors import ArbError
from arbcli.config.model import ModelConfig, gates_to_pack
from arbcli.families.compressed.attention import Indexer
from arbcli.families.experts.weight import ExpertWeight
from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.layers.norm import TernaryGate
from arbcli.model.stack import Stack


def build_model(
    config: ModelConfig,
    compute_dtype: torch.dtype = torch.bfloat16,
    *,
    recompute: bool = False,
    pack: bool = False,
    fp8: bool = False,
    nvfp4: bool = False,
) -> LanguageModel:
    """Build the model of a configuration, with uninitialised weights.

    Args:
        config: the model's configuration.
        compute_dtype: dtype of activations, bfloat16 or float32.
        recompute: whether to use activation checkpointing: the backward recomputes each block.
        pack: whether to pack gates for the backward pass: see `gates_to_pack`.
        fp8: whether to multiply in FP8 in indexers and in linear layers, except for the head and
            for layers with a size that is not a multiple of `MULTIPLE`.
        nvfp4: whether to multiply in NVFP4, emulated, in the same linear layers and in experts.

    Raises:
        ArbError: no layer of the model can multiply in the format.
    """
    model = LanguageModel(config, compute_dtype, recompute=recompute)
    if pack:
        for stack in model.modules():
            if isinstance(stack, Stack):
                _pack_gates(stack)
    if fp8 or nvfp4:
        weights = [
            weight
            for weight in model.weights().values()
            if isinstance(weight, (LinearWeight, ExpertWeight)) and _fits(weight, nvfp4)
        ]
        if not weights:
            raise ArbError(
                f"`--compute {'fp8' if fp8 else 'nvfp4'}` multiplies matrices whose sizes are"
                f" multiples of {MULTIPLE}, and this model has none",
                hint="choose other sizes, or use `--compute bf16`",
            )
        for weight in weights:
            weight.nvfp4 = nvfp4
            if isinstance(weight, LinearWeight):
                weight.fp8 = fp8
        for part in model.modules():
            if isinstance(part, Indexer):
                part.fp8 = fp8
    return model


def _pack_gates(stack: Stack) -> None:
    for index in gates_to_pack(stack.configs):
        gate = stack[index].get_submodule("mlp.sub_norm")
        assert isinstance(gate, TernaryGate), "float baselines do not pack gates"
        gate.packs = True


def _fits(weight: LinearWeight | ExpertWeight, nvfp4: bool) -> bool:
    """Return whether a weight can be multiplied in FP8, or in NVFP4."""
    if isinstance(weight, ExpertWeight):
        rows, allowed = weight.expert_rows, nvfp4
    else:
        rows, allowed = weight.out_features, weight.in_eight_bits
    return allowed and rows % MULTIPLE == 0 and weight.in_features % MULTIPLE == 0
