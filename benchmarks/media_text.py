"""Make speech, or pages of text and shapes, as bytes to train on: nothing is fetched.

    python -m benchmarks.media_text speech novels.txt FOLDER [--bytes N]
    python -m benchmarks.media_text words novels.txt FOLDER --rate 4000 [--readings N]
    python -m benchmarks.media_text pages novels.txt FOLDER [--bytes N]

Each sentence or clause of a text is followed by its sound, spoken by espeak-ng in one of several
voices, in mu-law or 16 bits; or by a grey page that Pillow draws it on, with shapes, in a font of
the system. Held out are the first `--held-out` ones of the text, or of another, `--val`. Words are
the commonest of the text, each read several times by voices in turn, so that a window holds a word
next to all of its sound; `words-again.txt` has those trained on, in a reading that is not.

Writes `KIND-train.txt`, `KIND-val.txt`, and `KIND-val-others.txt`, where each sound or page follows
the sentence of another: what that costs more is what a model hears of a text. They are those that
`arb` makes of files, so that a machine needs neither program. `KIND.json` has the bits a sample of
FLAC, or a pixel of lossless WebP and PNG, over all that is held out. FLAC codes the samples that
mu-law stands for, and the codes themselves, as samples of eight bits, which takes less.
`arb evaluate` has the model's bits:

    arb train --data speech-train.txt --val speech-val.txt --preset small --ctx 4096 --minutes 8
    arb evaluate auto --data speech-val.txt; arb evaluate auto --data speech-val-others.txt
"""

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arbcli.families.media.pictures import decode_pixels, encoded_bytes
from arbcli.families.media.sound import decode_samples, encode_samples, flac_bytes
from arbcli.families.media.spans import SAMPLE_BYTES, PictureHeader, SoundHeader

RATE = 8000
"""Samples a second, unless `--rate` says otherwise."""
WORDS = 300
"""Commonest words of a text."""
WORD = re.compile(r"[a-z]{3,12}")
SPEEDS = 5
SLOWEST = 140
"""Words a minute, unless `--slowest` says otherwise."""
READINGS = 100
"""Ways to read a word: as many pitches as make 100 with voices and speeds."""
NEXT_READING = 7
"""Added to the index of a word by each reading: no two of a hundred sound the same."""
WAV_HEADER = 44
"""Bytes before the samples that espeak-ng writes."""
SPOKEN_RATE = 22050
VOICES = ("en-gb", "en-us", "en-gb-scotland+f2", "en-us+m3", "en-gb+f3", "en-gb-x-rp+m5")
WIDTH, HEIGHT = 128, 128
AT_ONCE = 256
"""Records that are made before the first of them is written."""
FONTS = Path("/usr/share/fonts")


