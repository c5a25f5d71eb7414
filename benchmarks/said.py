"""Share of the words that a model says which sound most like themselves.

    python -m benchmarks.said RUN TEXT REFERENCES [--wav DIR] [--out DIR]

TEXT and REFERENCES are `words-again.txt` and `words-train.txt` of `benchmarks.media_text words`:
the first has a reading of each word that was not trained on, the second others. The model continues
each word's text, after `NEARBY` records of TEXT, by its sound. Every sound is compared with
`--readings` readings of every word in REFERENCES, and recognised as the word of the nearest. The
peers are the readings of TEXT by espeak-ng, recognised in the same way, and chance. `--wav` writes
the sounds of the model, and those of TEXT next to them.

The distance of two sounds is that of their cepstra, `CEPSTRA` coefficients of the logarithm of the
power in `BANDS` bands, without loudness, aligned by dynamic time warping and divided by the length
of the path that the longer needs. Pitch changes it little, as bands are wide.
"""

import json
import wave
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arbcli.families.media.sound import decode_samples
from arbcli.families.media.spans import LONGEST_HEADER, SoundHeader, find_spans
from arbcli.generation.batch import Request, generate_batch
from arbcli.generation.load import load_model
from arbcli.generation.sampling import Sampling
from arbcli.kernels.runtime.device import deterministic, resolve_backend
from benchmarks import results

NEARBY = 2
"""Records before the word that is said."""
FRAME_SECONDS = 0.032
BANDS, CEPSTRA = 16, 8
FAR = 1e9
"""More than any distance."""


class Said(NamedTuple):
    """A word, and its sound."""

    word: str
    header: SoundHeader
    body: bytes

    @property
    def written(self) -> bytes:
        """The record, as `benchmarks.media_text` writes it."""
        return self.word.encode() + b"\n" + self.header.encode() + self.body + b"\n"


def said_in(content: bytes) -> list[Said]:
    """List the words of a text with their sounds; a sound that is cut off is left out."""
    found, begin = [], 0
    for span in find_spans(content):
        if isinstance(span.header, SoundHeader) and span.stop <= len(content):
            word = content[begin : span.start].strip().decode(errors="replace")
            found.append(Said(word, span.header, content[span.body : span.stop]))
        begin = span.stop
    return found


