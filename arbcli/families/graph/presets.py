"""Presets with n-grams, codebooks, iterated experts and a graph of codes."""

from typing import Annotated, Any

from arbcli.base.errors import setting_error
from arbcli.config.model import MAX_BLOCKS, BlockConfig, Context, ModelConfig, StageConfig
from arbcli.config.parts.base import PartConfig
from arbcli.config.parts.mlp import MLPConfig
from arbcli.config.settings import GRAPH, PRESETS_OWN, Setting, check_choice
from arbcli.config.short_forms import FFN, Dim, Form, Heads, Layers, Streams, SubNorms, TopK
from arbcli.families.experts.config import GATES
from arbcli.families.experts.presets import EXPERTS, Clamp, Gate, SharedExpert, build_experts
from arbcli.families.graph import config
from arbcli.families.latent.config import LatentAttentionConfig

ATTENTIONS = ("latent", "none")
"""Values of the option `attention`."""


def _switch(words: str, option: str | None = None) -> Setting:
    """Return the setting of a part that can be switched on or off."""
    return Setting(words, GRAPH, default="", option=option)


_MAX_MOE_ITERS = Setting("Iterations over the experts.", GRAPH, minimum=1, default=PRESETS_OWN)
_CODE_SEARCH = Setting(
    "Lookup in codebooks: keys reads several rows by product keys; nearest reads the"
    " nearest code of a vector quantiser, and ignores `top_k`.",
    GRAPH,
    choices=config.CODE_SEARCHES,
)
_MEMGRAM = _switch("A memory of the bytes that followed each n-gram of the text.")


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
        int,
        Setting("Iterated experts that a position uses.", GRAPH, minimum=1, default=PRESETS_OWN),
    ] = 2,
    max_moe_iters: Annotated[int, _MAX_MOE_ITERS] = 4,
    moe_gate: Gate = GATES[0],
    shared_expert: SharedExpert = False,
    moe_clamp: Clamp = False,
    attention: bool = True,
    sequencer: Annotated[bool, _switch("N-grams added to the embedding.")] = True,
    code_search: Annotated[str, _CODE_SEARCH] = config.CODE_SEARCHES[0],
    codebook: Annotated[bool, _switch("The shared codebook, which the graph needs.")] = True,
    knowledge_codebook: Annotated[bool, _switch("The knowledge codebook.", "knowledge")] = True,
    moe: Annotated[bool, _switch("The iterated experts.")] = True,
    graph: Annotated[bool, _switch("The graph of codes.")] = True,
    graph_gate: bool = False,
    graph_adapters: bool = False,
    router: Annotated[bool, _switch("The router before the byte head.")] = True,
    memgram: Annotated[bool, _MEMGRAM] = False,
    **storage: Any,
) -> ModelConfig:
    """Build a model of blocks of latent attention, codebooks and iterated experts."""

    def book(halves: tuple[int, int], width: int, heads: int) -> config.BookConfig:
        if code_search == config.CODE_SEARCHES[1]:
            return config.QuantiserConfig(codes=halves[0] * halves[1], width=width)
        return config.CodebookConfig(
            halves=halves, width=width, heads=heads, key_width=key_dim, top_k=top_k
        )

    mixture = build_experts(
        experts, "moe_top_k", moe_top_k, expert_ffn, moe_gate, shared_expert, moe_clamp
    )
    needed = {"graph": graph_gate or graph_adapters, "moe": graph_gate}
    for name, enabled in (("graph", graph), ("moe", moe)):
        if needed[name] and not enabled:
            option = "graph_gate" if graph_gate else "graph_adapters"
            raise setting_error(
                f"`{option}` needs `{name}`, which this model does not have",
                f"add `{name}=True`, or leave `{option}` out",
            )
    iterated = config.IteratedConfig(
        iterations=max_moe_iters,
        adapter_rank=adapter_rank,
        experts=mixture if moe else None,
        expert_dim=expert_dim,
        gate_dim=gate_dim,
        edges=edges if graph else None,
        graph_gate=graph_gate,
        graph_adapters=graph_adapters,
    )
    # norms as in earlier versions, which had no setting for them
    mixer = LatentAttentionConfig(heads=heads, latent=latent, rotary=rotary)
    block = BlockConfig(mixer=mixer if attention else None, channel=MLPConfig(width=ffn))
    memories = config.MemoriesConfig(
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
        beside.append(config.SequencerConfig(rows=ngram_rows, width=ngram_dim))
    if memgram:
        beside.append(config.MemGramConfig(rows=memory_rows))
    head = MLPConfig(width=head_ffn, sub_norm=sub_norms)
    return ModelConfig(ctx=ctx, stages=(stage,), beside=tuple(beside), head=head, **storage)


def adapt_options(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the options `attention` and `top_k_experts` by arguments of the form.

    Raises:
        ArbError: `attention` is invalid, or the number of experts is given twice.
    """
    adapted = dict(options)
    if isinstance(attention := options.get("attention"), str):
        check_choice("attention", attention, ATTENTIONS)
        adapted["attention"] = attention == ATTENTIONS[0]
    if "top_k_experts" in options:
        if "moe_top_k" in options:
            raise setting_error(
                "`top_k_experts` and `moe_top_k` both set the number of experts per position",
                "give one of them",
            )
        adapted["moe_top_k"] = adapted.pop("top_k_experts")
    return adapted


MAX_SIZES = {
    "layers": MAX_BLOCKS, "max_moe_iters": 256, "ngram_rows": 2**31 - 1, "memory_rows": 2**31 - 1,
}  # fmt: skip
"""Upper bounds of sizes by argument."""
FORM = Form(graph, MAX_SIZES, adapt_options)
PRESETS: dict[str, dict[str, Any]] = {
    "arb-tiny": dict(
        dim=256, layers=4, heads=4, ffn=832, ctx=256, rule="moment",
        latent=128, rotary=32, ngram_rows=16384, ngram_dim=64, key_dim=32,
        codes=(64, 64), code_dim=64, code_heads=2, knowledge=(128, 128), knowledge_dim=32,
        knowledge_heads=4, top_k=4, experts=8, expert_dim=160, expert_ffn=160, gate_dim=32,
        adapter_rank=16, edges=(4096, 4), head_ffn=416, moe=False, graph=False
    ),
    "arb-3b": dict(
        dim=2560, layers=20, heads=20, ffn=10240, ctx=64, rule="nibble", direction="factored",
        latent=512, rotary=32, ngram_rows=65987, ngram_dim=512, key_dim=128,
        codes=(512, 256), code_dim=1024, code_heads=4, knowledge=(2500, 2000), knowledge_dim=64,
        knowledge_heads=16, top_k=8, experts=56, expert_dim=1280, expert_ffn=2560, gate_dim=224,
        adapter_rank=64, edges=(32768, 4), head_ffn=17600
    ),
}  # fmt: skip
"""Arguments of the form, by preset."""
