"""Tokenizers of the package tokenizers, and texts of tokens.

Each file is tokenised once, to a file in the cache with little-endian integers of two or four
bytes, which is memory-mapped. Splits, held-out texts and losses per byte are defined on bytes, and
do not depend on the tokenizer.
"""

import json
import re
from base64 import b64decode
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import accumulate, islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arbcli.base.errors import ArbError, library_errors, optional_module
from arbcli.base.lazy import imported
from arbcli.base.output import deferred_stderr
from arbcli.base.reading import read_small
from arbcli.data.conversion import converted
from arbcli.data.text import Mixture, Text

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_BYTES = 2**20
"""Maximum size of a block that is tokenised at once; blocks end with a line or word if possible."""
BLOCKS = 8
"""Number of blocks that are tokenised in parallel."""
UINT16_SYMBOLS = 2**16
MAX_FILE_BYTES = 2**27
"""Maximum size of a tokenizer in bytes."""
MAX_GROWTH = 16
"""Maximum growth of a text by a tokenizer's replacements; Llama 2 has 12."""
MAX_CHARACTER_BYTES = 64
"""Maximum size in bytes of a replacement that counts as normalisation of Unicode, which has 33."""
BLOCK_ENDS = re.compile(rb"\n(?=\S)"), re.compile(rb"[A-Za-z](?= [A-Za-z])")
"""Where blocks end: after a line whose next one is not indented, or else after a word before a
space and a word. Tokenizers begin a word at both places."""
SEARCHED_BYTES = 2**16
"""Number of bytes at the end of a block that are searched for `BLOCK_ENDS`."""
VERSION = 2
"""Version of the tokenised files in the cache; changed if blocks are cut or tokenised otherwise."""
OTHER_TOKENIZER = "name a `tokenizer.json` of the package tokenizers that can encode the text"
REPLACEMENT = "\ufffd"
"""Replacement character, which stands for an invalid or incomplete UTF-8 sequence."""


