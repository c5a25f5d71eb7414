"""Short forms of models: one function per family of presets, whose arguments are its options.

The arguments are also the fields of configurations saved by earlier versions, which have the name
of the family in `kind`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from arbcli.base.errors import ArbError
from arbcli.config.checks import (
    LARGEST,
    check_choice,
    check_integers,
    check_type,
)
from arbcli.config.model import (
    MOST_BLOCKS,
    MOST_OUTER_STAGES,
    BlockConfig,
    Blocks,
    Context,
    ModelConfig,
    StageConfig,
)
from arbcli.config.parts.attention import AttentionConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.settings import GRAPH, HNET, PRESETS_OWN, Setting, plain_type, settings_of
from arbcli.families.compressed.config import CompressedAttentionConfig
from arbcli.families.experts.config import GATES, ExpertsConfig
from arbcli.families.graph.config import (
    CODE_SEARCHES,
    BookConfig,
    CodebookConfig,
    IteratedConfig,
    MemGramConfig,
    MemoriesConfig,
    QuantiserConfig,
    SequencerConfig,
)
from arbcli.families.hnet.config import BOUNDARIES, ChunkingConfig
from arbcli.families.latent.config import LatentAttentionConfig
from arbcli.families.mamba.config import MambaConfig
from arbcli.model.rules import WITH_DIGITS

OUTER_BLOCKS = ("attention", "mamba")
"""Blocks of encoders and decoders of `hnet`: windowed attention with an MLP, or Mamba-2."""
MOST_RATIOS = 8
TOP_K_EXPERTS = 2
"""Default number of experts per position."""
OF_STAGES = ("outer_dim", "outer_layers", "outer_heads", "outer_ffn", "chunk_length")
"""Arguments of `hnet` with a number for each stage, the outermost first."""
LARGEST_OF = {
    "layers": MOST_BLOCKS, "outer_layers": 256, "max_moe_iters": 256, "ngram_rows": 2**31 - 1,
    "memory_rows": 2**31 - 1,
}  # fmt: skip
"""Upper bounds of sizes by argument; `LARGEST` for all others."""
STORAGE = ("scale_type", "rule", "digits", "votes_fixes", "direction", "weights", "objective")
"""Arguments of every family that are fields of `ModelConfig`."""
PART_RULES = ("attention_rule", "mlp_rule")
"""Arguments of every family that are rules of parts."""

Dim = Annotated[int, Setting("Width of the residual stream.", least=1, default=PRESETS_OWN)]
Layers = Annotated[int, Setting("Number of blocks.", least=1, default=PRESETS_OWN)]
Heads = Annotated[int, Setting("Attention heads.", least=1, default=PRESETS_OWN)]
FFN = Annotated[int, Setting("Width of the MLPs.", least=1, default=PRESETS_OWN)]
SubNorms = Annotated[bool, Setting("A norm before each output projection.")]
Streams = Annotated[
    int,
    Setting(
        "Residual streams of the innermost stage, mixed by hyper-connections: 1, 2, 4 or 8."
        " Codebooks and the router need 1.",
        least=1,
    ),
]
EXPERTS = Setting(
    "Experts in each block of the innermost stage, each as wide as `ffn`, instead of its MLP; for"
    " presets with a graph, the iterated experts.",
    least=1,
    default=PRESETS_OWN,
)
Gate = Annotated[
    str,
    Setting(
        "Choice of experts: softmax or softplus of their scores, or hash, by the last three bytes.",
        choices=GATES,
    ),
]
SharedExpert = Annotated[bool, Setting("One more expert that every position uses.")]
Clamp = Annotated[
    bool,
    Setting(
        "Clamp the inputs of the experts' SwiGLU: gates to at most 10, the others to -10 to 10."
    ),
]
Window = Annotated[
    int,
    Setting(
        "Bytes of the sliding window of compressed attention, or of the outer blocks of hnet"
        " presets.",
        least=1,
        default=PRESETS_OWN,
    ),
]
TopK = Annotated[
    int,
    Setting(
        "Entries that compressed attention selects, or rows that each head of a codebook reads.",
        least=1,
        default=PRESETS_OWN,
    ),
]


def _switch(words: str, option: str | None = None) -> Setting:
    """Return the setting of a part that can be switched on or off."""
    return Setting(words, GRAPH, default="", option=option)


def _mixture(
    experts: int, top_k_name: str, top_k: int, width: int, gate: str, shared: bool, clamp: bool
) -> ExpertsConfig:
    """Build experts; errors name the argument of the short form for `top_k`."""
    check_choice("moe_gate", gate, GATES)
    if top_k > experts:
        raise ArbError(
            f"`{top_k_name}` is {top_k} of {experts} experts",
            hint=f"use 1 to {experts}",
            fields=(top_k_name,),
        )
    return ExpertsConfig(
        experts=experts, top_k=top_k, width=width, gate=gate, shared=shared, clamp=clamp
    )


def channels(
    layers: int,
    *,
    ffn: FFN,
    sub_norms: SubNorms = True,
    experts: Annotated[int | None, EXPERTS] = None,
    top_k_experts: Annotated[
        int | None,
        Setting(
            "Experts that a position uses; for presets with a graph, the same as `moe_top_k`.",
            least=1,
            default="the preset's, or 2",
        ),
    ] = None,
    moe_gate: Gate = GATES[0],
    hash_layers: Annotated[
        int,
        Setting(
            "First blocks of the innermost stage that choose experts by a hash.",
            least=0,
            default=PRESETS_OWN,
        ),
    ] = 0,
    shared_expert: SharedExpert = False,
    moe_clamp: Clamp = False,
) -> list[MLPConfig | ExpertsConfig]:
    """Build the channel mixers of a list of blocks: MLPs, or experts of width `ffn`.

    The first `hash_layers` blocks, or all if there are fewer, select experts by a hash, and the
    others by `moe_gate`.
    """
    if experts is None:
        given = {
            "top_k_experts": top_k_experts is not None,
            "moe_gate": moe_gate != GATES[0],
            "hash_layers": hash_layers,
            "shared_expert": shared_expert,
            "moe_clamp": moe_clamp,
        }
        if names := [name for name, is_given in given.items() if is_given]:
            raise ArbError(
                f"`{names[0]}` only applies to experts, and the model has none",
                hint="give `experts` too",
                fields=(names[0], "experts"),
            )
        return [MLPConfig(width=ffn, sub_norm=sub_norms)] * layers
    top_k = TOP_K_EXPERTS if top_k_experts is None else top_k_experts
    learned = _mixture(experts, "top_k_experts", top_k, ffn, moe_gate, shared_expert, moe_clamp)
    hashed = replace(learned, gate="hash")
    return [hashed if index < hash_layers else learned for index in range(layers)]


CHANNEL = {
    name: one
    for name, one in inspect.signature(channels).parameters.items()
    if name not in ("layers", "sub_norms")
}
"""Arguments of `channels` that its families share."""


def _split_arguments(others: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into those for `channels` and those in `STORAGE`."""
    channel = {name: value for name, value in others.items() if name in CHANNEL}
    return channel, {name: value for name, value in others.items() if name not in CHANNEL}


