"""Train 61 blocks of compressed attention and experts on four streams, and look into every block.

    python -m benchmarks.deep [train] [cosines] [causality] [text] [small] [indexer] [--out DIR]

`train` does 20 steps of `arb-deep` and compares the predicted peak with the allocator's. `cosines`
compares the attention of every block, for one byte after a prompt, with a softmax in float64 over
the same cache. `causality` changes later bytes, and measures the growth of the residual stream by
block. `text` generates from a cache in eight bits. `small` trains `arb-deep-small` for two minutes.
`indexer` counts how many of the entries that eight bits choose full precision chooses too: eight
bits of queries and keys, and of queries alone.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from arbcli.data.opening import open_texts
from arbcli.families.compressed import state as compressed_state
from arbcli.families.compressed.kernels.decode_compressed import decode_compressed
from arbcli.families.compressed.verify.decode_compressed import decode_compressed_reference
from arbcli.generation.decoder import Decoder
from arbcli.inspect.peak import predict_peak
from arbcli.inspect.probe import examine
from arbcli.kernels.matmul.quantise_rows import E4M3
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.language_model import LanguageModel
from arbcli.training.configure import new_config
from arbcli.training.trainer import Trainer
from benchmarks import results
from benchmarks.training_step import empty, text

PRESET = "arb-deep"
BATCH, STEPS = 2, 20
PROMPTS = (10, 1000)
LENGTH = 200
SECONDS = 120
ENTRIES, CHOSEN, HEADS, WIDTH = (1024, 8192), 128, 4, 32
PARTS = ("train", "cosines", "causality", "text", "small", "indexer")


def trainer_of(preset: str, *, steps: int, **given: Any) -> Trainer:
    """Make a trainer on the novels, or on the text that there is."""
    config = new_config(preset=preset, steps=steps, data=[str(text())], **given)
    texts = open_texts(config.data, None, seed=0, context=config.model.ctx)
    return Trainer(config, texts)


def train(trainer: Trainer) -> dict:
    """Run `STEPS` steps; return losses, and the measured and predicted peak memory."""
    cuda = trainer.device.type == "cuda"
    predicted = predict_peak(trainer.config).peak_bytes
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for _ in range(STEPS):
        begun = time.perf_counter()
        losses.append(round(float(trainer.train_step()), 4))
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {
        "weights": trainer.num_weights,
        "batch": trainer.config.batch,
        "losses": losses,
        "seconds_a_step": round(sorted(seconds)[len(seconds) // 2], 3),
        "predicted_peak_bytes": predicted,
        "peak_bytes": peak,
    }


@torch.no_grad()
def cosines(model: LanguageModel, prompt_bytes: int) -> dict:
    """Compare the attention of every block for one byte with float64 on the same cache."""
    found: list[float] = []

    def compared(q: Tensor, *rest: Any) -> Tensor:
        copies = [part.clone() if isinstance(part, Tensor) else part for part in rest]
        wanted, _ = decode_compressed_reference(q, *copies)
        got = decode_compressed(q, *rest)
        cosine = functional.cosine_similarity(got.double().flatten(), wanted.flatten(), 0)
        found.append(float(cosine))
        return got

    ids = torch.tensor([list(text().read_bytes()[: prompt_bytes + 1])], device=model.device)
    cache = model.new_cache(prompt_bytes + 1)
    model(ids[:, :-1], cache)
    with mock.patch.object(compressed_state, "decode_compressed", compared):
        model(ids[:, -1:], cache)
    assert len(found) == model.config.layers
    return {"least_cosine": min(found), "blocks": len(found)}


def causality(trainer: Trainer) -> dict:
    """Change later bytes of held-out windows, and measure the streams by block."""
    report = examine(trainer, 1)
    last = report.readings[-1]
    return {
        "acausal_predictions": report.acausal_logits,
        "acausal_positions_by_layer": list(report.acausal_layers),
        "residual_rms": [_rounded(value) for value in last.residual_rms],
        "residual_growth": _rounded(last.residual_growth),
        "verdicts": [verdict.name for verdict in report.verdicts],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def generate(model: LanguageModel, kv: str | None) -> dict:
    """Make text after a prompt, from a cache in eight bits or as it is."""
    prompt = text().read_bytes()[:500]
    with model.cached_as(kv), model.prepared_weights():
        decoder = Decoder(model, len(prompt) + LENGTH)
        decoder.begin(prompt)
        begun = time.perf_counter()
        made = bytes(itertools.chain.from_iterable(decoder.stream(LENGTH)))
        seconds = time.perf_counter() - begun
    return {
        "cache_bytes": decoder.cache.nbytes,
        "bytes_per_second": round(LENGTH / seconds, 1),
        "text": made.decode(errors="replace"),
    }


def small() -> dict:
    """Train the small model for `SECONDS`."""
    trainer = trainer_of("arb-deep-small", steps=1_000_000, batch=8, schedule="constant")
    begun, step = time.perf_counter(), 0
    while time.perf_counter() - begun < SECONDS:
        loss = float(trainer.train_step())
        step += 1
    return {"weights": trainer.num_weights, "steps": step, "loss": loss, "val": trainer.evaluate()}


def indexer(entries: int) -> dict:
    """Count the entries that scores from e4m3 choose and scores from float32 choose too."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(256, HEADS, WIDTH, generator=generator)
    keys = functional.rms_norm(torch.randn(entries, WIDTH, generator=generator), (WIDTH,))
    queries = functional.rms_norm(queries, (WIDTH,))
    weights = torch.randn(256, HEADS, generator=generator)

    def chosen(queries: Tensor, keys: Tensor) -> Tensor:
        scores = torch.einsum("ghd,kd->ghk", queries, keys).relu()
        return torch.einsum("gh,ghk->gk", weights, scores).topk(CHOSEN, dim=1).indices

    def in_eight_bits(x: Tensor) -> Tensor:
        return x.to(E4M3).float()

    def shared(other: Tensor) -> float:
        return round(float((full[:, :, None] == other[:, None]).any(dim=2).float().mean()), 4)

    full, rounded = chosen(queries, keys), in_eight_bits(queries)
    return {
        "chosen": CHOSEN,
        "shared": shared(chosen(rounded, in_eight_bits(keys))),
        "shared_by_queries": shared(chosen(rounded, keys)),
    }


