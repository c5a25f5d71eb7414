"""Time an `HNet` beside the `ByteLM` of its size: training and generation, in one run.

    python -m benchmarks.hnet [PRESET...] [--out DIR]

The peer is `ByteLM` of the same context, batch and rule, ternary too. Chunks of a trained model
have the wanted length; an untrained one finds them anywhere. Training costs the same either way, as
its shapes are fixed. Generation does not, so it is timed with boundaries at every N bytes, which
are as many as a router is held to, and with learned ones after the few steps that were timed.
"""

import statistics

import torch

from arbcli.data import open_texts
from arbcli.device import deterministic
from arbcli.infer.generation import Decoder
from arbcli.model.language_model import LanguageModel
from arbcli.train.configure import new_config
from arbcli.train.trainer import EAGER_STEPS, Trainer
from benchmarks import results
from benchmarks.generation import bytes_per_second
from benchmarks.training_step import empty, run_steps, text

PEERS = {"hnet-small": ("small", 1024, 32), "hnet-base": ("base", 4096, 8)}
"""The dense preset beside each, and the context and batch of both."""
KINDS = {
    "learned": {},
    "learned, mamba": {"outer_blocks": "mamba"},
    "every": {"boundaries": "every"},
    "space": {"boundaries": "space"},
}
ROUNDS, STEPS, LENGTH = 3, 10, 512


def measure(preset: str, ctx: int, batch: int, options: dict) -> dict:
    """Time the training step of one model, then its generation."""
    given = {"preset": preset, "ctx": ctx, "batch": batch, **options}
    config = new_config(steps=1000, device="cuda", data=[str(text())], **given)
    texts = open_texts(config.data, None, seed=0, context=ctx)
    empty()
    with deterministic():
        trainer = Trainer(config, texts, capture=True)
        run_steps(trainer, EAGER_STEPS + 2)
        seconds = [run_steps(trainer, STEPS) for _ in range(ROUNDS)]
        row = {
            "weights": trainer.num_weights,
            "ctx": ctx,
            "batch": batch,
            "bytes_per_second": round(ctx * batch / statistics.median(seconds)),
            "rounds_ms": [round(1e3 * value, 4) for value in seconds],
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "gauges": trainer.model.gauges(),
        }
        row["generated_bytes_per_second"] = round(time_generation(trainer.model), 1)
    return row


def time_generation(model: LanguageModel) -> float:
    """Time the second half of a text, in bytes a second."""
    with model.prepared_weights():
        decoder = Decoder(model, 2 * LENGTH + 1)
        decoder.read(b"\n")

        def more(length: int) -> None:
            assert sum(map(len, decoder.stream(length))) == length

        more(LENGTH)
        return bytes_per_second(more, LENGTH)


def main() -> None:
    """Print a line a model, and write the rows of each preset."""
    parser = results.options("hnet", "Time HNet beside ByteLM.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"of {', '.join(PEERS)}")
    given = parser.parse_args()
    for preset in given.presets or PEERS:
        peer, ctx, batch = PEERS[preset]
        kinds = {"ByteLM": (peer, {})} | {kind: (preset, KINDS[kind]) for kind in KINDS}
        rows = []
        for kind, (name, options) in kinds.items():
            row = {"preset": preset, "kind": kind} | measure(name, ctx, batch, options)
            rows.append(row)
            base = rows[0]
            print(
                f"{preset:10} {kind:15} {row['weights'] / 1e6:6.1f} M"
                f" {row['bytes_per_second']:11,} bytes/s"
                f" {row['bytes_per_second'] / base['bytes_per_second']:5.2f} x, generation"
                f" {row['generated_bytes_per_second']:8,.0f}"
                f" {row['generated_bytes_per_second'] / base['generated_bytes_per_second']:5.2f} x,"
                f" {row['allocated_bytes'] / 2**20:8,.0f} MiB {row['gauges']}",
                flush=True,
            )
        command = results.command_line("hnet", preset)
        results.save("hnet", rows, command=command, folder=given.out)


if __name__ == "__main__":
    main()
