"""N-grams next to the embedding, and memories between two blocks.

Memories are codebooks, and iterated experts with a graph of codes.

A codebook is a table with product keys, or a vector quantiser.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from arbcli.base.errors import setting_error
from arbcli.config.layer_spec import LayerSpec
from arbcli.config.parts.base import BetweenConfig, PartConfig
from arbcli.config.settings import Setting
from arbcli.families.experts.config import ExpertsConfig

MAX_CODE_WIDTH = 2**15
CODE_SEARCHES = ("keys", "nearest")
"""Searches for rows of codebooks: product keys, or the nearest code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookConfig(PartConfig):
    """A table whose rows are found by product keys."""

    module: ClassVar[str] = "arbcli.families.graph.codebook:Codebook"
    kind: str = field(default="codebook", init=False)
    halves: tuple[int, int]
    """Numbers of half keys; each pair of them has a row of the table."""
    width: int
    """Width of a row."""
    heads: int
    """Number of queries per position."""
    key_width: int
    """Width of a half key."""
    top_k: int
    """Number of rows that a head reads per position."""

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return self.halves[0] * self.halves[1]

    def __post_init__(self) -> None:
        """Check types and sizes, and that there are enough half keys.

        Raises:
            ArbError: a value is invalid.
        """
        PartConfig.__post_init__(self)
        if self.top_k > min(self.halves):
            raise setting_error(
                f"`top_k` is {self.top_k}",
                f"use at most the number of half keys, {min(self.halves)}",
            )

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        keys = self.heads * self.key_width * (2 * spec.dim + sum(self.halves))
        return keys + self.heads * self.width * spec.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiserConfig(PartConfig):
    """A vector quantiser, which replaces each position by its nearest code."""

    module: ClassVar[str] = "arbcli.families.graph.quantiser:Quantiser"
    kind: str = field(default="quantiser", init=False)
    codes: Annotated[int, Setting(maximum=2**28)]
    width: Annotated[int, Setting(maximum=MAX_CODE_WIDTH)]
    """Width of a code."""
    patience: Annotated[int, Setting(maximum=127)] = 4
    """Number of passes of the clock hand, 1 to 127, after which an unused code is replaced."""

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of the commitment loss."""
        return {"commitment": 0.25}

    @property
    def rows(self) -> int:
        """Number of codes."""
        return self.codes

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        return self.width * (2 * spec.dim + self.codes)


BookConfig = CodebookConfig | QuantiserConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class IteratedConfig(PartConfig):
    """Iterated experts, adapters and a graph of codes, with adaptive halting per position."""

    kind: str = field(default="iterated", init=False)
    iterations: Annotated[int, Setting(maximum=256)]
    adapter_rank: int
    """Rank of the adapter of each iteration."""
    experts: ExpertsConfig | None = None
    expert_dim: int = 1
    """Width of the experts' inputs, to which the stream is projected."""
    gate_dim: int = 1
    """Width of the query that selects experts."""
    edges: tuple[int, int] | None = None
    """Number of buckets of the graph, and of edges per bucket; None for no graph."""
    graph_gate: bool = False
    """Whether messages of the graph are added to the query that selects experts."""
    graph_adapters: bool = False
    """Whether messages of the graph scale the hidden values of the adapters."""

    def __post_init__(self) -> None:
        """Check types and sizes, and that options of the graph have one.

        Raises:
            ArbError: a value is invalid.
        """
        PartConfig.__post_init__(self)
        for name, needed in (("graph_gate", ("edges", "experts")), ("graph_adapters", ("edges",))):
            missing = [part for part in needed if getattr(self, part) is None]
            if getattr(self, name) and missing:
                raise setting_error(
                    f"`{name}` needs `{missing[0]}`, and there are none",
                    f"add `{missing[0]}`, or leave `{name}` out",
                )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weight of the ponder cost."""
        return {"ponder": 0.01}

    @property
    def reads_text(self) -> bool:
        """Whether experts are selected by a hash of the text's bytes."""
        return self.experts is not None and self.experts.reads_text

    def products_with(self, spec: LayerSpec, code_width: int) -> float:
        """Return the number of multiplications per position, with codes of a width."""
        inward, inner = self.adapter_rank + 1, spec.dim * self.adapter_rank
        if self.experts:
            inward += self.expert_dim + self.gate_dim
            inner += spec.dim * self.expert_dim
            inner += self.experts.products_of(self.expert_dim, self.gate_dim)
        if self.edges:
            inner += spec.dim * code_width
            inner += code_width * self.gate_dim * self.graph_gate
            inner += code_width * self.adapter_rank * self.graph_adapters
        return self.iterations * (inner + spec.dim * inward)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoriesConfig(BetweenConfig):
    """Codebooks that read the same stream in parallel, then iterations."""

    kind: str = field(default="memories", init=False)
    codebook: BookConfig | None = None
    """Codebook whose codes are the nodes of the graph."""
    knowledge: BookConfig | None = None
    """Second codebook, without a graph."""
    iterated: IteratedConfig | None = None
    """Iterated experts after the codebooks."""

    def __post_init__(self) -> None:
        """Check types, and that a graph has codes.

        Raises:
            ArbError: a value is invalid.
        """
        PartConfig.__post_init__(self)
        if self.iterated and self.iterated.edges and not self.codebook:
            raise setting_error(
                "the graph needs the codes of the codebook, which is missing", "add `graph=False`"
            )

    @property
    def codebooks(self) -> dict[str, BookConfig]:
        """The existing codebooks by name."""
        codebooks = {"codebook": self.codebook, "knowledge": self.knowledge}
        return {name: book for name, book in codebooks.items() if book}

    @property
    def outputs(self) -> int:
        """Number of codebooks, whose outputs the stage's router mixes."""
        return len(self.codebooks)

    @property
    def reads_text(self) -> bool:
        """Whether experts are selected by a hash of the text's bytes."""
        return self.iterated is not None and self.iterated.reads_text

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        total = sum(book.products(spec, positions) for book in self.codebooks.values())
        if self.iterated:
            width = self.codebook.width if self.codebook else 0
            total += self.iterated.products_with(spec, width)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencerConfig(PartConfig):
    """Table of hashed n-grams of 2, 3 and 4 bytes."""

    module: ClassVar[str] = "arbcli.families.graph.sequencer:TextSequencer"
    code: ClassVar[str] = "arbcli.families.graph.modeling:Sequencer"
    kind: str = field(default="sequencer", init=False)
    rows: Annotated[int, Setting(maximum=2**31 - 1)]
    width: int
    """Width of a row."""

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        return spec.dim * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class MemGramConfig(PartConfig):
    """A memory of n-grams of 6 bytes."""

    module: ClassVar[str] = "arbcli.families.graph.memgram:MemGram"
    code: ClassVar[str] = "arbcli.families.graph.modeling:MemGram"
    kind: str = field(default="memgram", init=False)
    rows: Annotated[int, Setting(maximum=2**31 - 1)] = 65536
    """Number of entries."""

    def products(self, spec: LayerSpec, positions: float) -> float:
        """Return the number of multiplications per position; see `PartConfig.products`."""
        return spec.dim**2
