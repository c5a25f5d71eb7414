"""Collect source code of installed packages, as a text to train on.

    python -m benchmarks.code_text FOLDER [--bytes N]

Writes `code-train.txt` and `code-val.txt`: files of the standard library and of all packages of the
running Python, each once, in an order that their names and sizes decide, and of equals their paths.
The first 2 MB are held out, so no file is in both. What is found depends on what is installed:
compare runs on one machine.
"""

import argparse
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ENDINGS = {".py", ".pyi", ".h", ".cuh", ".hpp", ".c", ".cpp", ".cu", ".js"}
LARGEST = 1_000_000
"""Bytes of a file; larger ones are tables."""
HELD_OUT = 2_000_000


def sources() -> list[Path]:
    """List files of source code, in an order that has nothing to do with where they lie."""
    roots = {Path(sysconfig.get_paths()[kind]) for kind in ("stdlib", "purelib", "platlib")}
    paths = {path for root in roots for path in root.rglob("*") if path.suffix in ENDINGS}
    sized = [(path, path.stat().st_size) for path in paths if path.is_file()]
    kept = [(path, size) for path, size in sized if size <= LARGEST]
    return [
        path for path, _ in sorted(kept, key=lambda file: (_digest(file[0].name, file[1]), file))
    ]


def _digest(name: str, size: int) -> bytes:
    return hashlib.sha256(f"{name}{size}".encode()).digest()


def contents(paths: list[Path]) -> Iterator[bytes]:
    """Read each file that is text and that was not read before under another name."""
    seen = set()
    for path in paths:
        data = path.read_bytes()
        digest = hashlib.sha256(data).digest()
        if digest not in seen and b"\0" not in data:
            seen.add(digest)
            yield data


def main() -> None:
    """Write both texts and print their sizes."""
    parser = argparse.ArgumentParser(description="Collect source code as a text to train on.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=int, default=160_000_000, help="[default: 160,000,000]")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = contents(sources())
    for name, most in (("code-val.txt", HELD_OUT), ("code-train.txt", args.bytes)):
        written = 0
        with (args.folder / name).open("wb") as file:
            while written < most and (data := next(texts, None)) is not None:
                written += file.write(data)
        print(f"{args.folder / name}: {written:,} bytes")


if __name__ == "__main__":
    main()