def _stack(
    mixers: Sequence[PartConfig],
    dim: int,
    layers: int,
    ctx: int,
    sub_norms: bool,
    streams: int,
    others: dict[str, Any],
) -> ModelConfig:
    """Build a model of one stage whose blocks cycle through the mixers, with `channels`."""
    channel, storage = _split_arguments(others)
    blocks = tuple(
        BlockConfig(mixer=mixers[index % len(mixers)], channel=part)
        for index, part in enumerate(channels(layers, sub_norms=sub_norms, **channel))
    )
    stage = StageConfig(dim=dim, streams=streams, blocks=blocks)
    return ModelConfig(ctx=ctx, stages=(stage,), **storage)


def dense(
    *,
    dim: Dim,
    layers: Layers,
    heads: Heads,
    ctx: Context,
    sub_norms: SubNorms = True,
    streams: Streams = 1,
    key_heads: Annotated[
        int | None,
        Setting(
            "Only with tiny, small, base and 1b: heads of keys and values, each shared by as many"
            " query heads (grouped-query attention).",
            least=1,
            default="as many as heads",
        ),
    ] = None,
    **others: Any,
) -> ModelConfig:
    """Build a model of `layers` blocks of attention and an MLP or experts: see `channels`."""
    attention = AttentionConfig(heads=heads, kv_heads=key_heads, sub_norm=sub_norms)
    return _stack([attention], dim, layers, ctx, sub_norms, streams, others)


