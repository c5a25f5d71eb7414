"""Bits a sample of held-out speech after its own text, and after those of other records.

    python -m benchmarks.heard RUN TEXT [--others N] [--out DIR]

`benchmarks.media_text` writes the text: sentences or words, each followed by its sound.
Every sound is predicted after its own text and after N others, with the same bytes before and the
same header, which has its length. A text tells a model little of each sample: one of 256 words is
eight bits of a sound that takes thousands. So next to the bits a sample there are the bits by which
a sound is cheaper after its own text, the standard error of that, and how often no other is better.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

from arbcli.families.media.spans import find_spans
from arbcli.generation.load import load_model
from arbcli.kernels.runtime.backend import use_backend
from arbcli.kernels.runtime.device import deterministic, resolve_backend
from arbcli.model.language_model import LanguageModel
from benchmarks import results

NEARBY = 8
"""Records before the one that is predicted; a window has as much of them as it holds."""


def records(content: bytes) -> list[tuple[bytes, bytes, int]]:
    """Cut a text into (text of a sound, sound with its header, bytes of its samples)."""
    found, begin = [], 0
    for span in find_spans(content):
        found.append((content[begin : span.start], content[span.start : span.stop], span))
        begin = span.stop + 1  # a newline follows
    return [(text, sound, span.header.body_bytes) for text, sound, span in found]


@torch.no_grad()
def costs(model: LanguageModel, content: bytes, others: int) -> list[list[float]]:
    """Measure the nats of each sound, after its own text first, and then after those of others.

    Args:
        model: of bytes.
        content: whole records.
        others: texts of each sound besides its own.
    """
    found, size = [], model.config.ctx + 1
    every = records(content)
    for index, (_, sound, samples) in enumerate(every):
        nearby = (every[(index - turn) % len(every)] for turn in range(NEARBY, 0, -1))
        before = b"\n".join(text + sound for text, sound, _ in nearby)
        texts = [every[(index + turn) % len(every)][0] for turn in range(others + 1)]
        windows = [(before + b"\n" + text + sound)[-size:] for text in texts]
        if len({*map(len, windows)}) > 1 or samples >= size:
            raise ValueError(f"a window of {size} bytes and {samples} samples do not fit")
        ids = torch.tensor([[*window] for window in windows], device=model.device)
        losses = model.position_losses(ids[:, :-1], ids[:, 1:])
        found.append(losses[:, -samples:].double().sum(dim=1).tolist())
    return found


def told(found: list[list[float]], samples: int) -> dict[str, Any]:
    """Measure the benefit of own texts.

    Args:
        found: of `costs`.
        samples: of all sounds.
    """
    nats = torch.tensor(found, dtype=torch.float64)
    own, others = nats[:, 0], nats[:, 1:].mean(dim=1)
    saved = (others - own) / math.log(2)
    return {
        "sounds": len(nats),
        "bits_per_sample": float(own.sum()) / math.log(2) / samples,
        "after_others": float(others.sum()) / math.log(2) / samples,
        "bits_saved_per_sound": float(saved.mean()),
        "standard_error": float(saved.std()) / len(saved) ** 0.5,
        "own_is_likeliest": float((nats.argmin(dim=1) == 0).double().mean()),
        "by_chance": 1 / nats.shape[1],
    }


def main() -> None:
    """Measure a run, and print and write one row."""
    parser = results.options("heard", __doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--others", type=int, default=15, help="texts of a sound [default: 15]")
    args = parser.parse_args()
    model, content = load_model(args.run), args.text.read_bytes()
    with deterministic(), use_backend(resolve_backend(None, model.device)):
        found = costs(model, content, args.others)
    samples = sum(size for *_, size in records(content))
    row = {"run": args.run.name, "text": args.text.name, "others": args.others}
    row |= told(found, samples)
    print(json.dumps(row))
    command = results.command_line("heard", args.run.name, args.text.name)
    results.save("heard", [row], command=command, folder=args.out)


if __name__ == "__main__":
    main()
