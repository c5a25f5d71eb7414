"""Configuration classes of parts by kind, imported on first use.

Kinds of the core are listed here, those of families in `arbcli.families`.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from arbcli.config.parts.base import PartConfig
from arbcli.families import FAMILIES, Family


class Kinds(Mapping[str, type[PartConfig]]):
    """Configuration classes by kind; a class is imported when it is looked up.

    Args:
        modules: module that defines the class of each kind.
    """

    def __init__(self, modules: dict[str, str]) -> None:
        self.modules = modules

    def __getitem__(self, kind: str) -> type[PartConfig]:
        """Import the configuration class of a kind."""
        module = import_module(self.modules[kind])
        return next(
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, PartConfig)
            and value.__dataclass_fields__["kind"].default == kind
        )

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the kinds."""
        return iter(self.modules)

    def __len__(self) -> int:
        """Return the number of kinds."""
        return len(self.modules)

    def __contains__(self, kind: object) -> bool:
        """Return whether a kind has this name; imports no class."""
        return kind in self.modules


def _kinds(slot: str, **core: str) -> Kinds:
    """Collect the kinds of a slot: those of the core, then those of the families."""
    assert slot in Family._fields
    families = {
        kind: f"arbcli.families.{family}.config"
        for family, slots in FAMILIES.items()
        for kind in getattr(slots, slot)
    }
    return Kinds(core | families)


MIXERS = _kinds("mixers", attention="arbcli.config.parts.attention")
"""Token mixers."""
CHANNELS = _kinds("channels", mlp="arbcli.config.parts.mlp")
"""Channel mixers."""
BESIDE = _kinds("beside")
"""Parts whose outputs are added to the embedding."""
BOOKS = _kinds("books")
"""Codebooks of memories."""