def compressed(
    *,
    dim: Dim,
    layers: Layers,
    heads: Heads,
    ctx: Context,
    sub_norms: SubNorms = True,
    streams: Streams = 1,
    head_width: int | None = None,
    kv_heads: int = 1,
    rotary: int | None = None,
    window: Window = 128,
    ratios: tuple[int, ...] = (4, 128),
    indexed_ratio: int = 4,
    top_k: TopK = 128,
    index_heads: int = 4,
    index_width: int = 32,
    mean_ratio: int | None = None,
    key_gain: bool = False,
    **others: Any,
) -> ModelConfig:
    """Build a model of blocks of compressed attention and an MLP or experts: see `channels`.

    Blocks cycle through the `ratios`. Above a ratio of `indexed_ratio`, positions attend to all
    entries, without an indexer; from `mean_ratio` on, an entry is the mean of its positions.
    """
    if not 1 <= len(ratios) <= MOST_RATIOS or min(ratios) < 2:
        raise ArbError(
            f"`ratios` has {len(ratios)} numbers, of which the least is {min(ratios, default=0):,}",
            hint=f"use 1 to {MOST_RATIOS} of them, and 2 bytes or more",
            fields=("ratios",),
        )
    mixers = [
        CompressedAttentionConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            rotary=rotary,
            window=window,
            ratio=ratio,
            pooling="softmax" if mean_ratio is None or ratio < mean_ratio else "mean",
            key_gain=key_gain,
            top_k=top_k if ratio <= indexed_ratio else None,
            index_heads=index_heads,
            index_width=index_width,
            sub_norm=sub_norms,
        )
        for ratio in ratios
    ]
    return _stack(mixers, dim, layers, ctx, sub_norms, streams, others)


def graph(
    *,
    dim: Dim,
    layers: Layers,
    heads: Heads,
    ffn: FFN,
    ctx: Context,
    latent: int,
    rotary: int,
    ngram_rows: int,
    ngram_dim: int,
    key_dim: int,
    codes: tuple[int, int],
    code_dim: int,
    code_heads: int,
    knowledge: tuple[int, int],
    knowledge_dim: int,
    knowledge_heads: int,
    top_k: TopK,
    experts: Annotated[int, EXPERTS],
    expert_dim: int,
    expert_ffn: int,
    gate_dim: int,
    adapter_rank: int,
    edges: tuple[int, int],
    head_ffn: int,
    sub_norms: SubNorms = True,
    streams: Streams = 1,
    memory_rows: int = 65536,
    moe_top_k: Annotated[
        int, Setting("Iterated experts that a position uses.", GRAPH, least=1, default=PRESETS_OWN)
    ] = 2,
    max_moe_iters: Annotated[
        int, Setting("Iterations over the experts.", GRAPH, least=1, default=PRESETS_OWN)
    ] = 4,
    moe_gate: Gate = GATES[0],
    shared_expert: SharedExpert = False,
    moe_clamp: Clamp = False,
    attention: bool = True,
    sequencer: Annotated[bool, _switch("N-grams added to the embedding.")] = True,
    code_search: Annotated[
        str,
        Setting(
            "Lookup in codebooks: keys reads several rows by product keys; nearest reads the"
            " nearest code of a vector quantiser, and ignores `top_k`.",
            GRAPH,
            choices=CODE_SEARCHES,
        ),
    ] = CODE_SEARCHES[0],
    codebook: Annotated[bool, _switch("The shared codebook, which the graph needs.")] = True,
    knowledge_codebook: Annotated[bool, _switch("The knowledge codebook.", "knowledge")] = True,
    moe: Annotated[bool, _switch("The iterated experts.")] = True,
    graph: Annotated[bool, _switch("The graph of codes.")] = True,
    graph_gate: bool = False,
    graph_adapters: bool = False,
    router: Annotated[bool, _switch("The router before the byte head.")] = True,
    memgram: Annotated[
        bool, _switch("A memory of the bytes that followed each n-gram of the text.")
    ] = False,
    **storage: Any,
) -> ModelConfig:
    """Build a model of blocks of latent attention, codebooks and iterated experts."""
    check_choice("code_search", code_search, CODE_SEARCHES)

    def book(halves: tuple[int, int], width: int, heads: int) -> BookConfig:
        if code_search == CODE_SEARCHES[1]:
            return QuantiserConfig(codes=halves[0] * halves[1], width=width)
        return CodebookConfig(
            halves=halves, width=width, heads=heads, key_width=key_dim, top_k=top_k
        )

    mixture = _mixture(
        experts, "moe_top_k", moe_top_k, expert_ffn, moe_gate, shared_expert, moe_clamp
    )
    iterated = IteratedConfig(
        iterations=max_moe_iters,
        adapter_rank=adapter_rank,
        experts=mixture if moe else None,
        expert_dim=expert_dim,
        gate_dim=gate_dim,
        edges=edges if graph else None,
        graph_gate=graph_gate,
        graph_adapters=graph_adapters,
    )
    # the same norms as in files of before, which had no choice of them
    mixer = LatentAttentionConfig(heads=heads, latent=latent, rotary=rotary)
    block = BlockConfig(mixer=mixer if attention else None, channel=MLPConfig(width=ffn))
    memories = MemoriesConfig(
        place=layers // 2,
        codebook=book(codes, code_dim, code_heads) if codebook else None,
        knowledge=book(knowledge, knowledge_dim, knowledge_heads) if knowledge_codebook else None,
        iterated=iterated if moe or graph else None,
    )
    stage = StageConfig(
        dim=dim, streams=streams, blocks=(block,) * layers, memories=memories, router=router
    )
    beside: list[PartConfig] = []
    if sequencer:
        beside.append(SequencerConfig(rows=ngram_rows, width=ngram_dim))
    if memgram:
        beside.append(MemGramConfig(rows=memory_rows))
    head = MLPConfig(width=head_ffn, sub_norm=sub_norms)
    return ModelConfig(ctx=ctx, stages=(stage,), beside=tuple(beside), head=head, **storage)


