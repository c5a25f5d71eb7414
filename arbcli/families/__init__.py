"""Families of models, one folder each, imported when a configuration names one of their kinds.

A family's folder has `config.py`, with a configuration for each kind of part, `presets.py` with its
presets and options, and the modules, kernels and references of these parts. The core finds a family
by these tables alone: one with parts of a kind of `Family` has a line in `FAMILIES`, and update
rules, objectives, number formats and residual streams have a table each.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """Names that a family has in configurations, which are known without importing it."""

    mixers: tuple[str, ...] = ()
    """Kinds of token mixers of blocks."""
    channels: tuple[str, ...] = ()
    """Kinds of channel mixers of blocks."""
    beside: tuple[str, ...] = ()
    """Kinds of parts whose outputs are added to the embedding."""
    books: tuple[str, ...] = ()
    """Kinds of codebooks of memories."""
    chunking: tuple[str, ...] = ()
    """Kinds of parts that split an outer stage into chunks."""
    memories: tuple[str, ...] = ()
    """Kinds of parts between two blocks."""
    ahead: tuple[str, ...] = ()
    """Kinds of second heads, for later bytes."""
    composite: tuple[str, ...] = ()
    """Kinds of heads that replace the linear head."""
    form: str | None = None
    """Short form of models: `FORM` of `presets.py`, see `arbcli.config.short_forms`."""
    presets: tuple[str, ...] = ()
    """Presets of the form: `PRESETS` of `presets.py`."""
    modifies: bool = False
    """Whether `MODIFIER` of `presets.py` changes models of other forms."""
    losses: tuple[str, ...] = ()
    """Parts of the loss besides that of the text."""


FAMILIES = {
    "ahead": Family(ahead=("ahead",)),
    "compressed": Family(
        mixers=("compressed",), form="compressed", losses=("indexer",),
        presets=("arb-long", "arb-deep-small", "arb-deep")
    ),
    "experts": Family(channels=("experts",), modifies=True),
    "graph": Family(
        beside=("sequencer", "memgram"), books=("codebook", "quantiser"), memories=("memories",),
        form="graph", presets=("arb-tiny", "arb-3b"), losses=("ponder",)
    ),
    "hnet": Family(
        chunking=("chunking",), form="hnet", losses=("ratio",),
        presets=(
            "hnet-tiny", "hnet-small", "hnet-base", "hnet-every", "hnet-long", "hnet-code",
            "hnet-two-stage",
        )
    ),
    "latent": Family(mixers=("latent",)),
    "mamba": Family(mixers=("mamba",)),
    "media": Family(composite=("composite",)),
}  # fmt: skip
"""Families by the name of their folder."""
OBJECTIVES = {
    "masked": "arbcli.families.masked.masking",
    "fill": "arbcli.families.masked.filling",
}
"""Modules of objectives other than the next symbol; each has `training_windows`."""
CHECKS_OF_OBJECTIVES = {
    "masked": "arbcli.families.masked.config:check_masked",
    "fill": "arbcli.families.masked.config:check_fill",
}
"""Functions that check that a model can be trained for these."""
MEDIA = {"sound": (".wav", ".flac", ".ogg"), "picture": (".png", ".jpg", ".jpeg", ".webp")}
"""Suffixes of the files of each medium that `arbcli.families.media` reads."""
SOUND_FORMS = ("mulaw", "pcm16")
"""Formats of the bytes of sounds: eight bits a sample on a logarithmic scale, or sixteen."""
BYTE_KINDS = "arbcli.families.media.byte_kinds:ByteKinds"
"""Class of the kinds of a text's bytes, for heads of several kinds."""
MEDIA_MARK = b"\xff"
"""First byte of the header of a sound or a picture; text in UTF-8 never has it."""
BETWEEN = "arbcli.families.graph.memories:Memories"
"""Class of the memories between blocks of the innermost stage."""
RESIDUAL = "arbcli.families.streams.hyper_connection"
"""Module of stages with several residual streams."""
BETWEEN_CODE = "arbcli.families.graph.modeling:Between"
RESIDUAL_CODE = "arbcli.families.streams.modeling:HyperConnection"
"""Their classes in exports for Transformers, as `PartConfig.code`."""
SPECULATION = "arbcli.families.ahead.speculation"
"""Module of speculative decoding."""
SPECULATIVE_ATTENTION = "arbcli.families.ahead.kernels.attend_ahead"
"""Module of attention from positions that are not accepted yet."""
FOUR_BIT_PRODUCTS = "arbcli.families.nvfp4.products"
"""Module of products in four bits."""
RULES = {"votes": "votes"}
"""Families that have an update rule, by the name of the rule."""


def medium_of(name: str) -> str | None:
    """Return `sound` or `picture` by the suffix of a file's name; None for other files."""
    return next((kind for kind, ends in MEDIA.items() if name.lower().endswith(ends)), None)
