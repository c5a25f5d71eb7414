"""What a model is made of: presets, update rules and scale types, as plain frozen values."""

import dataclasses
from dataclasses import dataclass

from arbcli.directions import DIRECTIONS
from arbcli.errors import ArbError
from arbcli.rules import RULES, find_rule

VOCABULARY = 256
"""Every byte is a symbol."""

SCALE_TYPES = {f"T{size}": size for size in (4, 6, 8, 16, 32, 64, 96, 128)}
"""Scale type to group size: how many weights of a row share one scale."""

WEIGHTS = ("ternary", "float", "ste")

PART_OPTIONS = {
    "attention": "--attention/--no-attention",
    "sequencer": "--sequencer/--no-sequencer",
    "codebook": "--codebook/--no-codebook",
    "knowledge_codebook": "--knowledge/--no-knowledge",
    "moe": "--moe/--no-moe",
    "graph": "--graph/--no-graph",
    "router": "--router/--no-router",
    "memgram": "--memgram/--no-memgram",
    "moe_top_k": "--moe-top-k",
    "max_moe_iters": "--max-moe-iters",
}
"""Fields of a `GraphConfig` that have an option, which no other preset takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a `ByteLM`, and how its weights are stored."""

    dim: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Attention heads of a block; they divide `dim` into even widths."""
    ffn: int
    """Width of the gated MLP."""
    ctx: int
    """Context in bytes that the model is trained on."""
    scale_type: str = "T32"
    """How many weights share a scale."""
    rule: str = "moment"
    """The update rule, which decides what is stored beside the trits."""
    direction: str | None = "orthogonal"
    """The direction of a step; `factored` stores statistics of rows and columns."""
    weights: str = "ternary"
    """`ternary`, or a twin to compare with: `float`, or `ste` (float latents, ternary forward)."""
    sub_norms: bool = True
    """Whether a norm precedes the output projections too."""

    def __post_init__(self) -> None:
        """Refuse what no model can be built from.

        Raises:
            ArbError: a size is not positive, or a name is unknown.
        """
        for name in ("dim", "layers", "heads", "ffn", "ctx"):
            if getattr(self, name) < 1:
                raise ArbError(f"`{name}` is {getattr(self, name)}", hint="use 1 or more")
        if self.dim % (2 * self.heads):
            raise ArbError(
                f"{self.heads} heads do not divide a width of {self.dim} into even parts",
                hint=f"make `--dim` a multiple of {2 * self.heads}, or choose other `--heads`",
            )
        for option, value, known in (
            ("--tscale-type", self.scale_type, SCALE_TYPES),
            ("--rule", self.rule, RULES),
            ("--direction", self.direction or DIRECTIONS[0], DIRECTIONS),
            ("--weights", self.weights, WEIGHTS),
        ):
            if value not in known:
                names = ", ".join(f"`{name}`" for name in known)
                raise ArbError(f"`{option}` is `{value}`", hint=f"choose one of: {names}")

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return SCALE_TYPES[self.scale_type]

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.dim // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig(ModelConfig):
    """The shape of a `GraphLM`: blocks with latent attention around codebooks, experts and a graph.

    `layers` blocks, half of them before the codebooks and the experts and half behind.
    """

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
        # a slotted dataclass is a copy of the class that `super()` would mean here
        ModelConfig.__post_init__(self)
        for name in ("codes", "knowledge", "edges"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) in (int, tuple) and min(value if type(value) is tuple else (value,)) < 1:
                name = PART_OPTIONS.get(field.name, field.name)
                raise ArbError(f"`{name}` is {value}", hint="use 1 or more")
        if self.rotary % 2 or self.rotary > self.head_dim:
            raise ArbError(
                f"heads of {self.head_dim} have no even part of {self.rotary} to turn",
                hint="use a larger `--dim`, or fewer `--heads`",
            )
        if self.top_k > min(*self.codes, *self.knowledge):
            raise ArbError(f"`top_k` is {self.top_k}", hint="use no more than there are half keys")
        if self.weights != "ternary":
            raise ArbError(
                f"`--weights` is `{self.weights}`, and this architecture has no float twin",
                hint="use a preset of dense blocks, such as `base`, for twins",
            )
        if self.moe_top_k > self.experts:
            raise ArbError(
                f"`--moe-top-k` is {self.moe_top_k} of {self.experts} experts",
                hint=f"use 1 to {self.experts}",
            )
        if self.graph and not self.codebook:
            raise ArbError(
                "the graph joins codes, and without the codebook there are none",
                hint="add `--no-graph`",
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


def preset(name: str, **overrides: object) -> ModelConfig:
    """Build the configuration called `name`, with the overrides that are not None.

    A rule brings its own direction, unless one is given.

    Raises:
        ArbError: no preset has that name, or a value does not fit.
    """
    if name not in PRESETS:
        names = ", ".join(f"`{known}`" for known in PRESETS)
        raise ArbError(f"no preset is named `{name}`", hint=f"choose one of: {names}")
    given = {key: value for key, value in overrides.items() if value is not None}
    fields = {field.name for field in dataclasses.fields(PRESETS[name])}
    if others := [key for key in given if key not in fields]:
        options = ", ".join(f"`{PART_OPTIONS.get(key, key)}`" for key in others)
        of_graph = " or ".join(f"`{k}`" for k, v in PRESETS.items() if isinstance(v, GraphConfig))
        raise ArbError(
            f"the preset `{name}` has no such part: {options}", hint=f"use it with {of_graph}"
        )
    given.setdefault("rule", PRESETS[name].rule)
    if given["rule"] in RULES:
        rule = find_rule(given["rule"])
        if rule.direction is None and "direction" in given:
            raise ArbError(
                f"the rule `{given['rule']}` takes no direction", hint="leave `--direction` out"
            )
        given.setdefault("direction", rule.direction)
    return dataclasses.replace(PRESETS[name], **given)


PRESETS = {
    "tiny": ModelConfig(dim=256, layers=4, heads=4, ffn=704, ctx=64),
    "small": ModelConfig(dim=384, layers=6, heads=6, ffn=1024, ctx=256),
    "base": ModelConfig(dim=768, layers=12, heads=12, ffn=2048, ctx=1024),
    "1b": ModelConfig(dim=2048, layers=24, heads=16, ffn=5632, ctx=2048),
    "arb-tiny": GraphConfig(
        dim=256, layers=4, heads=4, ffn=832, ctx=256, rule="moment",
        latent=128, rotary=32, ngram_rows=16384, ngram_dim=64, key_dim=32,
        codes=(64, 64), code_dim=64, code_heads=2, knowledge=(128, 128), knowledge_dim=32,
        knowledge_heads=4, top_k=4, experts=8, expert_dim=160, expert_ffn=160, gate_dim=32,
        adapter_rank=16, edges=(4096, 4), head_ffn=416, moe=False, graph=False,
    ),
    "arb-3b": GraphConfig(
        dim=2560, layers=20, heads=20, ffn=10240, ctx=64, rule="nibble", direction="factored",
        latent=512, rotary=32, ngram_rows=65987, ngram_dim=512, key_dim=128,
        codes=(512, 256), code_dim=1024, code_heads=4, knowledge=(2500, 2000), knowledge_dim=64,
        knowledge_heads=16, top_k=8, experts=56, expert_dim=1280, expert_ffn=2560, gate_dim=224,
        adapter_rank=64, edges=(32768, 4), head_ffn=17600,
    ),
}  # fmt: skip
