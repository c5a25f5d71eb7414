"""Time checks of several bytes against a step of one, both captured, and the kernels of each.

    python -m benchmarks.checks [PRESET...] [--sizes M...] [--prompt BYTES] [--kernels] [--out DIR]
    python -m benchmarks.checks (PRESET... | --run RUN) --text FILE [--sizes M...] [--favour X...]
        [--no-head] [--bytes N] [--several N] [--out DIR]

Weights of presets are random. A check takes as long whatever is accepted, so its bytes are not
counted there: a check that makes B bytes on average makes text B times the step's time over its own
as fast.

With `--text`, four texts that continue prompts from a file are timed and compared, of presets or of
a run's model; `times` is the median over these of how many times as fast a text is as a byte at a
time, and `same` says whether all bytes are. `--favour` is added to the logit of a byte that the
text repeats for each equal byte; with `--no-head` the text alone proposes, too. `--several` times
so many texts at once, with a head and without. Rows are written as they come, to
`checked_texts.json`.
"""

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from operator import truediv
from pathlib import Path
from typing import Any

import torch

from arbcli.config.presets import preset
from arbcli.families.ahead import speculation as speculative
from arbcli.families.ahead.config import AheadConfig
from arbcli.generation.decoder import Decoder
from arbcli.generation.load import load_model
from arbcli.generation.sampling import Sampling
from arbcli.model.language_model import LanguageModel
from benchmarks import results, several_texts

ROUNDS, RUNS, WARM_UP_RUNS, PROFILED = 5, 40, 8, 5
PROMPTS = (0.1, 0.25, 0.5, 0.75)
"""Where prompts begin in a file, as shares of it."""
WAYS = {"greedy": Sampling(temperature=0), "sampled": Sampling(temperature=0.8)}
TEXT_WAYS = WAYS | {"top-p": Sampling(temperature=0.8, top_p=0.95)}


def build(name: str, device: str) -> LanguageModel:
    """Make a model of random weights, with a head beyond the next byte."""
    config = preset(name)
    config = replace(config, ahead=AheadConfig(positions=AheadConfig.MOST, width=config.main.dim))
    with torch.device(device):
        model = LanguageModel(config)
    model.initialise(0)
    return model


def prepare(
    model: LanguageModel, size: int, prompt: int, how: Sampling
) -> tuple[Callable[[], None], ...]:
    """Read a prompt; return functions that go back to its end, make a step, and make a check."""
    runs = 2 * (ROUNDS * RUNS + WARM_UP_RUNS + PROFILED)
    decoder = Decoder(model, prompt + (runs + 1) * size, ahead=size)
    decoder.begin(b"\n" * prompt, how)
    if decoder.checks is not None:
        decoder.checks.begin(decoder._byte)
    position = decoder.cache.position.clone()

    def begin() -> None:
        decoder.cache.position.copy_(position)

    return begin, decoder.step, decoder.check


def microseconds(back: Callable[[], None], run: Callable[[], None], runs: int) -> float:
    """Time some runs after the prompt."""
    back()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(runs):
        run()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / runs


def kernels_of(run: Callable[[], None]) -> dict[str, tuple[float, float]]:
    """Return the launches of each kernel in a run, and how many us it adds to the run.

    A kernel may begin while the one before it still runs; what counts is from its end back to the
    end of the last one, or to its own beginning if that is later.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel"]
    found.sort(key=lambda event: event["ts"] + event["dur"])
    moved: dict[str, tuple[float, float]] = defaultdict(lambda: (0, 0))
    last = 0.0
    for event in found:
        end, args = event["ts"] + event["dur"], event["args"]
        grid, block = ("x".join(map(str, args[key])) for key in ("grid", "block"))
        registers = args.get("registers per thread", "?")
        label = f"{event['name'][:40]} {grid} of {block}, {registers} registers"
        count, total = moved[label]
        moved[label] = count + 1 / PROFILED, total + (end - max(event["ts"], last)) / PROFILED
        last = max(last, end)
    return moved


def measure(name: str, sizes: list[int], prompt: int, *, kernels: bool) -> list[dict]:
    """Time a preset's steps and checks in turns."""
    rows: list[dict] = []
    model = build(name, "cuda")
    with torch.no_grad(), model.prepared_weights():
        for size in sizes:
            for way, how in WAYS.items():
                back, step, check = prepare(model, size, prompt, how)
                for run in (step, check):
                    microseconds(back, run, WARM_UP_RUNS)
                rounds = [
                    [microseconds(back, run, RUNS) for run in (step, check)] for _ in range(ROUNDS)
                ]
                times = [statistics.median(part) for part in zip(*rounds, strict=True)]
                rows.append(
                    {
                        "preset": name,
                        "size": size,
                        "prompt": prompt,
                        "way": way,
                        "step_us": round(times[0], 1),
                        "check_us": round(times[1], 1),
                    }
                )
                print(
                    f"{name:5} after {prompt} bytes, {way}: a step {times[0]:,.1f} us, a check of"
                    f" {size} {times[1]:,.1f} us: {times[1] / times[0]:.2f} steps",
                    flush=True,
                )
                if kernels and way == "sampled":
                    for kind, run in (("step", step), (f"check of {size}", check)):
                        back()
                        print_kernels(kind, run)
    return rows


