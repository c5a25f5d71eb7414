"""Time generation of several texts at once against a float model in bf16, both captured.

    python -m benchmarks.several_texts [PRESET...] [--batch B...] [--against float|one] [--out DIR]

The peer is `benchmarks.float_several`, in the faster of its modes: products by cuBLAS, the rest
compiled; or a single text of the same model. Texts begin with one byte, so both read as much of
their caches.
"""

import statistics
import sys
import time
import traceback
from collections.abc import Callable

import torch

from arbcli.config.presets import preset
from arbcli.generation.decoder import Decoder
from arbcli.generation.sampling import Sampling
from arbcli.model.language_model import LanguageModel
from benchmarks import results
from benchmarks.float_several import MODES, BatchFloatDecoder
from benchmarks.generation import build

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
    found = {}
    for mode in MODES:
        torch._dynamo.reset()
        try:
            decoder = BatchFloatDecoder(twin, texts, 1 + LENGTH, mode=mode)
            decoder.capture()
        except Exception:  # a mode that a machine cannot run is left out, and said to be
            traceback.print_exc()
            continue
        steps_per_second(decoder.step, WARM_UP_STEPS // 2)
        rate = steps_per_second(decoder.step, WARM_UP_STEPS // 2)
        print(f"  {texts} texts, {mode}: {texts * rate:,.0f} bytes/s", file=sys.stderr)
        found[rate] = decoder.step, mode
    return found[max(found)]


def make_one(model: LanguageModel) -> Callable[[], None]:
    """Begin a single text; return what makes one byte more of it."""
    decoder = Decoder(model, 1 + LENGTH)
    decoder.begin(b"\n")
    return decoder.step


def synchronise() -> None:
    """Wait for a GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def steps_per_second(step: Callable[[], None], steps: int) -> float:
    """Time some steps."""
    synchronise()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise()
    return steps / (time.perf_counter() - started)


def measure(name: str, batches: list[int]) -> list[dict]:
    """Measure a preset at every batch."""
    rows: list[dict] = []
    twin, model = build(name, "float"), build(name, "ternary")
    with model.prepared_weights():
        for texts in batches:
            peer, mode = make_peer(twin, texts)
            ours = make_ours(model, texts)
            steps_per_second(ours, WARM_UP_STEPS)
            rounds = [
                [texts * steps_per_second(step, ROUND_STEPS) for step in (ours, peer)]
                for _ in range(ROUNDS)
            ]
            for kind, rates in zip(
                ("moment", "float bf16"), zip(*rounds, strict=True), strict=True
            ):
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


def measure_against_one(name: str, batches: list[int]) -> None:
    """Print the bytes a second of several texts, and of one."""
    model = build(name, "ternary")
    with torch.no_grad(), model.prepared_weights():
        for texts in batches:
            ours, one = make_ours(model, texts), make_one(model)
            for step in (ours, one):
                steps_per_second(step, WARM_UP_STEPS)
            rounds = [
                (texts * steps_per_second(ours, ROUND_STEPS), steps_per_second(one, ROUND_STEPS))
                for _ in range(ROUNDS)
            ]
            many, single = (statistics.median(rates) for rates in zip(*rounds, strict=True))
            print(
                f"{name:10} {texts:2} texts: {many:,.0f} bytes/s, one {single:,.0f}:"
                f" {many / single:.2f} x",
                flush=True,
            )


def main() -> None:
    """Print a line a batch, and write the rows."""
    parser = results.options("several_texts", "Time several texts against a float model in bf16.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=["1b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--against", choices=("float", "one"), default="float")
    args = parser.parse_args()
    for name in args.presets:
        preset(name)
        if args.against == "one":
            measure_against_one(name, args.batch)
            continue
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
