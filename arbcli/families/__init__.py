"""Families of models, one folder each, imported when a configuration names one of their kinds.

A family's folder has `config.py`, with a configuration for each kind of part, and the modules,
kernels, references, presets and settings of these parts. The core finds a family by this table
alone; to add a family, write its folder and add a line.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """Kinds of parts that a family has, by their place in a model."""

    mixers: tuple[str, ...] = ()
    """Token mixers of blocks."""
    channels: tuple[str, ...] = ()
    """Channel mixers of blocks."""
    beside: tuple[str, ...] = ()
    """Parts whose outputs are added to the embedding."""
    books: tuple[str, ...] = ()
    """Codebooks of memories between blocks."""


FAMILIES = {
    "compressed": Family(mixers=("compressed",)),
    "experts": Family(channels=("experts",)),
    "graph": Family(beside=("sequencer", "memgram"), books=("codebook", "quantiser")),
    "latent": Family(mixers=("latent",)),
    "mamba": Family(mixers=("mamba",)),
}
"""Families by the name of their folder."""
OBJECTIVES = {
    "masked": "arbcli.families.masked.masking",
    "fill": "arbcli.families.masked.filling",
}
"""Modules of objectives other than the next symbol; each has `training_windows`."""
MEDIA = {"sound": (".wav", ".flac", ".ogg"), "picture": (".png", ".jpg", ".jpeg", ".webp")}
"""Suffixes of the files of each medium that `arbcli.families.media` reads."""
BYTE_KINDS = "arbcli.families.media.byte_kinds:ByteKinds"
"""Class of the kinds of a text's bytes, for heads of several kinds."""
MEDIA_MARK = b"\xff"
"""First byte of the header of a sound or a picture; text in UTF-8 never has it."""
BETWEEN = "arbcli.families.graph.memories:Memories"
"""Class of what runs between blocks of the innermost stage."""
RESIDUAL = "arbcli.families.streams.hyper_connection"
"""Module of stages with several residual streams."""
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
