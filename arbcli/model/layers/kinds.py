"""The table of layers for each kind of weights: packed, or float for baselines."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from arbcli.base.lazy import imported
from arbcli.config.layer_spec import LayerSpec, is_chunked
from arbcli.model.initial import head_lr_factor, head_std, output_std
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.norm import ClampedGate, TernaryGate, TernaryRMSNorm

if TYPE_CHECKING:
    from arbcli.config.model import ModelConfig

PACKED = {
    "linear": TernaryLinear,
    "norm": TernaryRMSNorm,
    "gate": TernaryGate,
    "clamped_gate": ClampedGate,
    "embedding": "arbcli.model.layers.embedding:TernaryEmbedding",
    "cross_entropy": "arbcli.model.layers.loss:cross_entropy",
    "rotary_norm": "arbcli.model.layers.rotary:new_rotary_norm",
    "rotary_qkv": "arbcli.model.layers.rotary_qkv:new_rotary_qkv",
    "gained_norm": "arbcli.model.layers.gained_norm:GainedRMSNorm",
    "rounded_norm": "arbcli.model.layers.bitnet:RoundedRMSNorm",
    "rounded_gate": "arbcli.model.layers.bitnet:RoundedGate",
    "vector": "arbcli.model.layers.vector:TernaryVector",
    "taps": "arbcli.model.layers.vector:TernaryTaps",
    "table": "arbcli.model.layers.table:TernaryTable",
}
"""Packed layers: those of every block, and the places of others, which are imported on first use.
`rotary_norm` and `rotary_qkv` take context, width of heads and angles, and return a function or
module."""
FLOAT = {
    "linear": "arbcli.model.baselines:FloatLinear",
    "norm": "arbcli.model.baselines:FloatRMSNorm",
    "gate": "arbcli.model.baselines:FloatGate",
    "clamped_gate": "arbcli.model.baselines:FloatClampedGate",
    "embedding": "arbcli.model.baselines:FloatEmbedding",
    "cross_entropy": "arbcli.model.baselines:cross_entropy",
    "rotary_norm": "arbcli.model.baselines:FloatRotaryNorm",
    "rotary_qkv": "arbcli.model.baselines:FloatRotaryQKV",
    "gained_norm": "arbcli.model.baselines:FloatGainedRMSNorm",
    "vector": "arbcli.model.baselines:FloatVector",
    "taps": "arbcli.model.baselines:FloatTaps",
    "table": "arbcli.model.baselines:FloatTable",
}
"""Their counterparts in baselines."""


class Layers:
    """Constructors of layers; packed and float ones take the same arguments.

    Only packed layers have fused decoding steps, such as `TernaryLinear.fused`.

    Args:
        table: each layer, or its place as `module:attribute`.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        """Return a constructor, or `cross_entropy`."""
        if name not in self._table:
            raise AttributeError(f"no layer is named `{name}`")
        layer = self._table[name]
        return imported(layer) if isinstance(layer, str) else layer

    def output(self, in_features: int, spec: LayerSpec, *, area: str) -> Any:
        """Build a projection of K inputs into the residual stream: see `arbcli.model.initial`."""
        std = output_std(in_features, spec.depth)
        return self.linear(spec.dim, in_features, spec, area=area, std=std)


def layers_for(spec: LayerSpec) -> Layers:
    """Return the constructors for the kind of weights of a layer."""
    return Layers(PACKED if spec.weights == "ternary" else FLOAT)


def stream_norm(spec: LayerSpec, *, rounded: bool = False) -> nn.Module:
    """Build the norm of the residual stream before a part or the head.

    Args:
        spec: spec of the stage.
        rounded: whether its result is rounded to int8, as BitNet's.
    """
    parts = layers_for(spec)
    if rounded:
        return parts.rounded_norm(spec.dim, spec)
    return (parts.gained_norm if spec.norm_gain else parts.norm)(spec.dim, spec)


def symbol_embedding(config: "ModelConfig") -> nn.Module:
    """Build the embedding of bytes or tokens."""
    spec = config.symbol_spec(config.embedding_direction)
    kind = layers_for(spec).embedding
    return kind(config.symbols, spec.dim, spec, area="embedding", tied=config.tied)


def symbol_head(config: "ModelConfig", embedding: Any) -> Any:
    """Build the head, a linear layer that is never multiplied in eight bits."""
    spec, ternary = config.symbol_spec(config.head_direction), config.weights == "ternary"
    if config.tied and ternary:
        return imported("arbcli.model.layers.symbols:TiedHead")(embedding.weight)
    if ternary and is_chunked(config.vocabulary):
        kind = imported("arbcli.model.layers.symbols:SymbolHead")
        return kind(config.vocabulary, spec.dim, spec, area="head")
    head = linear_head(config.vocabulary, spec, area="head")
    if config.tied:
        head.weight = embedding.weight
    return head


def linear_head(symbols: int, spec: LayerSpec, *, area: str) -> Any:
    """Build a head for a small vocabulary."""
    return layers_for(spec).linear(
        symbols,
        spec.dim,
        spec,
        area=area,
        std=head_std(spec.dim),
        lr_factor=head_lr_factor(spec),
        low_precision=False,
    )
