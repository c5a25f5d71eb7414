"""From a configuration to its model."""

import torch

from arbcli.config.model import ModelConfig
from arbcli.errors import ArbError
from arbcli.kernels.matmul.fp8_matmul import MULTIPLE
from arbcli.model.language_model import LanguageModel
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
        nvfp4: whether these multiply in four bits, emulated.

    Raises:
        ArbError: there is no such layer.
    """
    model = LanguageModel(config, compute_dtype, recompute=recompute)
    if fp8 or nvfp4:
        weights = model.weights().values()
        chosen = [part for part in weights if isinstance(part, LinearWeight) and _fits_fp8(part)]
        if not chosen:
            raise ArbError(
                f"`--compute {'fp8' if fp8 else 'nvfp4'}` multiplies matrices whose sizes are"
                f" multiples of {MULTIPLE}, and this model has none",
                hint="choose other sizes, or use `--compute bf16`",
            )
        for weight in chosen:
            weight.fp8, weight.nvfp4 = fp8, nvfp4
        for part in model.modules():
            if isinstance(part, Indexer):
                part.fp8 = fp8
    return model


def _fits_fp8(weight: LinearWeight) -> bool:
    if not weight.in_eight_bits:
        return False
    return weight.out_features % MULTIPLE == 0 and weight.in_features % MULTIPLE == 0