def hnet(
    *,
    dim: Dim,
    layers: Layers,
    heads: Heads,
    ctx: Context,
    outer_dim: tuple[int, ...] | int,
    outer_layers: tuple[int, ...] | int,
    outer_heads: tuple[int, ...] | int,
    outer_ffn: tuple[int, ...] | int,
    chunk_length: Annotated[
        tuple[int, ...] | int,
        Setting(
            "Average length of a chunk, in positions, at every stage.",
            HNET,
            least=2,
            default=PRESETS_OWN,
        ),
    ],
    window: Window,
    sub_norms: SubNorms = True,
    streams: Streams = 1,
    outer_blocks: Annotated[
        str,
        Setting(
            "Blocks of encoders and decoders: attention in a window, or mamba (Mamba-2).",
            HNET,
            choices=OUTER_BLOCKS,
        ),
    ] = OUTER_BLOCKS[0],
    states: int = 64,
    boundaries: Annotated[
        str,
        Setting(
            "Where chunks begin: learned; every, at a fixed length; or space, after each space.",
            HNET,
            choices=BOUNDARIES,
        ),
    ] = "learned",
    **others: Any,
) -> ModelConfig:
    """Build a model with stages of chunks: outer blocks, and dense blocks in the innermost stage.

    Only the innermost blocks may have experts: see `channels`. A single number in place of a tuple
    applies to all outer stages.
    """
    check_choice("outer_blocks", outer_blocks, OUTER_BLOCKS)
    given = dict(
        zip(
            OF_STAGES,
            (outer_dim, outer_layers, outer_heads, outer_ffn, chunk_length),
            strict=True,
        )
    )
    number = len(outer_dim) if isinstance(outer_dim, tuple) else 1
    sizes = {
        name: value if isinstance(value, tuple) else (value,) * number
        for name, value in given.items()
    }
    for name, values in sizes.items():
        if len(values) != number or not number:
            raise ArbError(
                f"`{name}` has numbers for {len(values)} stages, and `outer_dim` for {number}",
                hint=f"give a number for each stage, of which there are 1 to {MOST_OUTER_STAGES}",
                fields=(name, "outer_dim"),
            )
    stages = []
    for index in range(number):
        width, depth, own_heads, own_ffn, length = (sizes[name][index] for name in OF_STAGES)
        if outer_blocks == "mamba":
            block = BlockConfig(mixer=MambaConfig(heads=own_heads, states=states))
        else:
            mixer = AttentionConfig(heads=own_heads, window=window, sub_norm=sub_norms)
            block = BlockConfig(mixer=mixer, channel=MLPConfig(width=own_ffn, sub_norm=sub_norms))
        chunking = ChunkingConfig(boundaries=boundaries, length=length)
        blocks = (block,) * depth
        stages.append(StageConfig(dim=width, before=blocks, after=blocks, chunking=chunking))
    channel, storage = _split_arguments(others)
    attention = AttentionConfig(heads=heads, sub_norm=sub_norms)
    innermost = tuple(
        BlockConfig(mixer=attention, channel=part)
        for part in channels(layers, sub_norms=sub_norms, **channel)
    )
    stages.append(StageConfig(dim=dim, streams=streams, blocks=innermost))
    return ModelConfig(ctx=ctx, stages=tuple(stages), **storage)


