"""Options for experts in the blocks of any model."""

from dataclasses import replace
from typing import Annotated

from arbcli.base.errors import setting_error
from arbcli.config.model import ModelConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.settings import PRESETS_OWN, Setting
from arbcli.families.experts.config import GATES, ExpertsConfig

TOP_K_EXPERTS = 2
"""Default number of experts per position."""
EXPERTS = Setting(
    "Experts in each block of the innermost stage, each as wide as `ffn`, instead of its MLP; for"
    " presets with a graph, the iterated experts.",
    minimum=1,
    default=PRESETS_OWN,
)
Gate = Annotated[
    str,
    Setting(
        "Choice of experts: softmax or softplus of their scores, or hash, by the last three bytes.",
        choices=GATES,
    ),
]
SharedExpert = Annotated[bool, Setting("One more expert that every position uses.")]
Clamp = Annotated[
    bool,
    Setting(
        "Clamp the inputs of the experts' SwiGLU: gates to at most 10, the others to -10 to 10."
    ),
]


def build_experts(
    experts: int, top_k_name: str, top_k: int, width: int, gate: str, shared: bool, clamp: bool
) -> ExpertsConfig:
    """Build experts; errors name the argument of the short form for `top_k`."""
    if top_k > experts:
        raise setting_error(
            f"`{top_k_name}` is {top_k} of {experts} experts", f"use 1 to {experts}"
        )
    return ExpertsConfig(
        experts=experts, top_k=top_k, width=width, gate=gate, shared=shared, clamp=clamp
    )


_TOP_K_EXPERTS = Setting(
    "Experts that a position uses; for presets with a graph, the same as `moe_top_k`.",
    minimum=1,
    default="the preset's, or 2",
)
_HASH_LAYERS = Setting(
    "First blocks of the innermost stage that choose experts by a hash.",
    minimum=0,
    default=PRESETS_OWN,
)


def replace_mlps(
    config: ModelConfig,
    *,
    experts: Annotated[int | None, EXPERTS] = None,
    top_k_experts: Annotated[int | None, _TOP_K_EXPERTS] = None,
    moe_gate: Gate = GATES[0],
    hash_layers: Annotated[int, _HASH_LAYERS] = 0,
    shared_expert: SharedExpert = False,
    moe_clamp: Clamp = False,
) -> ModelConfig:
    """Return a model whose innermost blocks have experts instead of MLPs, each as wide as its MLP.

    The first `hash_layers` blocks, or all if there are fewer, select experts by a hash, and the
    others by `moe_gate`.

    Raises:
        ArbError: a value is invalid, or is given without `experts`.
    """
    if experts is None:
        is_set = {
            "top_k_experts": top_k_experts is not None,
            "moe_gate": moe_gate != GATES[0],
            "hash_layers": hash_layers,
            "shared_expert": shared_expert,
            "moe_clamp": moe_clamp,
        }
        if names := [name for name, differs in is_set.items() if differs]:
            raise setting_error(
                f"`{names[0]}` only applies to experts, and the model has none",
                "give `experts` too",
            )
        return config
    top_k = TOP_K_EXPERTS if top_k_experts is None else top_k_experts
    blocks = []
    for index, block in enumerate(config.main.blocks):
        assert isinstance(block.channel, MLPConfig)
        gate = "hash" if index < hash_layers else moe_gate
        channel = build_experts(
            experts, "top_k_experts", top_k, block.channel.width, gate, shared_expert, moe_clamp
        )
        blocks.append(replace(block, channel=channel))
    return replace(config, stages=(*config.outer, replace(config.main, blocks=tuple(blocks))))


MODIFIER = replace_mlps
