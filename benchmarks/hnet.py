"""Time a chunked model against the dense model of its size: training and generation, in one run.

    python -m benchmarks.hnet [PRESET...] [--kind KIND]... [--out DIR]

The peer is the dense model of the same context, batch and rule, ternary too. Chunks of a trained
model have the wanted length; an untrained one finds them anywhere. Training costs the same either
way, as its shapes are fixed. Generation does not, so routers that learn are trained for some steps
first. It is timed over texts that fill the context, as a dense model becomes slower on the way and
a chunked one hardly.
"""

import statistics

import torch

from arbcli.families.hnet.boundaries import chunk_depths
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.language_model import LanguageModel
from arbcli.training.trainer import EAGER_STEPS
from benchmarks import results
from benchmarks.measuring import bytes_per_second, empty, run_steps, trainer_of

PEERS = {"hnet-small": ("small", 1024, 32), "hnet-base": ("base", 4096, 8)}
"""The dense preset for each, and the context and batch of both."""
KINDS = {
    "learned": {},
    "learned, mamba": {"outer_blocks": "mamba"},
    "every": {"boundaries": "every"},
    "space": {"boundaries": "space"},
}
ROUNDS, STEPS = 3, 10
TRAINED = 250
"""Steps, for which a router that learns is trained before it makes text."""
WARM_UP_BYTES = 64


def measure(preset: str, ctx: int, batch: int, options: dict) -> dict:
    """Time the training step of one model, then its generation."""
    empty()
    with deterministic():
        settings = {"preset": preset, "ctx": ctx, "batch": batch, "steps": 1000}
        trainer = trainer_of(settings | options)
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
        outer = trainer.model.config.outer
        if outer and outer[0].chunking and outer[0].chunking.boundaries == "learned":
            run_steps(trainer, TRAINED)
        num_bytes, rates = time_generation(trainer.model, ctx)
        row["generated_bytes_per_second"] = round(statistics.median(rates), 1)
        row["rounds_generated"] = [round(rate, 1) for rate in rates]
        if outer:
            depths = chunk_depths(trainer.model, num_bytes, "triton")
            row["generated_chunk_length"] = round(len(num_bytes) / sum(map(bool, depths)), 2)
    return row


def time_generation(model: LanguageModel, ctx: int) -> tuple[bytes, list[float]]:
    """Make texts that fill the context; return the last one, and the bytes a second of each."""
    rates = []
    with model.prepared_weights():
        for seed in range(ROUNDS):
            decoder, text = Decoder(model, ctx), bytearray(b"\n")

            def more(length: int, decoder: Decoder = decoder, text: bytearray = text) -> None:
                for part in decoder.stream(length):
                    text.extend(part)

            decoder.begin(bytes(text), Sampling(seed=seed))
            more(WARM_UP_BYTES)
            rates.append(bytes_per_second(more, ctx - len(text)))
    return bytes(text), rates


def main() -> None:
    """Print a line a model, and write its row as soon as it is there."""
    parser = results.options("hnet", "Time a chunked model against a dense one.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--kind", action="append", choices=KINDS, help="[default: all]")
    args = parser.parse_args()
    for preset in args.presets or PEERS:
        peer, ctx, batch = PEERS[preset]
        kinds: dict[str, tuple[str, dict]] = {"dense": (peer, {})} | {
            k: (preset, KINDS[k]) for k in args.kind or KINDS
        }
        base = None
        for kind, (name, options) in kinds.items():
            row = {"preset": preset, "kind": kind} | measure(name, ctx, batch, options)
            base = base or row
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
            results.save("hnet", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()
