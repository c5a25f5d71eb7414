"""Codebooks, and experts that are iterated over a graph of codes, between two blocks of a stage.

A codebook is a table that is read by product keys, or a vector quantiser.
"""

from dataclasses import dataclass, field

from arbcli.config.checks import check_at_most
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.experts import ExpertsConfig
from arbcli.config.site import Site
from arbcli.errors import ArbError

MOST_CODES, MOST_CODE_WIDTH = 2**28, 2**15
CODE_SEARCHES = ("keys", "nearest")
"""How rows of codebooks are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookConfig(PartConfig):
    """A table whose rows are found by product keys."""

    kind: str = field(default="codebook", init=False)
    halves: tuple[int, int]
    """Half keys; the rows of the table are their pairs."""
    width: int
    """Of a row."""
    heads: int
    """Queries of a position."""
    key_width: int
    """Of a half key."""
    top_k: int
    """Rows that a head reads at each position."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.halves[0] * self.halves[1]

    def __post_init__(self) -> None:
        """Check types and sizes, and that there are enough half keys.

        Raises:
            ArbError: a value does not fit.
        """
        PartConfig.__post_init__(self)
        if self.top_k > min(self.halves):
            raise ArbError(
                f"`top_k` is {self.top_k}",
                hint=f"use at most the number of half keys, {min(self.halves)}",
                fields=("top_k",),
            )

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        keys = self.heads * self.key_width * (2 * site.dim + sum(self.halves))
        return keys + self.heads * self.width * site.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiserConfig(PartConfig):
    """Codes of which the nearest stands for each position."""

    kind: str = field(default="quantiser", init=False)
    codes: int
    width: int
    """Of a code."""
    patience: int = 4
    """Lives of a code, 1 to 127: a visit of the hand takes one, and being chosen gives all back."""

    @property
    def rows(self) -> int:
        """Number of codes."""
        return self.codes

    def __post_init__(self) -> None:
        """Check types and sizes.

        Raises:
            ArbError: a value does not fit.
        """
        PartConfig.__post_init__(self)
        for name, most in (("codes", MOST_CODES), ("width", MOST_CODE_WIDTH), ("patience", 127)):
            check_at_most(name, getattr(self, name), most)

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        return self.width * (2 * site.dim + self.codes)


BookConfig = CodebookConfig | QuantiserConfig
BOOKS: dict[str, type[PartConfig]] = {"codebook": CodebookConfig, "quantiser": QuantiserConfig}
"""Configurations of what holds codes, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IteratedConfig(PartConfig):
    """Iterations over experts, adapters and a graph of codes, which each position halts itself."""

    kind: str = field(default="iterated", init=False)
    iterations: int
    adapter_rank: int
    """Rank of the adapter that every iteration has of its own."""
    experts: ExpertsConfig | None = None
    expert_dim: int = 1
    """Width that the stream is projected to for the experts."""
    gate_dim: int = 1
    """Width of the query that chooses experts."""
    edges: tuple[int, int] | None = None
    """Buckets of the graph, and edges of a bucket; None: no graph."""
    graph_gate: bool = False
    """Whether what the edges carry enters the query that chooses experts."""
    graph_adapters: bool = False
    """Whether what the edges carry scales the inner numbers of the adapters."""

    def __post_init__(self) -> None:
        """Check types and sizes, and that what reads the graph has one.

        Raises:
            ArbError: a value does not fit.
        """
        PartConfig.__post_init__(self)
        for name, needed in (("graph_gate", ("edges", "experts")), ("graph_adapters", ("edges",))):
            missing = [part for part in needed if getattr(self, part) is None]
            if getattr(self, name) and missing:
                raise ArbError(
                    f"`{name}` needs `{missing[0]}`, and there are none",
                    hint=f"add `{missing[0]}`, or leave `{name}` out",
                    fields=(name, missing[0]),
                )

    @property
    def reads_text(self) -> bool:
        """Whether experts are chosen by the text's bytes."""
        return self.experts is not None and self.experts.reads_text

    def products_with(self, site: Site, code_width: int) -> float:
        """Count the multiplications of each position, with codes of this width."""
        inward, found = self.adapter_rank + 1, site.dim * self.adapter_rank
        if self.experts:
            inward += self.expert_dim + self.gate_dim
            found += site.dim * self.expert_dim
            found += self.experts.products_of(self.expert_dim, self.gate_dim)
        if self.edges:
            found += site.dim * code_width
            found += code_width * self.gate_dim * self.graph_gate
            found += code_width * self.adapter_rank * self.graph_adapters
        return self.iterations * (found + site.dim * inward)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoriesConfig(PartConfig):
    """Codebooks that read the same stream in parallel, then iterations."""

    kind: str = field(default="memories", init=False)
    place: int = 0
    """Number of blocks before them; the other blocks of the stage follow."""
    codebook: BookConfig | None = None
    """Of the codes that the graph joins."""
    knowledge: BookConfig | None = None
    iterated: IteratedConfig | None = None

    def __post_init__(self) -> None:
        """Check types, and that a graph has codes.

        Raises:
            ArbError: a value does not fit.
        """
        PartConfig.__post_init__(self)
        if self.iterated and self.iterated.edges and not self.codebook:
            raise ArbError(
                "the graph joins codes, and without the codebook there are none",
                hint="add `graph=False`",
                fields=("graph",),
            )

    @property
    def codebooks(self) -> dict[str, BookConfig]:
        """The codebooks that there are, by name."""
        found = {"codebook": self.codebook, "knowledge": self.knowledge}
        return {name: book for name, book in found.items() if book}

    @property
    def reads_text(self) -> bool:
        """Whether experts are chosen by the text's bytes."""
        return self.iterated is not None and self.iterated.reads_text

    def products(self, site: Site, positions: float) -> float:
        """Count the multiplications of each position; see `PartConfig.products`."""
        found = sum(book.products(site, positions) for book in self.codebooks.values())
        if self.iterated:
            width = self.codebook.width if self.codebook else 0
            found += self.iterated.products_with(site, width)
        return found