class Tokenizer:
    """A tokenizer in the format of `tokenizer.json`.

    `encode` never returns special tokens, so that a text cannot inject them.

    Args:
        content: content of the file.
        name: name of the file, for errors.

    Raises:
        ArbError: the package `tokenizers` is missing, or `content` is not a tokenizer.
    """

    def __init__(self, content: bytes, name: str) -> None:
        package = optional_module("tokenizers", name, "tokenizers", "'arb[tokens]'")
        self.content, self.name = content, name
        self.ends: frozenset[int] = frozenset()
        """Tokens that end a generated text, if the model's files are known: see `stop_tokens`."""
        self.digest = sha256(content).hexdigest()
        with deferred_stderr(), library_errors(f"`{name}` is not a tokenizer", OTHER_TOKENIZER):
            self._tokenizer = package.Tokenizer.from_str(content.decode())
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            self._tokenizer.encode_special_tokens = True
            _check_growth(self._tokenizer, name)
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            self.size = max(vocabulary.values(), default=-1) + 1
            """Size of the vocabulary: one more than the largest token."""
            self.longest = max((len(text.encode()) for text in vocabulary), default=0)
            """Maximum number of bytes of a token's text."""
            self.beginning = self._find_beginning()
            """Tokens before a prompt, such as Llama 3's `<|begin_of_text|>`."""
        if self.size < 2:
            raise ArbError(f"`{name}` has fewer than two tokens", "name another tokenizer")

    def _find_beginning(self) -> list[int]:
        """Return the tokens that the tokenizer's post-processor adds before a text."""
        encoded, plain = (
            self._tokenizer.encode("a", add_special_tokens=x).ids for x in (True, False)
        )
        starts = range(len(encoded) - len(plain) + 1)
        start = next((at for at in starts if encoded[at : at + len(plain)] == plain), 0)
        return encoded[:start]

    @classmethod
    def read(cls, path: Path | str) -> "Tokenizer":
        """Read a `tokenizer.json`.

        Raises:
            ArbError: it cannot be read, or is not a tokenizer.
        """
        return cls(read_small(Path(path), MAX_FILE_BYTES), str(path))

    @property
    def specials(self) -> dict[str, int]:
        """Special tokens by their texts."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {entry.content: token for token, entry in added if entry.special}

    def special(self, text: str) -> int | None:
        """Return the token with exactly this text, such as the end of a text; None if none has."""
        return self._tokenizer.token_to_id(text) if text else None

    def encode_marked(
        self, text: str, *, specials: bool = True
    ) -> list[tuple[int, tuple[int, int]]]:
        """Encode the output of a chat template.

        Args:
            text: the text.
            specials: whether names of special tokens in the text become these tokens.

        Returns:
            Tokens, each with the indices of its first character and of that after its last.
        """
        self._tokenizer.encode_special_tokens = not specials
        try:
            with library_errors(f"`{self.name}` cannot encode a text", OTHER_TOKENIZER):
                # a batch, as other threads run meanwhile
                (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        return list(zip(encoding.ids, encoding.offsets, strict=True))

    @property
    def dtype(self) -> np.dtype:
        """Dtype of tokens in a file: little-endian integers of two or four bytes."""
        return np.dtype("<u2" if self.size <= UINT16_SYMBOLS else "<u4")

    def encode(self, text: bytes) -> list[int]:
        """Encode a text; invalid UTF-8 is replaced by U+FFFD."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Iterable[bytes]) -> list[list[int]]:
        """Encode several texts in parallel: see `encode`.

        Raises:
            ArbError: a text has something that the tokenizer cannot encode.
        """
        decoded = [text.decode(errors="replace") for text in texts]
        with library_errors(f"`{self.name}` cannot encode a text", OTHER_TOKENIZER):
            encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, including special ones; tokens that do not exist are skipped."""
        with library_errors(f"`{self.name}` cannot decode tokens", OTHER_TOKENIZER):
            return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def decoded(self, prompt: Sequence[int], parts: Iterable[Sequence[int]]) -> Iterator[bytes]:
        """Decode a stream of tokens to UTF-8, yielded as soon as characters are complete.

        Args:
            prompt: tokens before the stream, whose text is not yielded.
            parts: tokens of the stream.
        """
        stream = TokenStream(self, prompt)
        yield from filter(None, map(stream.add, parts))
        if pending := stream.flush():
            yield pending


def _check_growth(tokenizer: Any, name: str) -> None:
    """Refuse a tokenizer that replaces parts of a text by much longer ones."""
    for part in tokenizer.normalizer, tokenizer.post_processor, tokenizer.decoder:
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > MAX_GROWTH:
            raise ArbError(
                f"`{name}` may make a text {growth:,.0f} times as long, and the limit is"
                f" {MAX_GROWTH}",
                "shorten its replacements",
            )


def _growth(part: dict[str, Any]) -> float:
    """Return how many times as long a part of a tokenizer may make a text, in bytes or tokens."""
    match part:
        case {"type": "Sequence", **parts}:  # one list
            return prod(map(_growth, *parts.values()))
        case {"type": "TemplateProcessing", "single": pieces}:
            return max(1.0, sum("Sequence" in piece for piece in pieces))
        case {"type": "Precompiled", "precompiled_charsmap": table}:
            content = b64decode(table)  # size of the index, index, replacements
            size = int.from_bytes(content[:4], "little")
            longest = max(map(len, content[4 + size :].split(b"\0")))
            return longest if longest > MAX_CHARACTER_BYTES else 1.0
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return max(1.0, len(new.encode()) / max(1, len(old.encode())))
        case {"type": "Replace", "content": new} | {"type": "Prepend", "prepend": new}:
            return 1.0 + len(new.encode())  # at every position, before it
    return 1.0


class TokenStream:
    """Decodes tokens as they come: see `Tokenizer.decoded`.

    Args:
        tokenizer: the tokenizer.
        prompt: tokens before the stream.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode, self._tokens = tokenizer.decode, list(prompt)
        self._num_decoded = len(prompt)  # the text of the tokens before it was returned

    def add(self, tokens: Sequence[int]) -> bytes:
        """Append tokens, and return the text up to the last one, empty within a character."""
        self._tokens += tokens
        decoded = self._decode(self._tokens)
        if decoded.endswith(REPLACEMENT):
            return b""
        new = decoded[len(self._decode(self._tokens[: self._num_decoded])) :]
        self._tokens = self._tokens[self._num_decoded :]
        self._num_decoded = len(self._tokens)
        return new.encode()

    def flush(self) -> bytes:
        """Return the text after the last complete character."""
        before = self._decode(self._tokens[: self._num_decoded])
        return self._decode(self._tokens)[len(before) :].encode()


class _TokenTextBase(Text):
    """Base class of texts of tokens: lengths and offsets are in tokens, `pieces` in bytes."""

    tokens: Tokenizer
    dtype: np.dtype
    """Dtype of tokens that are read."""

    @property
    def symbol_bytes(self) -> float:
        """Average number of bytes per token."""
        return len(self.source) / max(1, len(self))

    def window_batch(self, starts: Sequence[int], length: int) -> "Tensor":
        """Return the windows that begin at `starts`, (B, length) int32 on the CPU."""
        import torch  # takes seconds, and is not needed to tokenise

        windows = b"".join([self.read(start, length) for start in starts])
        tokens = np.frombuffer(windows, self.dtype).astype(np.int32)
        return torch.from_numpy(tokens).view(len(starts), length)


