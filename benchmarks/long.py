"""Time `arb-long` against the same shape with attention to all bytes, at ctx 16,384.

    python -m benchmarks.long [--out DIR]

The peer is dense model of the same widths, `--preset arb-long --attention dense`, ternary too. Both
are trained for a few steps, captured, then read a prompt that nearly fills the context and make
text after it, with keys and values in bf16, int8 and fp8.
"""

import statistics

import torch

from arbcli.data.opening import open_texts
from arbcli.generation.decoder import Decoder
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.language_model import LanguageModel
from arbcli.training.configure import new_config
from arbcli.training.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.generation import bytes_per_second
from benchmarks.training_step import empty, run_steps, text

KINDS = {"compressed": {}, "dense": {"attention": "dense"}}
PRESET, BATCH = "arb-long", 2
ROUNDS, STEPS = 3, 4
WARM_UP_BYTES, LENGTH = 64, 256
CACHE_DTYPES = ("bf16", "int8", "fp8")


def measure(options: dict) -> dict:
    """Time the training step of one model, then its generation near the end of its context."""
    about = {"preset": PRESET, "batch": BATCH, **options}
    config = new_config(steps=1000, device="cuda", data=[str(text())], **about)
    context = config.model.ctx
    texts = open_texts(config.data, None, seed=0, context=context)
    empty()
    with deterministic():
        trainer = Trainer(config, texts, capture=True)
        run_steps(trainer, EAGER_STEPS + 2)
        seconds = [run_steps(trainer, STEPS) for _ in range(ROUNDS)]
        row = {
            "weights": trainer.num_weights,
            "ctx": context,
            "batch": BATCH,
            "bytes_per_second": round(context * BATCH / statistics.median(seconds)),
            "rounds_ms": [round(1e3 * value, 4) for value in seconds],
            "allocated_bytes": torch.cuda.max_memory_allocated(),
        }
        texts_of = {}
        for kv in CACHE_DTYPES:
            with trainer.model.cached_as(kv):
                texts_of[kv] = time_generation(trainer.model, context)
        return row | {"texts": texts_of}


def time_generation(model: LanguageModel, context: int) -> dict:
    """Make text after a long prompt."""
    made = WARM_UP_BYTES + ROUNDS * LENGTH
    prompt = text().read_bytes()[: context - made]
    with model.prepared_weights():
        decoder = Decoder(model, context)
        decoder.begin(prompt)

        def more(length: int) -> None:
            assert sum(map(len, decoder.stream(length))) == length

        more(WARM_UP_BYTES)
        rates = [bytes_per_second(more, LENGTH) for _ in range(ROUNDS)]
    return {
        "prompt_bytes": len(prompt),
        "generated_bytes_per_second": round(statistics.median(rates), 1),
        "rounds_generated": [round(rate, 1) for rate in rates],
        "cache_bytes": decoder.cache.nbytes,
    }


def main() -> None:
    """Print a line a model, and write its row as soon as it is there."""
    args = results.options("long", "Time compressed attention against dense.").parse_args()
    for kind, options in KINDS.items():
        row = {"preset": PRESET, "kind": kind} | measure(options)
        print(
            f"{kind:10} {row['weights'] / 1e6:6.1f} M {row['bytes_per_second']:11,} bytes/s,"
            f" {row['allocated_bytes'] / 2**20:8,.0f} MiB allocated",
            flush=True,
        )
        for kv, made in row["texts"].items():
            print(
                f"  {kv:5} generation {made['generated_bytes_per_second']:8,.0f} bytes/s,"
                f" cache {made['cache_bytes'] / 2**20:6.1f} MiB",
                flush=True,
            )
        results.save("long", [row], command=results.command_line("long"), folder=args.out)


if __name__ == "__main__":
    main()