def print_kernels(kind: str, run: Callable[[], None]) -> None:
    """Print the time of each kernel, the longest first."""
    found = kernels_of(run)
    whole = sum(total for _, total in found.values())
    print(f"  {kind}: {whole:,.1f} us while profiled")
    for label, (count, total) in sorted(found.items(), key=lambda pair: -pair[1][1]):
        print(f"    {total:8.1f} us  {count:4.0f} x {total / count:6.2f} us  {label}")
    sys.stdout.flush()


def make_text(
    model: LanguageModel, prompt: bytes, how: Sampling, size: int, length: int
) -> tuple[bytes, float, float | None]:
    """Continue a prompt; return the text, bytes per second, and bytes of a check."""
    warm_up = WARM_UP_RUNS * size
    decoder = Decoder(model, len(prompt) + warm_up + length, ahead=size)
    decoder.begin(prompt, how)
    text = b"".join(map(bytes, decoder.stream(warm_up)))
    several_texts.synchronise()
    started = time.perf_counter()
    text += b"".join(map(bytes, decoder.stream(length)))
    return text, length / (time.perf_counter() - started), decoder.bytes_per_check


def measure_texts(
    model: LanguageModel, prompts: list[bytes], sizes: list[int], favours: list[float | None],
    length: int,
) -> Iterator[dict]:  # fmt: skip
    """Time texts, a byte at a time and by checks, and compare them.

    Args:
        model: with a head beyond the next byte, or without.
        prompts: that texts continue.
        sizes: of checks.
        favours: added to the logit of a byte that the text repeats, for each byte that was equal;
            None is the text's proposals alone.
        length: bytes of a text.
    """
    head = model.ahead
    for way, how in TEXT_WAYS.items():
        alone: list[bytes] = []
        slow: list[float] = []
        for size, favour in [(1, None), *((size, each) for each in favours for size in sizes)]:
            model.ahead = None if favour is None else head
            speculative.EACH_EQUAL = favour or 0.0
            made = [make_text(model, prompt, how, size, length) for prompt in prompts]
            texts, rates, per_check = zip(*made, strict=True)
            alone, slow = alone or [*texts], slow or [*rates]
            yield {
                "size": size,
                "way": way,
                "has_head": model.ahead is not None,
                "favour": favour,
                "bytes": length * len(prompts),
                "bytes_per_second": [round(rate) for rate in rates],
                "bytes_per_check": per_check,
                "times": round(statistics.median(map(truediv, rates, slow)), 3),
                # a warm-up by checks is longer
                "same": all(map(bytes.startswith, texts, alone)),
            }
    model.ahead = head


def measure_several(model: LanguageModel, texts: int) -> Iterator[dict]:
    """Time texts that are made at once, of a model with its head and without, in turns."""
    head, steps = model.ahead, {}
    for has_head in (False, True):
        model.ahead = head if has_head else None
        steps[has_head] = several_texts.make_ours(model, texts)
        several_texts.steps_per_second(steps[has_head], several_texts.WARM_UP_STEPS)
    rounds = [
        [texts * several_texts.steps_per_second(step, RUNS) for step in steps.values()]
        for _ in range(ROUNDS)
    ]
    for has_head, rates in zip(steps, zip(*rounds, strict=True), strict=True):
        yield {
            "size": 1,
            "way": f"{texts} texts",
            "has_head": has_head,
            "favour": None,
            "bytes_per_second": [round(rate) for rate in rates],
            "times": round(statistics.median(map(truediv, rates, [one[0] for one in rounds])), 3),
        }


def write_texts(name: str, model: LanguageModel, given: Any) -> None:
    """Print and write each row of the texts of a model as it comes."""
    whole = given.text.read_bytes()
    places = [int(share * len(whole)) for share in PROMPTS]
    prompts = [whole[at : at + given.prompt] for at in places]
    favours = [*given.favour, None] if given.no_head else given.favour
    what = ("--run", name) if given.run else (name,)
    command = results.command_line("checks", *what, "--text", "FILE")
    with torch.no_grad(), model.prepared_weights():
        rows = measure_texts(model, prompts, given.sizes, favours, given.bytes)
        for row in chain(measure_several(model, given.several) if given.several else (), rows):
            row = {"preset": name, "prompt": given.prompt} | row
            print(json.dumps(row), flush=True)
            results.save("checked_texts", [row], command=command, folder=given.out)


def main() -> None:
    """Print a line for each check, and write the rows."""
    parser = results.options("checks", "Time checks of several bytes against a step of one.")
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=["base", "1b"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--run", type=Path, help="folder of a run, instead of presets")
    parser.add_argument("--text", type=Path, help="file that prompts are taken from")
    parser.add_argument("--no-head", action="store_true", help="let the text alone propose, too")
    parser.add_argument(
        "--favour", type=float, nargs="+", default=[speculative.EACH_EQUAL], metavar="X"
    )
    parser.add_argument("--bytes", type=int, default=2500, help="of each of the four texts")
    parser.add_argument("--several", type=int, default=0, help="texts at once")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.run:
        write_texts(args.run.name, load_model(args.run, device=device), args)
        return
    for name in args.presets:
        preset(name)
        if args.text:
            write_texts(name, build(name, device), args)
            continue
        rows = measure(name, args.sizes, args.prompt, kernels=args.kernels)
        command = results.command_line("checks", name)
        results.save("checks", rows, command=command, folder=args.out)


if __name__ == "__main__":
    main()