def look_into(parts: Iterable[str], save: Callable[..., None]) -> None:
    """Measure the parts that need a model."""
    trainer = trainer_of(PRESET, steps=1000, batch=BATCH)
    if "train" in parts:
        save("train", train(trainer))
    if "causality" in parts:
        save("causality", causality(trainer))
    if "text" in parts:
        for kv in ("fp8", "int8", None):
            save("text", generate(trainer.model, kv), kv or "bf16")
    state = trainer.model.state_dict()
    if "cosines" in parts:
        model = LanguageModel(trainer.config.model, torch.float32).to(trainer.device)
        model.load_state_dict(state)
        for length in PROMPTS:
            save("cosines", cosines(model, length), f"{length:,} bytes")
        del model
    del trainer, state
    empty()
    if "small" in parts:
        save("small", small())


def main() -> None:
    """Print a line a part, and write its rows as soon as they are there."""
    parser = results.options("deep", "Train and look into a deep model of all parts.")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    args = parser.parse_args()
    parts = args.parts or PARTS

    def save(part: str, row: dict, variant: str = "") -> None:
        row = {"part": part, "variant": variant} | row
        print(row, flush=True)
        results.save("deep", [row], command=results.command_line("deep"), folder=args.out)

    if "indexer" in parts:
        for entries in ENTRIES:
            save("indexer", indexer(entries), f"{entries:,} entries")
    if set(parts) != {"indexer"}:
        with deterministic():
            look_into(parts, save)


if __name__ == "__main__":
    main()