def with_part_rules(
    config: ModelConfig,
    *,
    attention_rule: Annotated[
        str | None,
        Setting(
            "Update rule of attention, or of Mamba, in blocks.",
            choices=WITH_DIGITS,
            default="that of `rule`",
        ),
    ] = None,
    mlp_rule: Annotated[
        str | None,
        Setting(
            "Update rule of MLPs and experts in blocks. With nibble they take 1.26 bytes per"
            " weight, with moment 2.26.",
            choices=WITH_DIGITS,
            default="that of `rule`",
        ),
    ] = None,
) -> ModelConfig:
    """Return a model whose mixers or channel mixers have other rules; None keeps theirs.

    Raises:
        ArbError: no block has a part that a rule is for.
    """
    if attention_rule is None and mlp_rule is None:
        return config
    if attention_rule and not any(block.mixer for _, block in config.blocks()):
        raise _without_part("attention_rule", "attention or Mamba")
    if mlp_rule and not any(block.channel for _, block in config.blocks()):
        raise _without_part("mlp_rule", "an MLP or experts")

    def of(blocks: Blocks) -> Blocks:
        return tuple(
            BlockConfig(
                mixer=_with_rule(block.mixer, attention_rule),
                channel=_with_rule(block.channel, mlp_rule),
            )
            for block in blocks
        )

    stages = (
        replace(one, blocks=of(one.blocks), before=of(one.before), after=of(one.after))
        for one in config.stages
    )
    return replace(config, stages=tuple(stages))


def _without_part(name: str, part: str) -> ArbError:
    return ArbError(
        f"`{name}` is for blocks with {part}, and the model has none",
        hint=f"leave `{name}` out",
        fields=(name,),
    )


def _with_rule(part: PartConfig | None, rule: str | None) -> PartConfig | None:
    """Return a part with another rule, if there is a part and a rule."""
    return replace(part, rule=rule) if part and rule else part


FAMILIES: dict[str, Callable[..., ModelConfig]] = {
    function.__name__: function for function in (dense, graph, hnet, compressed)
}
"""Short forms by name of the family."""


def arguments(family: str) -> dict[str, inspect.Parameter]:
    """Return the arguments of a short form by name, including those for `channels` and storage."""
    known = inspect.signature(FAMILIES[family]).parameters
    own = {name: one for name, one in known.items() if one.kind is not one.VAR_KEYWORD}
    storage = {name: inspect.signature(ModelConfig).parameters[name] for name in STORAGE}
    rules = {name: inspect.signature(with_part_rules).parameters[name] for name in PART_RULES}
    return own | ({} if family == "graph" else CHANNEL) | storage | rules


ARGUMENTS = {name: one for family in FAMILIES for name, one in arguments(family).items()}
"""Arguments of all families by name."""
MODEL_SETTINGS = {
    name: one
    for source in (ModelConfig, with_part_rules, dense, channels, compressed, graph, hnet)
    for name, one in settings_of(source).items()
}
"""Settings of models, by name of the argument."""


def assemble(family: str, values: dict[str, Any]) -> ModelConfig:
    """Build a model from the arguments of a short form, from Python or JSON.

    Raises:
        ArbError: a value has the wrong type, is out of bounds, or contradicts another.
        TypeError: an argument is missing or unknown.
    """
    known = arguments(family)
    if missing := [n for n, one in known.items() if one.default is one.empty and n not in values]:
        raise TypeError(f"a model of the family `{family}` has no {', '.join(missing)}")
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise TypeError(f"a model of the family `{family}` has no `{name}`")
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        check_type(name, value, plain_type(known[name].annotation))
        checked[name] = value
        check_integers(name, value, 1, LARGEST_OF.get(name, LARGEST))
    rules: dict[str, Any] = {name: checked.pop(name) for name in PART_RULES if name in checked}
    return with_part_rules(FAMILIES[family](**checked), **rules)
