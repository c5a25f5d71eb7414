"""The classes of layers for each kind of weights: packed, or float for baselines."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from arbcli.config.model import ModelConfig
from arbcli.config.parts.rotary import RotaryConfig
from arbcli.config.site import Site
from arbcli.model import baselines
from arbcli.model.initial import head_std
from arbcli.model.layers.embedding import TernaryEmbedding
from arbcli.model.layers.gained_norm import GainedRMSNorm
from arbcli.model.layers.linear import TernaryLinear
from arbcli.model.layers.loss import cross_entropy
from arbcli.model.layers.norm import ClampedGate, TernaryGate, TernaryRMSNorm
from arbcli.model.layers.rotary import rotary_norm, turned_heads
from arbcli.model.layers.symbols import SymbolHead, TiedHead, in_chunks
from arbcli.model.layers.table import TernaryTable
from arbcli.model.layers.vector import TernaryTaps, TernaryVector
from arbcli.model.widths import head_lr_factor


class Layers(NamedTuple):
    """Constructors of layers; packed and float ones take the same arguments.

    Only packed layers have fused decoding steps, such as `TernaryLinear.fused`.
    """

    linear: Callable[..., Any]
    embedding: Callable[..., Any]
    norm: Callable[..., Any]
    gained_norm: Callable[..., Any]
    gate: Callable[..., Any]
    rotary_norm: Callable[[int, int, RotaryConfig], Callable[..., tuple[Tensor, Tensor, Tensor]]]
    """Takes context, head width and angles; returns a function or module."""
    turned_heads: Callable[[int, int, RotaryConfig], Callable[..., tuple[Tensor, Tensor, Tensor]]]
    """Like `rotary_norm`, with separate numbers of heads, optional gains and an optional norm."""
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    vector: Callable[..., Any]
    taps: Callable[..., Any]
    clamped_gate: Callable[..., Any]
    table: Callable[..., Any]


def layers_for(site: Site) -> Layers:
    """Return the constructors for the kind of weights of a site."""
    if site.weights == "ternary":
        return Layers(
            TernaryLinear, TernaryEmbedding, TernaryRMSNorm, GainedRMSNorm, TernaryGate,
            _rotary_norm, _turned_heads, cross_entropy, TernaryVector, TernaryTaps,
            ClampedGate, TernaryTable,
        )  # fmt: skip
    return Layers(
        baselines.FloatLinear,
        baselines.FloatEmbedding,
        baselines.FloatRMSNorm,
        baselines.FloatGainedRMSNorm,
        baselines.FloatGate,
        baselines.FloatRotaryNorm,
        baselines.FloatTurnedHeads,
        baselines.cross_entropy,
        baselines.FloatVector,
        baselines.FloatTaps,
        baselines.FloatClampedGate,
        baselines.FloatTable,
    )


def _rotary_norm(_ctx: int, _width: int, rotary: RotaryConfig) -> Callable:
    return partial(rotary_norm, rotary=rotary)


def _turned_heads(_ctx: int, _width: int, rotary: RotaryConfig) -> Callable:
    return partial(turned_heads, rotary=rotary)


def stream_norm(site: Site) -> nn.Module:
    """Build the norm of the residual stream before a part or the head."""
    parts = layers_for(site)
    return (parts.gained_norm if site.norm_gain else parts.norm)(site.dim, site)


def symbol_embedding(config: ModelConfig) -> nn.Module:
    """Build the embedding of bytes or tokens."""
    site = config.site()
    kind = layers_for(site).embedding
    return kind(config.symbols, site.dim, site, area="embedding", tied=config.tied)


def symbol_head(config: ModelConfig, embedding: Any) -> Any:
    """Build the head, a linear layer that is never multiplied in eight bits."""
    site, ternary = config.site(), config.weights == "ternary"
    if config.tied and ternary:
        return TiedHead(embedding.weight)
    if ternary and in_chunks(config.vocabulary):
        return SymbolHead(config.vocabulary, site.dim, site, area="head")
    head = linear_head(config.vocabulary, site, area="head")
    if config.tied:
        head.weight = embedding.weight
    return head


def linear_head(symbols: int, site: Site, *, area: str) -> Any:
    """Build a head for a small vocabulary."""
    return layers_for(site).linear(
        symbols,
        site.dim,
        site,
        area=area,
        std=head_std(site.dim),
        lr_factor=head_lr_factor(site),
        in_eight_bits=False,
    )