class TokenText(_TokenTextBase):
    """A text of tokens.

    Args:
        source: text of bytes; or of shards, whose tokens are read as they are.
        tokens: tokenizer.

    Raises:
        ArbError: a file cannot be read, a shard has a token that the tokenizer lacks, or the cache
            cannot be written.
    """

    def __init__(self, source: Text, tokens: Tokenizer) -> None:
        self._source, self._original, self.tokens = source, source, tokens
        self.dtype = tokens.dtype
        if source.token_bytes > 1:
            self._text, self.dtype = source, np.dtype(f"<u{source.token_bytes}")
            self._source = imported("arbcli.data.shards:decoded_shards")(source, tokens)
            return
        self._text = Text([_tokenised(piece, tokens) for piece in source.pieces])

    def __len__(self) -> int:
        return len(self._text) // self.dtype.itemsize

    def read(self, offset: int, length: int) -> bytes:
        """Return tokens [offset, offset + length) in `dtype`."""
        width = self.dtype.itemsize
        return self._text.read(offset * width, length * width)


class TokenMixture(_TokenTextBase, Mixture):
    """A mixture of texts of tokens, with the weights of the mixture of bytes.

    Args:
        source: mixture of texts of bytes or of shards.
        tokens: tokenizer.
    """

    dtype = np.dtype("<u4")

    def __init__(self, source: Mixture, tokens: Tokenizer) -> None:
        self._original, self.tokens, self.weights = source, tokens, source.weights
        self.texts = tuple(TokenText(text, tokens) for text in source.texts)
        sources = [text.source for text in self.texts]
        self._source = Mixture([*zip(sources, source.weights, strict=True)])
        self._begins = [0, *accumulate(map(len, self.texts))]

    def read(self, offset: int, length: int) -> bytes:
        """Return tokens of one of the texts in `dtype`, as those of the files may differ."""
        index = bisect_right(self._begins, offset, hi=len(self.texts)) - 1
        text = self.texts[index]
        content = text.read(offset - self._begins[index], length)
        return np.frombuffer(content, text.dtype).astype(self.dtype).tobytes()


def tokenised(text: Text, tokens: Tokenizer) -> Text:
    """Convert a text of bytes to a text of tokens, from the cache if possible."""
    return TokenMixture(text, tokens) if isinstance(text, Mixture) else TokenText(text, tokens)


def _tokenised(piece: tuple[Path, int, int], tokens: Tokenizer) -> Path:
    """Return the file with the tokens of a piece of a text, created in the cache if needed."""
    path, start, stop = piece
    blocks = _blocks(Text.from_parts([piece]))
    settings = f"{start} {stop}\n{tokens.digest} {VERSION}"
    return converted(path, settings, lambda _size: _encoded(blocks, tokens))


def _encoded(blocks: Iterator[bytes], tokens: Tokenizer) -> Iterator[bytes]:
    while group := list(islice(blocks, BLOCKS)):
        for encoded in tokens.encode_all(group):
            yield np.array(encoded, tokens.dtype).tobytes()


def _blocks(text: Text) -> Iterator[bytes]:
    """Split a text where words begin.

    Tokens do not cross these places if the tokenizer only allows newlines and spaces at the start
    of its words.
    """
    pending, begin, end = b"", 0, len(text)
    while begin < end or pending:
        size = min(BLOCK_BYTES, end - begin)
        pending += text.read(begin, size)
        begin += size
        cut = _last_match(pending) if begin < end else len(pending)
        yield pending[:cut]
        pending = pending[cut:]


def _last_match(block: bytes) -> int:
    """Return the last offset at which a block can be cut."""
    for pattern in BLOCK_ENDS:
        matches = [*pattern.finditer(block, max(0, len(block) - SEARCHED_BYTES))]
        if matches:
            return matches[-1].end()
    return _last_character(block)


def _last_character(block: bytes) -> int:
    """Return the offset of the last character of UTF-8 in a block."""
    for back in range(1, 5):
        if len(block) > back and block[-back] & 0xC0 != 0x80:
            return len(block) - back
    return len(block)


def byte_symbols() -> list[str]:
    """List the characters by which a byte-level BPE vocabulary writes the bytes 0 to 255.

    Printable bytes stand for themselves, the others for the characters from 256 on.
    Source: encoder.py of openai/gpt-2, `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, others = [], 0
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else 256 + others))
        others += byte not in printable
    return symbols
