"""Configuration classes of parts by kind, imported on first use.

Kinds of the core are listed here, those of families in `arbcli.families`.
"""

from importlib import import_module

from arbcli.base.lazy import LazyMapping
from arbcli.config.parts.base import PartConfig
from arbcli.families import FAMILIES, Family


class Kinds(LazyMapping[type[PartConfig]]):
    """Configuration classes by kind; a class is imported when it is looked up.

    Args:
        modules: module that defines the class of each kind.
        usual: kind in files of earlier versions, which name none; None if they always did.
    """

    def __init__(self, modules: dict[str, str], usual: str | None = None) -> None:
        super().__init__(modules, self._class)
        self.modules = modules
        self.usual = usual

    def _class(self, kind: str) -> type[PartConfig]:
        module = import_module(self.modules[kind])
        return next(
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, PartConfig)
            and value.__dataclass_fields__["kind"].default == kind
        )


def _kinds(slot: str, usual: str | None = None, **core: str) -> Kinds:
    """Collect the kinds of a slot: those of the core, then those of the families."""
    assert slot in Family._fields
    families = {
        kind: f"arbcli.families.{family}.config"
        for family, slots in FAMILIES.items()
        for kind in getattr(slots, slot)
    }
    return Kinds(core | families, usual)


MIXERS = _kinds("mixers", attention="arbcli.config.parts.attention")
"""Token mixers."""
CHANNELS = _kinds("channels", mlp="arbcli.config.parts.mlp")
"""Channel mixers."""
BESIDE = _kinds("beside")
"""Parts whose outputs are added to the embedding."""
BOOKS = _kinds("books", "codebook")
"""Codebooks of memories."""
CHUNKING = _kinds("chunking", "chunking")
"""Parts that split an outer stage into chunks."""
MEMORIES = _kinds("memories", "memories")
"""Parts between two blocks."""
AHEAD = _kinds("ahead", "ahead")
"""Second heads, for later bytes."""
COMPOSITE = _kinds("composite", "composite")
"""Heads that replace the linear head."""
SLOTS = {
    "mixer": MIXERS, "channel": CHANNELS, "beside": BESIDE, "codebook": BOOKS, "knowledge": BOOKS,
    "chunking": CHUNKING, "memories": MEMORIES, "ahead": AHEAD, "composite": COMPOSITE,
}  # fmt: skip
"""Kinds of parts that a field has, by the name of the field."""
