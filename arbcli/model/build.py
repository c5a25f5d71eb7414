"""Construction of a model from its configuration."""

import torch

from arbcli.base.errors import ArbError
from arbcli.config.model import ModelConfig, gates_to_pack
from arbcli.model.language_model import LanguageModel
from arbcli.model.layers.norm import TernaryGate
from arbcli.model.layers.products import FORMATS, LowPrecision


def build_model(
    config: ModelConfig,
    compute_dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int | None = 0,
    recompute: bool = False,
    pack: bool = False,
    number_format: str = "bf16",
) -> LanguageModel:
    """Build the model of a configuration, on torch's default device.

    Args:
        config: the model's configuration.
        compute_dtype: dtype of activations, bfloat16 or float32.
        seed: seed of the initial weights. None leaves arbitrary bytes, with which losses may be
            nan, for a caller that sets all of them; so does the device `meta`, which has no bytes.
        recompute: whether to use activation checkpointing: the backward recomputes each block.
        pack: whether to pack gates for the backward pass: see `gates_to_pack`.
        number_format: format of products. `fp8` is for indexers and for linear layers, except for
            the head and for layers with a size that is not a multiple of `MULTIPLE`;
            `fp8-backward` for the backward of these layers, and `nvfp4`, emulated, for the layers
            and experts. Others are multiplied in `compute_dtype`.

    Raises:
        ArbError: no layer of the model can multiply in the format.
    """
    model = LanguageModel(config, compute_dtype, recompute=recompute)
    if pack:
        for stack in model.stacks():
            for index in gates_to_pack(stack.configs):
                gate = stack[index].get_submodule("mlp.sub_norm")
                assert isinstance(gate, TernaryGate), "float baselines do not pack gates"
                gate.packs = True
    if number_format in FORMATS:
        parts = [part for part in model.modules() if isinstance(part, LowPrecision)]
        if sum(part.multiply_in(number_format) for part in parts) == 0:
            from arbcli.kernels.matmul.fp8_matmul import MULTIPLE

            raise ArbError(
                f"`--compute {number_format}` multiplies matrices whose sizes are multiples of"
                f" {MULTIPLE}, and this model has none",
                "choose other sizes, or use `--compute bf16`",
            )
    if seed is not None and model.device.type != "meta":
        model.initialise(seed)
    return model
