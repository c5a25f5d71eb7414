"""Shards: files of tokens that other programs wrote, as integers of two or four bytes.

llm.c's have a header, whose first number distinguishes them from any text. Files without one,
such as nanoGPT's, are shards only if `--data-format` says so.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arbcli.base.errors import ArbError
from arbcli.base.reading import DAMAGED, file_size, open_regular
from arbcli.data.conversion import bounded, converted
from arbcli.data.files import name_inside
from arbcli.data.text import TOKEN_BYTES, Text

if TYPE_CHECKING:
    from arbcli.data.tokens import Tokenizer

HEADER_BYTES = 1024
"""Size of llm.c's header, 256 little-endian int32: magic number, version and number of tokens."""
MAGIC = {(20240520, 1): 2, (20240801, 7): 4}
"""Bytes of a token by magic number and version, of GPT-2 and of Llama 3."""
CHUNK = 2**12
"""Number of tokens that are decoded at once."""


def header_width(beginning: bytes) -> int | None:
    """Return the bytes of a token of a file that begins with a header; None without one."""
    numbers = np.frombuffer(beginning[:8].ljust(8, b"\0"), "<i4").tolist()
    return MAGIC.get(tuple(numbers))


def shard_layout(path: Path, data_format: str | None) -> tuple[int, int]:
    """Return the offset of a shard's first token, and the bytes of a token.

    Args:
        path: path of a `.bin` file.
        data_format: a key of `TOKEN_BYTES`; None reads the header.

    Raises:
        ArbError: the file has no header and there is no `data_format`, or its size does not fit.
    """
    if name_inside(path) != path.name.lower():
        raise ArbError(
            f"`{path}` is compressed, and a shard of tokens is not",
            "unpack it; or add `--data-format bytes` to read its bytes as text",
        )
    with open_regular(path) as file:
        beginning = file.read(HEADER_BYTES)
    size = file_size(path)
    if width := header_width(beginning):
        tokens = int.from_bytes(beginning[8:12], "little")
        if data_format not in (None, f"tokens{8 * width}"):
            raise ArbError(
                f"`{path}` has a header of llm.c for tokens of {width} bytes",
                "leave `--data-format` out",
            )
        if size != HEADER_BYTES + width * tokens:
            raise ArbError(
                f"`{path}` has {size:,} bytes, and its header says {tokens:,} tokens",
                DAMAGED,
            )
        return HEADER_BYTES, width
    if data_format is None:
        raise ArbError(
            f"`{path}` has no header, so that its format is unknown",
            "add `--data-format tokens16` or `tokens32`, with `--tokenizer`, for tokens"
            " of nanoGPT, or `bytes` to read its bytes as text",
        )
    width = TOKEN_BYTES[data_format]
    if size % width:
        raise ArbError(
            f"`{path}` has {size:,} bytes, not a whole number of tokens of {width}",
            "choose another `--data-format`, or fetch the file again",
        )
    return 0, width


def decoded_shards(shards: Text, tokenizer: "Tokenizer") -> Text:
    """Return the text of shards in bytes, from the cache if possible.

    A special token, as between documents, is a newline.

    Raises:
        ArbError: a token is not in the vocabulary, no token has text, or the cache cannot be
            written.
    """
    files = []
    for path, start, stop in shards.pieces:
        settings = f"{start} {stop} of {shards.token_bytes}\ntext {tokenizer.digest}"
        piece = Text.from_parts([(path, start, stop)], shards.token_bytes)
        blocks = _decoded(piece, tokenizer, path)
        files.append(converted(path, settings, partial(bounded, blocks, path)))
    text = Text(files)
    if shards.pieces and not text:
        raise ArbError(
            f"the tokens of `{shards.pieces[0][0]}` are not text in `{tokenizer.name}`",
            "name the tokenizer that made the shard, or another `--data-format`",
        )
    return text


def _decoded(piece: Text, tokenizer: "Tokenizer", path: Path) -> Iterator[bytes]:
    chunks = _chunks(piece, tokenizer, path)
    for is_special, group in itertools.groupby(chunks, key=lambda chunk: not chunk):
        if is_special:
            yield from (b"\n" for _ in group)
        else:
            yield from tokenizer.decoded([], group)


def _chunks(piece: Text, tokenizer: "Tokenizer", path: Path) -> Iterator[list[int]]:
    """Yield the tokens of a piece, and an empty list in place of each special token."""
    width, special = piece.token_bytes, [*tokenizer.specials.values()]
    for start in range(0, len(piece), CHUNK * width):
        content = piece.read(start, min(CHUNK * width, len(piece) - start))
        tokens = np.frombuffer(content, f"<u{width}")
        if (largest := int(tokens.max())) >= tokenizer.size:
            raise ArbError(
                f"`{path}` has the token {largest:,}, and `{tokenizer.name}` has"
                f" {tokenizer.size:,} tokens",
                "name the tokenizer that made the shard, or another `--data-format`",
            )
        rest = 0
        for at in np.flatnonzero(np.isin(tokens, special)).tolist():
            if at > rest:
                yield tokens[rest:at].tolist()
            yield []
            rest = at + 1
        if rest < len(tokens):
            yield tokens[rest:].tolist()
