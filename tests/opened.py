"""Record what is opened, or refused, for entries of `--data` alone, in pairs and with options.

`python tests/opened.py` writes it to `opened.txt`; `test_data.py` compares. A line has the entries,
the description of the text, the kind of split, and of both parts the length, the number of windows
and a checksum; or the error of the names alone, and the error of opening them.
"""

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import chdir
from itertools import permutations, product
from pathlib import Path
from typing import Any
from unittest import mock

from arbcli.base.errors import ArbError
from arbcli.data.files import Conversion, check_named
from arbcli.data.opening import open_texts
from arbcli.data.text import Text

WRITTEN = Path(__file__).with_suffix(".txt")
CONTEXT, SHORT = 8, 36
ENTRIES = ("a.txt", "b.txt", "empty.txt", "rows.jsonl", "packed.gz", "deep", "deep/**/*.txt",
           "nothing", "deep/binary", "pipe", "~/home.txt", "a.txt:2", "deep:0.5",
           "b.txt:0")  # fmt: skip
OPTIONS: dict[str, tuple] = {
    "field": (None, "body"), "val": ((), ("b.txt",), ("deep", "empty.txt")),
    "split": (None, "files", "within"),
}  # fmt: skip


def make_folder() -> None:
    """Write the files that entries name into the current folder."""
    texts = {name: (f"{name} of " * size).encode() for name, size in
             {"a.txt": 60, "b.txt": 31, "empty.txt": 0, "home/home.txt": 9}.items()}  # fmt: skip
    texts |= {
        f"deep/{name}": (name * 40).encode() for name in ("c.txt", "d.txt", "far/e.txt", ".f")
    }
    texts |= {"deep/binary": bytes(50), "deep/.g/h.txt": b"hidden" * 9}
    texts |= {
        "deep/step-000001.safetensors": b"saved" * 9,
        "packed.gz": gzip.compress(b"zip " * 99),
    }
    texts["rows.jsonl"] = b"".join(
        json.dumps({"body": f"row {row} " * 3, "other": str(row)}).encode() + b"\n"
        for row in range(40)
    )
    for name, content in texts.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    os.symlink("..", "deep/far/up")
    os.mkfifo("pipe")


def _part(text: Text) -> str:
    """Describe a text by its length, its windows, and a checksum of five and of its end."""
    starts = text.starts(b"a key", 5, CONTEXT)
    content = b"".join(text.read(start, CONTEXT) for start in starts) + text.read(len(text) - 3, 3)
    return f"{len(text)} bytes, {text.windows(CONTEXT)} windows, {zlib.crc32(content):08x}"


def _short(error: ArbError, said: dict[str, None]) -> str:
    text = str(error).replace(os.getcwd(), "FOLDER")
    said[f"{text} ({error.hint})"] = None
    return f"{text[:SHORT]}.."


def _result(
    said: dict[str, None],
    entries: tuple[str, ...],
    field: str | None = None,
    val: tuple[str, ...] = (),
    split: str | None = None,
    seed: int = 0,
) -> str:
    """Describe what opening the entries gives; add errors to `said`."""
    conversion, named = Conversion(field=field), ""
    try:
        check_named(entries, field)
    except ArbError as error:
        named = f"{_short(error, said)}; "
    try:
        texts = open_texts(
            entries, val, seed=seed, context=CONTEXT - 1, conversion=conversion, split=split
        )
    except ArbError as error:
        return f"{named}{_short(error, said)}"
    parts = f"{_part(texts.train)}; {_part(texts.val)}"
    return f"{named}{texts.description}; {texts.split}; {parts}"


def _entries_with_options() -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield entries with options: each with all options, and each pair with some."""
    for entry in ENTRIES:
        for values in product(*OPTIONS.values()):
            yield (entry,), dict(zip(OPTIONS, values, strict=True))
    for number, entries in enumerate(permutations(ENTRIES, 2)):
        yield entries, {"field": (None, "body")[number % 2], "seed": number % 3}
    yield tuple(f"{entry}:{n + 1}" for n, entry in enumerate(("a.txt", "b.txt", "deep"))), {}


def opened() -> Iterator[str]:
    """Yield a line for all entries and options, and then all errors."""
    said: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        make_folder()
        with mock.patch.dict(os.environ, XDG_CACHE_HOME="cache", HOME=f"{folder}/home"):
            for entries, given in _entries_with_options():
                options = "".join(f" {name}={value}" for name, value in given.items() if value)
                result = _result(said, entries, **given)
                yield f"{' '.join(entries)}{options}: {result}"
    yield from said


if __name__ == "__main__":
    WRITTEN.write_text("\n".join(opened()) + "\n", encoding="utf-8")
