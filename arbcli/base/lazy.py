"""Classes, functions and entries of mappings that are imported on first use."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

V = TypeVar("V")


def imported(name: str) -> Any:
    """Import a module's attribute by name.

    Args:
        name: `module:attribute`, for example `arbcli.model.parts.mlp:MLP`.
    """
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


class LazyMapping(Mapping[str, V]):
    """A mapping with given keys, whose values are loaded on first access.

    Args:
        names: the keys, in order.
        load: returns the value of a key; called once per key.
    """

    def __init__(self, names: Iterable[str], load: Callable[[str], V]) -> None:
        self.names = tuple(names)
        self.load = cache(load)

    def __getitem__(self, name: str) -> V:
        """Return the value of a name, which is loaded on first access."""
        if name not in self:
            raise KeyError(name)
        return self.load(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        """Return whether the mapping has a name; loads nothing."""
        return name in self.names


class ExtendedMapping(Mapping[str, V]):
    """A mapping with further entries that are only loaded for names missing in `first`.

    Args:
        first: entries that are looked up first.
        extend: returns further entries; called for names that are not in `first`, and to iterate.
    """

    def __init__(self, first: Mapping[str, V], extend: Callable[[], Mapping[str, V]]) -> None:
        self.first = first
        self.extend = cache(extend)

    def __getitem__(self, name: str) -> V:
        """Return the value of a name; the extension is loaded if `first` lacks it."""
        return self.first[name] if name in self.first else self.extend()[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, those of `first` first."""
        return iter(dict.fromkeys((*self.first, *self.extend())))

    def __len__(self) -> int:
        """Return the number of names."""
        return len({*self.first, *self.extend()})
