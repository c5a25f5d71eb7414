"""From a configuration to its model."""

import torch

from arbcli.config.model import ModelConfig
from arbcli.errors import ArbError
from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.expert_weight import ExpertWeight
from arbcli.model.layers.linear import LinearWeight
from arbcli.model.parts.compressed_attention import Indexer


def build_model(
    config: ModelConfig,
    compute_dtype: torch.dtype = torch.bfloat16,
    *,
    recompute: bool = False,
    fp8: bool = False,
    nvfp4: bool = False,
) -> LanguageModel:
    """Make the model of a configuration, its weights not yet set.

    Args:
        config: its shape and storage.
        compute_dtype: of activations; bfloat16, or float32.
        recompute: whether a backward computes what is inside a block again.
        fp8: whether linear layers multiply in eight bits: all but the head, and those with a size
            that is not a multiple of `MULTIPLE`; and whether indexers choose by such products.
        nvfp4: whether these multiply in four bits, emulated, and experts too.

    Raises:
        ArbError: there is no such layer.
    """
    model = LanguageModel(config, compute_dtype, recompute=recompute)
    if fp8 or nvfp4:
        chosen = [
            weight
            for weight in model.weights().values()
            if isinstance(weight, (LinearWeight, ExpertWeight)) and _fits(weight, nvfp4)
        ]
        if not chosen:
            raise ArbError(
                f"`--compute {'fp8' if fp8 else 'nvfp4'}` multiplies matrices whose sizes are"
                f" multiples of {MULTIPLE}, and this model has none",
                hint="choose other sizes, or use `--compute bf16`",
            )
        for weight in chosen:
            weight.nvfp4 = nvfp4
            if isinstance(weight, LinearWeight):
                weight.fp8 = fp8
        for part in model.modules():
            if isinstance(part, Indexer):
                part.fp8 = fp8
    return model


def _fits(weight: LinearWeight | ExpertWeight, nvfp4: bool) -> bool:
    """Whether a weight is multiplied in eight bits, or in four."""
    if isinstance(weight, ExpertWeight):
        rows, chosen = weight.of_one, nvfp4
    else:
        rows, chosen = weight.out_features, weight.in_eight_bits
    return chosen and rows % MULTIPLE == 0 and weight.in_features % MULTIPLE == 0