def sentences(text: str, longest: int = 160) -> list[str]:
    """List sentences and clauses, each once, in an order without meaning.

    Args:
        text: novels, or another text with punctuation.
        longest: characters of the longest; the shortest have an eighth.
    """
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?,;:])\s+", text))
    kept = {part for part in parts if longest // 8 <= len(part) <= longest}
    return sorted(kept, key=lambda part: hashlib.sha256(part.encode()).digest())


def words(text: str, most: int = WORDS) -> list[str]:
    """List the commonest words of three to twelve letters, in an order without meaning."""
    counts = Counter(part for part in re.split(r"[^A-Za-z]+", text) if WORD.fullmatch(part))
    kept = sorted(counts, key=lambda word: (-counts[word], word))[:most]
    return sorted(kept, key=lambda word: hashlib.sha256(word.encode()).digest())


def resampled(samples: np.ndarray, number: int) -> np.ndarray:
    """Cut off the frequencies above those that `number` int16 samples have."""
    spectrum = np.fft.rfft(samples)[: number // 2 + 1]
    found = np.fft.irfft(spectrum, number) * (number / len(samples))
    return np.clip(np.rint(found), -32768, 32767).astype(np.int16)


def spoken(
    sentence: str,
    index: int,
    form: str = "mulaw",
    rate: int = RATE,
    *,
    voices: int = len(VOICES),
    pitches: int = 0,
    pause: bool = True,
    slowest: int = SLOWEST,
) -> tuple[SoundHeader, bytes]:
    """Speak a sentence, in the voice of its index, as a form of `SAMPLE_BYTES`.

    Args:
        sentence: what to say.
        index: chooses voice and speed.
        form: of the samples.
        rate: samples a second.
        voices: how many of `VOICES` there are.
        pitches: how many each has; 0 is its own alone.
        pause: whether silence follows.
        slowest: words a minute of the slowest speed; the others are 10 to 40 faster.
    """
    voice, speed = VOICES[index % voices], slowest + 10 * (index % SPEEDS)
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "--stdout", "--", sentence]
    if pitches:
        turn = index // (SPEEDS * voices) % pitches
        command[1:1] = ["-p", str(30 + 40 * turn // pitches)]
    if not pause:
        command.insert(1, "-z")
    wave = subprocess.run(command, check=True, capture_output=True).stdout[WAV_HEADER:]
    samples = np.frombuffer(wave, dtype="<i2", count=len(wave) // 2)
    samples = resampled(samples, len(samples) * rate // SPOKEN_RATE)
    header = SoundHeader(form, rate, 1, len(samples))
    return header, encode_samples(samples[:, None], form)


def drawn(sentence: str, index: int) -> tuple[PictureHeader, bytes]:
    """Draw a sentence on a page, with shapes, by the random numbers of its index."""
    dice = np.random.default_rng(index)
    image = import_module("PIL.Image").new("L", (WIDTH, HEIGHT), int(dice.integers(200, 256)))
    draw = import_module("PIL.ImageDraw").Draw(image)
    for _ in range(int(dice.integers(0, 4))):
        left, top = (int(dice.integers(0, size)) for size in (WIDTH - 16, HEIGHT - 16))
        box = (left, top, left + int(dice.integers(8, 64)), top + int(dice.integers(8, 64)))
        shape = (draw.rectangle, draw.ellipse, draw.line)[int(dice.integers(0, 3))]
        shape(box, fill=int(dice.integers(60, 230)))
    size = int(dice.integers(9, 17))
    lines, each = [""], int(1.7 * WIDTH / size)
    for word in sentence.split():
        longer = f"{lines[-1]} {word}".strip()
        lines[-1:] = [longer] if len(longer) <= each else [lines[-1], word]
    draw.multiline_text((4, 4), "\n".join(lines), fill=0, font=_font(index, size), spacing=2)
    rows = b"".join(row.tobytes() + b"\n" for row in np.asarray(image))
    return PictureHeader("grey", WIDTH, HEIGHT), rows


def _font(index: int, size: int) -> Any:
    fonts, kind = _fonts(), import_module("PIL.ImageFont")
    return kind.truetype(fonts[index % len(fonts)], size) if fonts else kind.load_default(size)


@cache
def _fonts() -> list[Path]:
    return sorted(FONTS.rglob("*.ttf"))


class Record(NamedTuple):
    """A sentence, and its sound or its page."""

    sentence: str
    header: SoundHeader | PictureHeader
    body: bytes

    def written(self, sentence: str | None = None) -> bytes:
        """Write it after its sentence, or after another."""
        text = self.sentence if sentence is None else sentence
        return text.encode() + b"\n" + self.header.encode() + self.body + b"\n"

    def sizes(self) -> dict[str, int]:
        """Count the bytes that it takes in lossless formats."""
        if isinstance(self.header, PictureHeader):
            return encoded_bytes(decode_pixels(self.body, self.header))
        sizes = {"FLAC": flac_bytes(decode_samples(self.body, self.header), self.header.rate)}
        if self.header.form == "mulaw":
            sizes["FLAC of codes"] = flac_bytes_of_codes(self.body)
        return sizes


def flac_bytes_of_codes(codes: bytes) -> int:
    """Count the bytes of a FLAC file, at its best level, whose samples are codes of eight bits."""
    file = io.BytesIO()
    samples = (np.frombuffer(codes, np.uint8).astype(np.int16) - 128) * 256
    how = {"format": "FLAC", "subtype": "PCM_S8", "compression_level": 1.0}
    import_module("soundfile").write(file, samples, RATE, **how)
    return len(file.getvalue())


KINDS = ("speech", "words", "pages")
"""Speech is clauses of a text, words are its words alone, and pages are drawn."""


def records(
    kind: str,
    texts: list[str],
    form: str = "mulaw",
    rate: int = RATE,
    voices: int = 2,
    begin: int = 0,
    slowest: int = SLOWEST,
) -> Iterator[Record]:
    """Make the records of texts, several at once, in their order.

    Args:
        kind: one of `KINDS`.
        texts: what is spoken or drawn.
        form: of samples.
        rate: samples a second.
        voices: 1, 2 or 4, that read words; clauses have all of `VOICES`.
        begin: the index of the first text.
        slowest: words a minute of the slowest speed.
    """
    make: Callable[[str, int], tuple[SoundHeader | PictureHeader, bytes]] = drawn
    if kind != "pages":
        make = partial(spoken, form=form, rate=rate, slowest=slowest)
    if kind == "words":
        pitches = READINGS // (SPEEDS * voices)
        make = partial(
            spoken, form=form, rate=rate, slowest=slowest, voices=voices, pitches=pitches,
            pause=False,
        )  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first in range(0, len(texts), AT_ONCE):
            some = texts[first : first + AT_ONCE]
            for text, body in zip(some, pool.map(make, some, count(begin + first)), strict=True):
                yield Record(text, *body)


def write_held_out(
    folder: Path, kind: str, held: list[Record], *, peers: bool = True
) -> dict[str, Any]:
    """Write the held-out part, with its own sentences and with others'; return sizes by format.

    Args:
        folder: for the files.
        kind: one of `KINDS`.
        held: records.
        peers: whether the sizes are measured, for which soundfile or Pillow is needed.
    """
    texts = [record.sentence for record in held]
    for name, before in (("val", texts), ("val-others", texts[1:] + texts[:1])):
        pairs = zip(held, before, strict=True)
        content = b"".join(record.written(sentence) for record, sentence in pairs)
        (folder / f"{kind}-{name}.txt").write_bytes(content)
    units = sum(record.header.units for record in held)
    if not peers:
        return {"units": units}
    every = [one.sizes() for one in held]
    bits = {name: 8 * sum(sizes[name] for sizes in every) / units for name in every[0]}
    return {"units": units, "bits_per_unit": bits}


def main() -> None:
    """Write the texts, and print the sizes of the held-out part in other formats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=int, default=48_000_000, help="[default: 48,000,000]")
    parser.add_argument("--held-out", type=int, default=40, help="sentences [default: 40]")
    parser.add_argument(
        "--val", type=Path, help="text whose sentences are held out [default: TEXT]"
    )
    parser.add_argument("--longest", type=int, default=160, help="characters [default: 160]")
    parser.add_argument("--form", choices=SAMPLE_BYTES, default="mulaw", help="[default: mulaw]")
    parser.add_argument("--rate", type=int, default=RATE, help="samples a second [default: 8,000]")
    parser.add_argument("--words", type=int, default=WORDS, help="how many [default: 300]")
    parser.add_argument("--readings", type=int, default=32, help="of a word [default: 32]")
    parser.add_argument(
        "--voices", type=int, choices=(1, 2, 4), default=2, help="of words [default: 2]"
    )
    parser.add_argument(
        "--slowest", type=int, default=SLOWEST, help="words a minute [default: 140]"
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="do not measure sizes in other formats"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    is_word = args.kind == "words"
    parse = partial(words, most=args.words)
    if not is_word:
        parse = partial(sentences, longest=args.longest)
    texts, others = (
        parse(path.read_text("utf-8", errors="replace"))
        for path in (args.text, args.val or args.text)
    )
    made = partial(
        records, args.kind, form=args.form, rate=args.rate, voices=args.voices, slowest=args.slowest
    )
    held = list(made(others[: args.held_out]))
    apart = {record.sentence for record in held}
    report = write_held_out(args.folder, args.kind, held, peers=not args.no_peers)
    texts = [text for text in texts if text not in apart]
    if is_word:
        unread = made(texts, begin=NEXT_READING * args.readings)
        content = b"".join(record.written() for record in unread)
        (args.folder / f"{args.kind}-again.txt").write_bytes(content)
    written, numbers = 0, range(args.readings if is_word else 1)
    every = chain.from_iterable(made(texts, begin=NEXT_READING * number) for number in numbers)
    with (args.folder / f"{args.kind}-train.txt").open("wb") as file:
        while written < args.bytes and (record := next(every, None)) is not None:
            written += file.write(record.written())
    report = {"kind": args.kind, "train_bytes": written, **report}
    (args.folder / f"{args.kind}.json").write_text(json.dumps(report))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
