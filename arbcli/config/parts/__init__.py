"""Configurations of the parts of models, one file each, without torch.

A part has the same file name in `arbcli.model.parts` (its module), in `arbcli.verify.parts` (its
float64 reference) and in `tests/model/parts`.
"""

from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.families.experts.config import ExpertsConfig
from arbcli.families.graph.memgram_config import MemGramConfig
from arbcli.families.graph.sequencer_config import SequencerConfig
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.families.mamba.config import MambaConfig

MIXERS: dict[str, type[PartConfig]] = {
    "attention": AttentionConfig,
    "latent": LatentAttentionConfig,
    "compressed": CompressedAttentionConfig,
    "mamba": MambaConfig,
}
"""Configurations of token mixers by kind."""
CHANNELS: dict[str, type[PartConfig]] = {"mlp": MLPConfig, "experts": ExpertsConfig}
"""Configurations of channel mixers by kind."""
BESIDE: dict[str, type[PartConfig]] = {"sequencer": SequencerConfig, "memgram": MemGramConfig}
"""Configurations of additions to the embedding by kind."""
