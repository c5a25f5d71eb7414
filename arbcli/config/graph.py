"""What a model of n-grams, codebooks, experts and a graph is made of."""

from dataclasses import dataclass
from typing import ClassVar

from arbcli.config.checks import check_choice
from arbcli.config.dense import ModelConfig
from arbcli.errors import ArbError

MOE_GATES = ("softmax", "softplus", "hash")
GRAPH_ATTENTIONS = ("latent", "none")
"""What blocks of a `GraphLM` may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig(ModelConfig):
    """The shape of a `GraphLM`: blocks with latent attention around codebooks, experts and a graph.

    `layers` blocks, half of them before the codebooks and the experts and half behind.
    """

    kind: ClassVar[str] = "graph"
    latent: int
    """Width of what keys and values are compressed to."""
    rotary: int
    """Width of the part of a head that is turned by position."""
    ngram_rows: int
    """Rows of the table that n-grams are hashed to."""
    ngram_dim: int
    key_dim: int
    """Width of a half key of a codebook."""
    codes: tuple[int, int]
    """Half keys of the shared codebook; its rows are their pairs."""
    code_dim: int
    code_heads: int
    knowledge: tuple[int, int]
    """Half keys of the knowledge codebook; its rows are their pairs."""
    knowledge_dim: int
    knowledge_heads: int
    top_k: int
    """Rows of a codebook that a head reads at each position."""
    experts: int
    expert_dim: int
    """Width that the shared projections bring the stream to, and experts work in."""
    expert_ffn: int
    """Width of an expert's gated MLP."""
    gate_dim: int
    """Width of the query that chooses experts."""
    adapter_rank: int
    """Rank of the adapter that every iteration has of its own."""
    edges: tuple[int, int]
    """Buckets of the graph, and edges of a bucket."""
    head_ffn: int
    """Width of the gated MLP of the byte head."""
    memory_rows: int = 65536
    """Entries of the memory of n-grams."""
    moe_top_k: int = 2
    """Experts that a position is sent to."""
    max_moe_iters: int = 4
    """Iterations over the experts."""
    moe_gate: str = "softmax"
    """How experts are chosen and weighed; one of `MOE_GATES`, see `arbcli.model.blocks.experts`."""
    shared_expert: bool = False
    """Whether there is one more expert, which every position goes to."""
    moe_clamp: bool = False
    """Whether what the experts' gates let in is bounded."""
    attention: bool = True
    sequencer: bool = True
    codebook: bool = True
    knowledge_codebook: bool = True
    moe: bool = True
    graph: bool = True
    router: bool = True
    memgram: bool = False

    def __post_init__(self) -> None:
        """Refuse what no model can be built from.

        Raises:
            ArbError: a size does not fit.
        """
        for name in ("codes", "knowledge", "edges"):
            if isinstance(value := getattr(self, name), list):  # JSON has no tuples
                object.__setattr__(self, name, tuple(value))
        # a slotted dataclass is a copy of the class that `super()` would mean here
        ModelConfig.__post_init__(self)
        if self.rotary % 2 or self.rotary > self.head_dim:
            raise ArbError(
                f"heads of {self.head_dim} have no even part of {self.rotary} to turn",
                hint="use a larger `dim`, or fewer `heads`",
                fields=("dim", "heads"),
            )
        if self.top_k > min(*self.codes, *self.knowledge):
            raise ArbError(f"`top_k` is {self.top_k}", hint="use no more than there are half keys")
        if self.weights != "ternary":
            raise ArbError(
                f"`weights` is `{self.weights}`, and this architecture has no float twin",
                hint="use a preset of dense blocks, such as `base`, for twins",
                fields=("weights",),
            )
        if self.moe_top_k > self.experts:
            raise ArbError(
                f"`moe_top_k` is {self.moe_top_k} of {self.experts} experts",
                hint=f"use 1 to {self.experts}",
                fields=("moe_top_k",),
            )
        check_choice("moe_gate", self.moe_gate, MOE_GATES)
        if self.graph and not self.codebook:
            raise ArbError(
                "the graph joins codes, and without the codebook there are none",
                hint="add `graph=False`",
                fields=("graph",),
            )

    @property
    def codebooks(self) -> dict[str, tuple[tuple[int, int], int, int]]:
        """Half keys, width of a row and heads of each codebook that there is, by its name."""
        found = {}
        if self.codebook:
            found["codebook"] = (self.codes, self.code_dim, self.code_heads)
        if self.knowledge_codebook:
            found["knowledge"] = (self.knowledge, self.knowledge_dim, self.knowledge_heads)
        return found
