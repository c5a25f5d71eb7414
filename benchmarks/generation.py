"""Time generation at batch 1 against a float model in bf16, both captured: `make bench`.

    python -m benchmarks.generation [PRESET...] [--out DIR]

The peer is the fastest of several: `benchmarks.float_decoder`, compiled in some ways, and our own
decoder with weights in bf16, `benchmarks.dense_rows`. Its share of the copy bandwidth, measured in
the same run, says how good a peer it is.
"""

import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from arbcli.config.presets import preset
from arbcli.generation.decoder import Decoder
from arbcli.kernels.runtime.device import deterministic
from arbcli.model.baselines import FloatWeight
from arbcli.model.language_model import LanguageModel
from arbcli.verify.timing import Stopwatch, measure_roofline
from benchmarks import results
from benchmarks.dense_rows import read_dense
from benchmarks.float_decoder import MODES, FloatDecoder
from benchmarks.measuring import bytes_per_second, in_turns

ROUNDS, ROUND_BYTES, WARM_UP_BYTES = 5, 128, 32
TRIAL_BYTES = 64
DENSE = "our decoder, dense"
"""The mode of a peer that is not a `FloatDecoder`."""
LENGTH = WARM_UP_BYTES + TRIAL_BYTES + ROUNDS * ROUND_BYTES
"""Bytes that follow a prompt."""


def build(name: str, weights: str) -> LanguageModel:
    """Make a model of random weights on the GPU."""
    with torch.device("cuda"):
        model = LanguageModel(preset(name, weights=weights))
    if weights == "ternary":
        model.initialise(0)
    else:  # its own way draws on the CPU, for long
        with torch.no_grad():
            for weight in model.weights().values():
                assert isinstance(weight, FloatWeight)
                weight.latent.normal_(0, weight.std)
    return model


def make_ours(model: LanguageModel, prompt: int) -> Callable[[int], None]:
    """Read a prompt; return what makes so many bytes more and waits for them."""
    decoder = Decoder(model, prompt + LENGTH)
    decoder.begin(b"\n" * prompt)

    def more(length: int) -> None:
        num_bytes = sum(map(len, decoder.stream(length)))
        assert num_bytes == length

    return more


def make_peer(
    name: str, model: LanguageModel, prompt: int, mode: str
) -> tuple[Callable[[int], None], int]:
    """Do the same for the float model; and return the bytes of weights that a byte reads."""
    if mode == DENSE:
        dense = build(name, "ternary")
        read = read_dense(dense)
        with dense.prepared_weights(), deterministic():
            return make_ours(dense, prompt), read
    torch._dynamo.reset()
    decoder = FloatDecoder(model, 1, prompt + LENGTH, mode=mode)
    decoder.capture()
    decoder.read(b"\n" * prompt)

    def more(length: int) -> None:
        for _ in range(length):
            decoder.step()

    return more, decoder.read_bytes


def find_peer(
    name: str, model: LanguageModel, prompt: int, modes: list[str]
) -> tuple[str, Callable[[int], None], int, dict[str, float]]:
    """Return the fastest mode of the float decoder for a few bytes; failing ones are reported."""
    peers, rates = {}, {}
    for mode in modes:
        started = time.perf_counter()
        try:
            peers[mode] = more, _ = make_peer(name, model, prompt, mode)
            more(WARM_UP_BYTES)
            rates[mode] = round(bytes_per_second(more, TRIAL_BYTES), 1)
        except Exception:
            traceback.print_exc()
            continue
        seconds = time.perf_counter() - started
        print(f"  {mode}: {rates[mode]} bytes/s, ready in {seconds:.0f} s", file=sys.stderr)
    if not rates:
        raise RuntimeError("no mode of the float decoder runs here")
    best = max(rates, key=rates.__getitem__)
    return best, *peers[best], rates


def measure(name: str, modes: list[str], copy_bytes_per_second: float) -> list[dict]:
    """Measure a preset after a byte, and near the end of its context."""
    rows: list[dict] = []
    prompts = (1, preset(name).ctx - 300) if preset(name).ctx > 300 else (1,)
    twin, ours_model = build(name, "float"), build(name, "ternary")
    for prompt in prompts:
        with ExitStack() as stack:
            mode, peer, read_bytes, rates = find_peer(name, twin, prompt, modes)
            modes = [mode]  # so another prompt compiles it alone
            stack.enter_context(ours_model.prepared_weights())
            stack.enter_context(deterministic())
            ours = make_ours(ours_model, prompt)
            ours(WARM_UP_BYTES + TRIAL_BYTES)
            our_rates, peer_rates = in_turns(
                ROUNDS,
                *(partial(bytes_per_second, more, ROUND_BYTES) for more in (ours, peer)),
            )
        common = {"preset": name, "prompt_bytes": prompt}
        rows.append(common | _rates("moment", our_rates))
        peer_rate = statistics.median(peer_rates)
        rows.append(
            common
            | _rates("float bf16", peer_rates)
            | {
                "mode": mode,
                "modes_bytes_per_second": rates,
                "read_bytes": read_bytes,
                "copy_bytes_per_second": round(copy_bytes_per_second),
                "copy_share": round(read_bytes * peer_rate / copy_bytes_per_second, 4),
            }
        )
    return rows


def _rates(kind: str, rates: list[float]) -> dict:
    return {
        "kind": kind,
        "bytes_per_second": round(statistics.median(rates), 1),
        "rounds_bytes_per_second": [round(rate, 1) for rate in rates],
    }


def main() -> None:
    """Print a line a model and prompt, and write the rows."""
    parser = results.options("generation", "Time generation against a float model in bf16.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=["small", "1b"])
    all_modes = [DENSE, *MODES]
    parser.add_argument(
        "--mode", action="append", choices=all_modes, help="of the peer; all of them"
    )
    args = parser.parse_args()
    bandwidth = measure_roofline(Stopwatch(torch.device("cuda"))).bytes_per_second
    for name in args.presets:
        rows = measure(name, args.mode or all_modes, bandwidth)
        for ours, peer in zip(rows[::2], rows[1::2], strict=True):
            rate, twin = ours["bytes_per_second"], peer["bytes_per_second"]
            print(
                f"{name:5} after {ours['prompt_bytes']} bytes: {rate:,.0f} bytes/s, float bf16"
                f" {twin:,.0f} ({peer['mode']}, {peer['copy_share']:.0%} of the copy bandwidth):"
                f" {rate / twin:.2f} x",
                flush=True,
            )
        command = results.command_line("generation", name)
        results.save("generation", rows, command=command, folder=args.out)


if __name__ == "__main__":
    main()
