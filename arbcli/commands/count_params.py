"""`arb count-params`: what a model takes, before there is one."""

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from arbcli.commands._options import (
    Attention,
    Boundaries,
    ChunkLength,
    Codebook,
    Ctx,
    Digits,
    Dim,
    Direction,
    Ffn,
    Graph,
    Heads,
    Json,
    Knowledge,
    Layers,
    MaxMoeIters,
    Memgram,
    Moe,
    MoeTopK,
    OuterBlocks,
    Preset,
    Router,
    Rule,
    Sequencer,
    TScaleType,
)
from arbcli.output import emit, table

if TYPE_CHECKING:
    from arbcli.inspect.memory import Footprint, StateReport


def count_params(
    preset: Preset = None,
    ctx: Ctx = None,
    tscale_type: TScaleType = None,
    rule: Rule = None,
    digits: Digits = None,
    direction: Direction = None,
    dim: Dim = None,
    layers: Layers = None,
    heads: Heads = None,
    ffn: Ffn = None,
    as_json: Json = False,
    attention: Attention = None,
    sequencer: Sequencer = None,
    codebook: Codebook = None,
    knowledge_codebook: Knowledge = None,
    moe: Moe = None,
    graph: Graph = None,
    router: Router = None,
    memgram: Memgram = None,
    moe_top_k: MoeTopK = None,
    max_moe_iters: MaxMoeIters = None,
    boundaries: Boundaries = None,
    chunk_length: ChunkLength = None,
    outer_blocks: OuterBlocks = None,
) -> None:
    """Count weights and bytes of a model without making it: `arb count-params --preset 1b`."""
    from arbcli.config.presets import preset as model_preset
    from arbcli.inspect.memory import predict

    config = model_preset(
        preset or "tiny",
        ctx=ctx,
        scale_type=tscale_type,
        rule=rule,
        digits=digits,
        direction=direction,
        dim=dim,
        layers=layers,
        heads=heads,
        ffn=ffn,
        attention=attention,
        sequencer=sequencer,
        codebook=codebook,
        knowledge_codebook=knowledge_codebook,
        moe=moe,
        graph=graph,
        router=router,
        memgram=memgram,
        moe_top_k=moe_top_k,
        max_moe_iters=max_moe_iters,
        boundaries=boundaries,
        chunk_length=chunk_length,
        outer_blocks=outer_blocks,
    )
    report = predict(config)
    emit(report, state_table(report), as_json=as_json)


def state_table(report: "StateReport") -> Table:
    """Lay out the state by area and by kind, and what AdamW would keep for it."""
    config, total = report.config, report.total
    title = f"State: {config.scale_type}, {config.rule}, {config.direction or 'no'} direction"
    columns = ["", "weights", "padding", "MB", "MiB", "B/weight"]
    result = table(title, columns, [])

    def add(name: str, size: int, weights: int, counts: tuple[str, str] = ("", "")) -> None:
        row = [name, *counts, f"{size / 1e6:,.2f}", f"{size / 2**20:,.2f}", f"{size / weights:.3f}"]
        result.add_row(*map(Text, row))

    def add_part(name: str, part: "Footprint") -> None:
        add(name, part.state_bytes, part.weights, (f"{part.weights:,}", f"{part.padding_trits:,}"))

    for area, part in report.areas.items():
        add_part(area, part)
    result.add_section()
    for kind, size in total.bytes_by_kind.items():
        if size:
            add(kind, size, total.weights)
    result.add_section()
    add_part("state", total)
    add("AdamW", report.adamw_bytes, report.trained_weights, (f"{report.trained_weights:,}", ""))
    return result
