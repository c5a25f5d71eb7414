"""Presets of compressed attention, with an MLP or experts in each block."""

from typing import Any

from arbcli.base.errors import setting_error
from arbcli.config import short_forms
from arbcli.config.model import MAX_BLOCKS, Context, ModelConfig
from arbcli.families.compressed.config import CompressedAttentionConfig

MAX_RATIOS = 8


def compressed(
    *,
    dim: short_forms.Dim,
    layers: short_forms.Layers,
    heads: short_forms.Heads,
    ffn: short_forms.FFN,
    ctx: Context,
    sub_norms: short_forms.SubNorms = True,
    streams: short_forms.Streams = 1,
    head_width: int | None = None,
    kv_heads: int = 1,
    rotary: int | None = None,
    window: short_forms.Window = 128,
    ratios: tuple[int, ...] = (4, 128),
    indexed_ratio: int = 4,
    top_k: short_forms.TopK = 128,
    index_heads: int = 4,
    index_width: int = 32,
    mean_ratio: int | None = None,
    key_gain: bool = False,
    **storage: Any,
) -> ModelConfig:
    """Build a model of blocks of compressed attention and an MLP.

    Blocks cycle through the `ratios`. Above a ratio of `indexed_ratio`, positions attend to all
    entries, without an indexer; from `mean_ratio` on, an entry is the mean of its positions.
    """
    if not 1 <= len(ratios) <= MAX_RATIOS or min(ratios) < 2:
        raise setting_error(
            f"`ratios` has {len(ratios)} numbers, of which the least is {min(ratios, default=0):,}",
            f"use 1 to {MAX_RATIOS} of them, and 2 bytes or more",
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
    return short_forms.stack(
        mixers, dim=dim, layers=layers, ffn=ffn, ctx=ctx, sub_norms=sub_norms, streams=streams,
        **storage,
    )  # fmt: skip


FORM = short_forms.Form(compressed, {"layers": MAX_BLOCKS})
PRESETS: dict[str, dict[str, Any]] = {
    "arb-long": dict(
        dim=768, layers=12, heads=12, ffn=1920, ctx=16384, head_width=128, rotary=64
    ),
    "arb-deep-small": dict(
        dim=512, layers=8, heads=8, ffn=256, ctx=4096, head_width=64, streams=4, window=128,
        experts=16, moe_gate="softplus", hash_layers=2, shared_expert=True, moe_clamp=True
    ),
    "arb-deep": dict(
        dim=1024, layers=61, heads=16, ffn=256, ctx=4096, head_width=128, streams=4, window=128,
        experts=16, moe_gate="softplus", hash_layers=3, shared_expert=True, moe_clamp=True
    ),
}  # fmt: skip
"""Arguments of the form, by preset."""
