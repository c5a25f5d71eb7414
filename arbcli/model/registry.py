"""The module class of each part's configuration class."""

from torch import nn

from arbcli.config.parts import (
    AttentionConfig,
    CompressedAttentionConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MambaConfig,
    MemGramConfig,
    MLPConfig,
    PartConfig,
    SequencerConfig,
)
from arbcli.config.site import Site
from arbcli.families.compressed.attention import CompressedAttention
from arbcli.families.experts.mixture import Experts
from arbcli.families.graph.codebook import Codebook
from arbcli.families.graph.config import BookConfig, CodebookConfig
from arbcli.families.graph.memgram import MemGram
from arbcli.families.graph.quantiser import Quantiser
from arbcli.families.graph.sequencer import TextSequencer
from arbcli.families.latent.attention import LatentAttention
from arbcli.families.mamba.mixer import Mamba
from arbcli.model.parts.attention import Attention
from arbcli.model.parts.base import Part
from arbcli.model.parts.mlp import MLP

PARTS: dict[type[PartConfig], type[Part]] = {
    AttentionConfig: Attention,
    LatentAttentionConfig: LatentAttention,
    CompressedAttentionConfig: CompressedAttention,
    MambaConfig: Mamba,
    MLPConfig: MLP,
    ExpertsConfig: Experts,
}
"""Modules of mixers and channel mixers, by configuration."""
BESIDE: dict[type[PartConfig], tuple[str, type[nn.Module]]] = {
    SequencerConfig: ("sequencer", TextSequencer),
    MemGramConfig: ("memgram", MemGram),
}
"""Parts whose output is added to the embedding: attribute name in the model, and module."""


def build_book(config: BookConfig, site: Site, area: str) -> Codebook | Quantiser:
    """Build a codebook with uninitialised weights."""
    own = config.own_site(site)
    if isinstance(config, CodebookConfig):
        return Codebook(config, own, area)
    return Quantiser(config, own, area)


def build_part(config: PartConfig, site: Site) -> Part:
    """Build a part of a block with uninitialised weights."""
    return PARTS[type(config)](config, config.own_site(site))
