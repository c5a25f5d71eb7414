"""Time generation with keys and values in bf16, in fp8 and in int8, the cache full.

    python -m benchmarks.kv_cache [PRESET...] [--ctx 16384] [--out DIR]
    python -m benchmarks.kv_cache --error

`--error` needs no GPU: it compares attention over rounded keys and values with that over the same
ones unrounded, in float64. For speed models have random weights, as none depends on them; the texts
take turns, so that all see the same clocks. What eight bits cost in loss is measured by
`arb evaluate --kv`.
"""

import statistics
from collections.abc import Callable

import torch
from torch.nn import functional

from arbcli.config.presets import preset
from arbcli.generation.decoder import Decoder
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.build import build_model
from arbcli.model.language_model import LanguageModel
from arbcli.model.parts.cached import CacheFormat
from benchmarks import results
from benchmarks.generation import bytes_per_second

CACHE_DTYPES = ("bf16", "fp8", "int8")
ROUNDED = ("fp8", "fp8-mixed", "fp8-queries", "int8", "int8-mixed", "int8-queries")
ROUNDS, ROUND_BYTES, WARM_UP_BYTES = 7, 256, 64
LENGTH = WARM_UP_BYTES + ROUNDS * ROUND_BYTES
"""Bytes that follow a prompt."""


def build(name: str, ctx: int) -> LanguageModel:
    """Make a model of random weights on the GPU."""
    with torch.device("cuda"):
        model = build_model(preset(name, ctx=ctx))
    model.initialise(0)
    return model


def make_text(model: LanguageModel, kv: str) -> tuple[Callable[[int], None], int]:
    """Read a prompt that fills the cache.

    Returns:
        What makes so many bytes more and waits for them, and the bytes of the cache.
    """
    prompt = model.config.ctx
    with model.cached_as(kv):
        decoder = Decoder(model, prompt + LENGTH)
    decoder.begin(bytes(index * 131 % 251 for index in range(prompt)))

    def more(length: int) -> None:
        made = sum(map(len, decoder.stream(length)))
        assert made == length

    return more, decoder.cache.nbytes


def measure(name: str, ctx: int) -> list[dict]:
    """Measure a preset in each type."""
    model = build(name, ctx)
    with model.prepared_weights(), deterministic():
        texts = {kv: make_text(model, kv) for kv in CACHE_DTYPES}
        for more, _ in texts.values():
            more(WARM_UP_BYTES)
        rates: dict[str, list[float]] = {kv: [] for kv in CACHE_DTYPES}
        for _ in range(ROUNDS):
            for kv, (more, _) in texts.items():
                rates[kv].append(bytes_per_second(more, ROUND_BYTES))
    return [
        {
            "preset": name,
            "ctx": ctx,
            "kv": kv,
            "cache_bytes": texts[kv][1],
            "bytes_per_second": round(statistics.median(rates[kv]), 1),
            "rounds_bytes_per_second": [round(rate, 1) for rate in rates[kv]],
        }
        for kv in CACHE_DTYPES
    ]


def cosine(kept: CacheFormat, heads: int, length: int, width: int) -> float:
    """Compare attention of one query over rounded entries with that over unrounded ones.

    All are normal numbers, queries and keys normalised, half of their numbers rotated; the cosine
    is that of all heads together.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(heads, rows, width, generator=generator, dtype=torch.float64)
        for rows in (1, length, length)
    )
    q, k = (functional.rms_norm(part, (width,)) for part in (q, k))
    asked, found = kept.round(q.float(), k.float(), rotated=width // 2)
    rounded = (asked.double() if kept.queries else q, found.double(), kept.round(v.float())[0])
    one, other = (
        functional.scaled_dot_product_attention(q.double(), k.double(), v.double()).flatten()
        for q, k, v in ((q, k, v), rounded)
    )
    return float(functional.cosine_similarity(one, other, dim=0))


def print_errors() -> None:
    """Print a line a head width and length."""
    for width in (64, 128, 512):
        for length in (1, 33, 2048, 16384):
            found = (
                f"{kv} {cosine(CacheFormat.named(kv), 8, length, width):.5f}" for kv in ROUNDED
            )
            print(f"heads of {width}, {length:,} positions: cosine {', '.join(found)}", flush=True)


def main() -> None:
    """Print a line a model and type, and write the rows."""
    parser = results.options("kv_cache", "Time generation with a full cache, by its type.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=["small", "1b"])
    parser.add_argument("--ctx", type=int, default=16384, help="bytes of the cache")
    parser.add_argument("--error", action="store_true", help="of rounding, on a CPU, and no speed")
    args = parser.parse_args()
    if args.error:
        print_errors()
        return
    for name in args.presets:
        rows = measure(name, args.ctx)
        plain = rows[0]
        for row in rows:
            print(
                f"{name:5} ctx {args.ctx:,} in {row['kv']}: {row['bytes_per_second']:,.0f} bytes/s"
                f" ({row['bytes_per_second'] / plain['bytes_per_second']:.2f} x), cache of"
                f" {row['cache_bytes']:,} bytes"
                f" ({row['cache_bytes'] / plain['cache_bytes']:.3f} x)",
                flush=True,
            )
        command = results.command_line("kv_cache", name, "--ctx", str(args.ctx))
        results.save("kv_cache", rows, command=command, folder=args.out)


if __name__ == "__main__":
    main()