def cepstra(said: Said) -> np.ndarray:
    """Compute (frames, `CEPSTRA`) coefficients; a sound shorter than a frame has zeros."""
    samples = decode_samples(said.body, said.header).mean(axis=1) / 32768
    size = int(FRAME_SECONDS * said.header.rate) // 2 * 2
    number = (len(samples) - size) // (size // 2) + 1
    if number < 1:
        return np.zeros((1, CEPSTRA))
    places = np.arange(number)[:, None] * (size // 2) + np.arange(size)
    power = np.abs(np.fft.rfft(samples[places] * np.hanning(size), axis=1)) ** 2
    edges = np.linspace(0, power.shape[1], BANDS + 1).round().astype(int)
    bands = np.add.reduceat(power, edges[:-1], axis=1)
    logs = np.log(bands + 1e-4 * bands.mean())  # quieter than 40 dB below the mean is silence
    turns = np.arange(1, CEPSTRA + 1)[:, None] * (np.arange(BANDS) + 0.5) * np.pi / BANDS
    return logs @ np.cos(turns).T * (2 / BANDS) ** 0.5


def distances(sound: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """Measure the distance of a sound from each of some others, by dynamic time warping.

    Args:
        sound: (N, C) coefficients.
        others: (M, C) of each.
    """
    longest = max(map(len, others))
    padded = np.zeros((len(others), longest, sound.shape[1]))
    for row, other in zip(padded, others, strict=True):
        row[: len(other)] = other
    apart = np.linalg.norm(padded[:, None] - sound[None, :, None], axis=-1)  # (others, N, longest)
    before = np.full((len(others), longest + 1), FAR)
    before[:, 0] = 0
    for frame in range(len(sound)):
        now = np.full_like(before, FAR)
        for place in range(longest):
            steps = before[:, place], before[:, place + 1], now[:, place]
            now[:, place + 1] = apart[:, frame, place] + np.minimum.reduce(steps)
        before = now
    sizes = np.array([len(other) for other in others])
    return before[np.arange(len(others)), sizes] / np.maximum(sizes, len(sound))


def recognised(sounds: list[Said], references: list[Said]) -> list[tuple[str, float]]:
    """Find the word whose reading is nearest to each sound.

    Returns:
        The word, and the distance of the sound's own word over that of the nearest other: below 1
        if it is recognised.
    """
    known = [cepstra(one) for one in references]
    found = []
    for sound in sounds:
        apart = distances(cepstra(sound), known)
        own = np.array([one.word == sound.word for one in references])
        nearest = references[int(apart.argmin())].word
        found.append((nearest, float(apart[own].min() / apart[~own].min())))
    return found


def say(run: Path, texts: list[Said], temperature: float) -> tuple[list[Said], int]:
    """Let a model say the words; those that it says nothing for have an empty sound.

    Returns:
        A sound for each word, and how many were complete.
    """
    model = load_model(run)
    longest = max(len(one.body) for one in texts)
    length = longest + longest // 4 + LONGEST_HEADER
    requests = []
    for index, one in enumerate(texts):
        nearby = (texts[(index - turn) % len(texts)] for turn in range(NEARBY, 0, -1))
        prompt = b"".join(other.written for other in nearby) + one.word.encode() + b"\n"
        sampling = Sampling(temperature=temperature, seed=index)
        requests.append(Request(prompt=prompt, length=length, sampling=sampling))
    found, complete = list[Said](), 0
    with deterministic():
        backend = resolve_backend(None, model.device)
        made = dict(generate_batch(model, requests, 64, backend=backend))
    for index, one in enumerate(texts):
        first = next(find_spans(made[index]), None)
        header, body = one.header, b""
        if first and isinstance(first.header, SoundHeader):
            header, body = first.header, made[index][first.body : first.stop]
            complete += first.stop <= len(made[index])
        found.append(Said(one.word, header, body))
    return found, complete


def chosen(references: list[Said], words: set[str], readings: int) -> list[Said]:
    """Keep the first readings of each word."""
    counts = dict.fromkeys(words, 0)
    kept = []
    for one in references:
        if one.word in counts and counts[one.word] < readings:
            counts[one.word] += 1
            kept.append(one)
    return kept


def main() -> None:
    """Measure a run, and print and write one row."""
    parser = results.options("said", __doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("references", type=Path)
    parser.add_argument("--readings", type=int, default=4, help="of a word [default: 4]")
    parser.add_argument("--temperature", type=float, default=0.7, help="[default: 0.7]")
    parser.add_argument("--times", type=int, default=1, help="say each word [default: once]")
    parser.add_argument("--words", type=int, help="say only the first [default: all]")
    parser.add_argument("--wav", type=Path, help="folder for sounds")
    args = parser.parse_args()
    texts = said_in(args.text.read_bytes())[: args.words]
    words = {one.word for one in texts}
    references = chosen(said_in(args.references.read_bytes()), words, args.readings)
    if len(words) < 2:
        parser.error("TEXT needs two words or more")
    if lacking := words - {one.word for one in references}:
        parser.error(f"REFERENCES lacks readings of: {', '.join(sorted(lacking))}")
    often = texts * args.times
    sounds, complete = say(args.run, often, args.temperature)
    by_model, by_espeak = (recognised(some, references) for some in (sounds, texts))
    row = {
        "run": args.run.name,
        "text": args.text.name,
        "words": len(words),
        "readings": args.readings,
        "temperature": args.temperature,
        "times": args.times,
        "complete": complete / len(often),
        "recognised": _share(often, by_model),
        "recognised_of_espeak": _share(texts, by_espeak),
        "by_chance": 1 / len(words),
    }
    print(json.dumps(row))
    command = results.command_line("said", args.run.name, args.text.name, args.references.name)
    results.save("said", [row], command=command, folder=args.out)
    if args.wav:
        args.wav.mkdir(parents=True, exist_ok=True)
        about: list[dict[str, Any]] = []
        said = zip(often, sounds, by_model, strict=True)
        for index, (one, sound, (nearest, ratio)) in enumerate(said):
            name = f"{one.word}-{index // len(texts)}"
            about.append({"name": name, "nearest": nearest, "ratio": ratio})
            for kind, made in (("model", sound), ("espeak", one)):
                _write_wav(args.wav / f"{name}-{kind}.wav", made)
        about.sort(key=lambda word: word["ratio"])
        (args.wav / "words.json").write_text(json.dumps(about, indent=1))


def _write_wav(path: Path, said: Said) -> None:
    """Write a sound, without the packages that other formats need."""
    with wave.open(str(path), "wb") as file:
        file.setparams((said.header.channels, 2, said.header.rate, 0, "NONE", ""))
        file.writeframes(decode_samples(said.body, said.header).astype("<i2").tobytes())


def _share(texts: list[Said], found: list[tuple[str, float]]) -> float:
    """Share of the words that are recognised."""
    pairs = zip(texts, found, strict=True)
    return sum(one.word == nearest for one, (nearest, _) in pairs) / len(texts)


if __name__ == "__main__":
    main()
