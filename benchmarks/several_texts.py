"""Time generation of several texts at once against a float model in bf16, both captured.

    python -m benchmarks.several_texts [PRESET...] [--batch B...] [--out DIR]

The peer is `benchmarks.float_decoder`, in the faster of its modes: products by cuBLAS, the rest
compiled. Texts begin with one byte, so both read as much of their caches.
"""

import statistics
import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch

from arbcli.config.presets import preset
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.model.language_model import LanguageModel
from benchmarks import results
from benchmarks.float_decoder import MODES, FloatDecoder
from benchmarks.generation import build
from benchmarks.measuring import in_turns, seconds_of

ROUNDS, ROUND_STEPS, WARM_UP_STEPS = 5, 64, 16
LENGTH = WARM_UP_STEPS * (1 + len(MODES)) + ROUNDS * ROUND_STEPS
"""Bytes that follow a prompt."""


def make_ours(model: LanguageModel, texts: int) -> Callable[[], None]:
    """Begin texts; return what makes one byte more of each."""
    decoder = Decoder(model, 1 + LENGTH, texts)
    for slot in range(texts):
        decoder.begin(b"\n", Sampling(seed=slot), slot=slot)
    return decoder.step


def make_peer(twin: LanguageModel, texts: int) -> tuple[Callable[[], None], str]:
    """Do the same for the float model, in the mode that is the fastest."""
    decoders = {}
    for mode in MODES:
        torch._dynamo.reset()
        try:
            decoder = FloatDecoder(twin, texts, 1 + LENGTH, mode=mode)
            decoder.capture()
        except Exception:  # a mode that a machine cannot run is left out, and said to be
            traceback.print_exc()
            continue
        steps_per_second(decoder.step, WARM_UP_STEPS // 2)
        rate = steps_per_second(decoder.step, WARM_UP_STEPS // 2)
        print(f"  {texts} texts, {mode}: {texts * rate:,.0f} bytes/s", file=sys.stderr)
        decoders[rate] = decoder.step, mode
    return decoders[max(decoders)]


def steps_per_second(step: Callable[[], None], steps: int) -> float:
    """Time some steps."""

    def run() -> None:
        for _ in range(steps):
            step()

    return steps / seconds_of(run)


def measure(name: str, batches: list[int]) -> list[dict]:
    """Measure a preset at every batch."""
    rows: list[dict] = []
    twin, model = build(name, "float"), build(name, "ternary")
    with model.prepared_weights():
        for texts in batches:
            peer, mode = make_peer(twin, texts)
            ours = make_ours(model, texts)
            steps_per_second(ours, WARM_UP_STEPS)
            speeds = in_turns(
                ROUNDS, *(partial(steps_per_second, step, ROUND_STEPS) for step in (ours, peer))
            )
            for kind, steps in zip(("moment", "float bf16"), speeds, strict=True):
                rates = [texts * rate for rate in steps]
                rows.append(
                    {
                        "preset": name,
                        "batch": texts,
                        "kind": kind,
                        "bytes_per_second": round(statistics.median(rates), 1),
                        "rounds_bytes_per_second": [round(rate, 1) for rate in rates],
                    }
                )
            rows[-1]["mode"] = mode
    return rows


def main() -> None:
    """Print a line a batch, and write the rows."""
    parser = results.options("several_texts", "Time several texts against a float model in bf16.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=["1b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[4, 16, 64])
    args = parser.parse_args()
    for name in args.presets:
        preset(name)
        rows = measure(name, args.batch)
        for ours, peer in zip(rows[::2], rows[1::2], strict=True):
            rate, twin = ours["bytes_per_second"], peer["bytes_per_second"]
            print(
                f"{name:5} {ours['batch']:2} texts: {rate:,.0f} bytes/s, float bf16 {twin:,.0f}"
                f" ({peer['mode']}): {rate / twin:.2f} x",
                flush=True,
            )
        command = results.command_line("several_texts", name)
        results.save("several_texts", rows, command=command, folder=args.out)


if __name__ == "__main__":
    main()
