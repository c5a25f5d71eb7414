"""Collect source code of installed packages, as a text to train on, and chats about it.

    python -m benchmarks.code_text FOLDER [--bytes N]

Writes `code-train.txt` and `code-val.txt`: files of the standard library and of all packages of the
running Python, each once, in an order that their names and sizes decide, and of equals their paths.
The first 2 MB are held out, so no file is in both. `chats-train.jsonl` and `chats-val.jsonl` ask
for the docstring of each function of these files that has one. The texts depend on the packages
installed: compare runs on one machine.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

ENDINGS = {".py", ".pyi", ".h", ".cuh", ".hpp", ".c", ".cpp", ".cu", ".js"}
LARGEST = 1_000_000
"""Bytes of a file; larger ones are tables."""
HELD_OUT = 2_000_000
CODE_CHARACTERS, ANSWER_CHARACTERS = range(100, 2000), range(60, 1500)
"""Sizes of a function and of its docstring in a chat."""


def sources() -> list[Path]:
    """List files of source code, in an order that has nothing to do with where they lie."""
    roots = {Path(sysconfig.get_paths()[kind]) for kind in ("stdlib", "purelib", "platlib")}
    paths = {path for root in roots for path in root.rglob("*") if path.suffix in ENDINGS}
    sized = [(path, path.stat().st_size) for path in paths if path.is_file()]
    files = [(path, size) for path, size in sized if size <= LARGEST]
    return [
        path for path, _ in sorted(files, key=lambda file: (_digest(file[0].name, file[1]), file))
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


def chats(source: bytes) -> Iterator[dict]:
    """Ask for the docstring of each function of a file of Python, as records of `messages`."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) == 1:
            continue
        answer = ast.get_docstring(node)
        if answer is None or len(answer) not in ANSWER_CHARACTERS:
            continue
        del node.body[0]
        code = ast.unparse(node)
        # a message that contains the text of a special token is refused
        if len(code) in CODE_CHARACTERS and "<|" not in code + answer:
            question = {
                "role": "user",
                "content": f"Write a docstring for this function.\n\n{code}",
            }
            yield {"messages": [question, {"role": "assistant", "content": answer}]}


def main() -> None:
    """Write both texts and print their sizes."""
    parser = argparse.ArgumentParser(description="Collect source code as a text to train on.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=int, default=160_000_000, help="[default: 160,000,000]")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = contents(sources())
    for part, most in (("val", HELD_OUT), ("train", args.bytes)):
        code, asked = args.folder / f"code-{part}.txt", args.folder / f"chats-{part}.jsonl"
        written = 0
        with code.open("wb") as file, asked.open("w") as records:
            while written < most and (data := next(texts, None)) is not None:
                written += file.write(data)
                records.writelines(json.dumps(chat) + "\n" for chat in chats(data))
        print(f"{code}: {written:,} bytes, {asked}: {asked.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
