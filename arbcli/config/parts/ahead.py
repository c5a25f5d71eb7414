"""The head that predicts bytes beyond the next one."""

from dataclasses import dataclass, field
from typing import ClassVar

from arbcli.config.parts.base import PartConfig
from arbcli.config.site import Site
from arbcli.errors import ArbError

BYTES = 256
"""Symbols that it predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadConfig(PartConfig):
    """A recurrence over the bytes that follow a position, which guesses each from those before."""

    LEAST: ClassVar[int] = 2
    MOST: ClassVar[int] = 8

    kind: str = field(default="ahead", init=False)
    positions: int
    """Bytes that are predicted at a position, that of the model's own head among them."""
    width: int
    """Of the hidden layer of its MLP."""
    weight: float = 0.1
    """Counts all of its losses together in the loss that is minimised, above 0 and at most 1."""

    def __post_init__(self) -> None:
        """Check numbers.

        Raises:
            ArbError: one is out of range.
        """
        PartConfig.__post_init__(self)
        if not self.LEAST <= self.positions <= self.MOST:
            raise ArbError(
                f"`positions` is {self.positions}",
                hint=f"use {self.LEAST} to {self.MOST}",
                fields=("positions",),
            )
        if not 0 < self.weight <= 1:
            raise ArbError(
                f"`weight` is {self.weight}",
                hint="use a number above 0 and at most 1",
                fields=("weight",),
            )

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of its losses, that of the byte after the next one first."""
        return tuple(f"next_{number}" for number in range(2, self.positions + 1))

    def check_at(self, site: Site) -> None:
        """Check that windows have so many bytes.

        Raises:
            ArbError: they have fewer.
        """
        if self.positions >= site.ctx:
            raise ArbError(
                f"`positions` is {self.positions} in a context of {site.ctx}",
                hint="use fewer, or a longer context",
                fields=("positions",),
            )

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        each = site.dim * (site.dim + BYTES) + 3 * site.dim * self.width
        return (self.positions - 1) * each
