"""Time texts of a trained model by speculative decoding against a byte at a time.

    python -m benchmarks.checks RUN --text FILE [--sizes M...] [--favour X...] [--no-head]
        [--bytes N] [--out DIR]

Four texts that continue prompts from a file are timed and compared: `times` is the median over
these of how many times as fast a text is as a byte at a time, and `same` says whether all bytes
are. `--favour` is added to the logit of a byte that the text repeats for each equal byte; with
`--no-head` the text alone proposes, too. Rows are written as they come, to `checked_texts.json`.
"""

import json
import statistics
import time
from collections.abc import Iterator
from operator import truediv
from pathlib import Path

import torch

from arbcli.families.ahead import speculation as speculative
from arbcli.generation.decoder import Decoder
from arbcli.generation.load import load_model
from arbcli.generation.sampling import Sampling
from arbcli.model.language_model import LanguageModel
from benchmarks import results
from benchmarks.measuring import wait

WARM_UP_RUNS = 8
PROMPTS = (0.1, 0.25, 0.5, 0.75)
"""Where prompts begin in a file, as shares of it."""
WAYS = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(temperature=0.8),
    "top-p": Sampling(temperature=0.8, top_p=0.95),
}


def make_text(
    model: LanguageModel, prompt: bytes, how: Sampling, size: int, length: int
) -> tuple[bytes, float, float | None]:
    """Continue a prompt; return the text, bytes per second, and bytes of a check."""
    warm_up = WARM_UP_RUNS * size
    decoder = Decoder(model, len(prompt) + warm_up + length, ahead=size)
    decoder.begin(prompt, how)
    text = b"".join(map(bytes, decoder.stream(warm_up)))
    wait()
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
    for way, how in WAYS.items():
        unchecked: list[bytes] = []
        slow: list[float] = []
        for size, favour in [(1, None), *((size, each) for each in favours for size in sizes)]:
            model.ahead = None if favour is None else head
            speculative.EACH_EQUAL = favour or 0.0
            results = [make_text(model, prompt, how, size, length) for prompt in prompts]
            texts, rates, per_check = zip(*results, strict=True)
            unchecked, slow = unchecked or [*texts], slow or [*rates]
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
                "same": all(map(bytes.startswith, texts, unchecked)),
            }
    model.ahead = head


def main() -> None:
    """Print and write each row of the texts of a model as it comes."""
    parser = results.options("checks", "Time texts by checks of several bytes.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--text", type=Path, required=True, help="file that prompts are taken from")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--no-head", action="store_true", help="let the text alone propose, too")
    parser.add_argument(
        "--favour", type=float, nargs="+", default=[speculative.EACH_EQUAL], metavar="X"
    )
    parser.add_argument("--bytes", type=int, default=2500, help="of each of the four texts")
    args = parser.parse_args()
    model = load_model(args.run, device="cuda" if torch.cuda.is_available() else "cpu")
    content = args.text.read_bytes()
    places = [int(share * len(content)) for share in PROMPTS]
    prompts = [content[at : at + args.prompt] for at in places]
    favours = [*args.favour, None] if args.no_head else args.favour
    command = results.command_line("checks", "RUN", "--text", "FILE")
    with torch.no_grad(), model.prepared_weights():
        for row in measure_texts(model, prompts, args.sizes, favours, args.bytes):
            row = {"preset": args.run.name, "prompt": args.prompt} | row
            print(json.dumps(row), flush=True)
            results.save("checked_texts", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()
