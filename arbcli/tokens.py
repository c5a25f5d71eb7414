"""Tokens of a `tokenizer.json`, and texts as tokens: each file is tokenised once and kept.

Tokens lie in a file of the cache as little-endian integers, two bytes each or four, and are mapped
from there. Which bytes a text has was decided before: what is trained on, what is held out and what
loss a byte has do not depend on the tokenizer.
"""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from importlib import import_module
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arbcli.cached_files import is_cached, write_cached
from arbcli.data import Mixture, Text
from arbcli.errors import ArbError
from arbcli.plain_text import texts_folder
from arbcli.reading import open_regular

if TYPE_CHECKING:
    from torch import Tensor

FILE = "tokenizer.json"
"""Name of a run's tokenizer."""
BLOCK_BYTES = 2**20
"""Of a text that are tokenised at once; they end where a line does, if there is one."""
BLOCKS = 8
"""That are tokenised side by side."""
MOST_OF_TWO_BYTES = 2**16
LARGEST_FILE = 2**27
"""Bytes of a tokenizer."""
LINE = re.compile(rb"\n(?=\S)")
LONGEST_LINE = 2**16
"""Bytes at the end of a block among which the end of a line is looked for."""
VERSION = 1
"""Of how a text is cut and tokenised: another one makes the files of the cache anew."""
HALF = "\ufffd"
"""Replacement character, which stands for bytes that do not, or not yet, form a character."""


class Tokenizer:
    """A tokenizer that a `tokenizer.json` describes.

    Special tokens are never made of text, so that no text can pretend to be one.

    Args:
        content: of the file.
        name: of it, for errors.

    Raises:
        ArbError: the package `tokenizers` is missing, or the file describes no tokenizer.
    """

    def __init__(self, content: bytes, name: str) -> None:
        try:
            package = import_module("tokenizers")
        except ImportError:
            raise ArbError(
                f"`{name}` is read with the package tokenizers, which is not installed",
                hint="install it: `pip install 'arb[tokens]'`",
            ) from None
        try:
            self._tokenizer = package.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises no narrower one
            raise ArbError(
                f"`{name}` is not a tokenizer: {str(error).strip()[:200]}",
                hint="name a `tokenizer.json`, as the package tokenizers writes it",
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.content = content
        self.digest = sha256(content).hexdigest()
        known = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.size = max(known, default=-1) + 1
        """One more than the largest token."""
        self.beginning = self._find_beginning()
        """Tokens that belong before a prompt, as `<|begin_of_text|>` does for a Llama 3."""
        if self.size < 2:
            raise ArbError(f"`{name}` has fewer than two tokens", hint="name another tokenizer")

    def _find_beginning(self) -> list[int]:
        """Find what the tokenizer's own template puts before a text."""
        whole, plain = (
            self._tokenizer.encode("a", add_special_tokens=x).ids for x in (True, False)
        )
        places = range(len(whole) - len(plain) + 1)
        at = next((at for at in places if whole[at : at + len(plain)] == plain), 0)
        return whole[:at]

    @classmethod
    def read(cls, path: Path | str) -> "Tokenizer":
        """Read a `tokenizer.json`.

        Raises:
            ArbError: it cannot be read, or describes no tokenizer.
        """
        with open_regular(Path(path)) as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ArbError(f"`{path}` has more than {LARGEST_FILE:,} bytes", hint="name another")
        return cls(content, str(path))

    @property
    def specials(self) -> list[str]:
        """List the texts of special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def special(self, text: str) -> int | None:
        """Find the token of a text that is one, as an end of a text is; None if there is none."""
        return self._tokenizer.token_to_id(text) if text else None

    def encode_marked(self, text: str) -> list[tuple[int, int]]:
        """Turn a text that a template wrote into tokens, special ones too.

        Returns:
            Each token, and the character where it begins.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        return [(token, start) for token, (start, _) in zip(found.ids, found.offsets, strict=True)]

    @property
    def dtype(self) -> np.dtype:
        """The integers that tokens are in a file."""
        return np.dtype("<u2" if self.size <= MOST_OF_TWO_BYTES else "<u4")

    def encode(self, text: bytes) -> list[int]:
        """Turn bytes into tokens; bytes that are not UTF-8 are those of U+FFFD."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Iterable[bytes]) -> list[list[int]]:
        """Turn several texts into tokens."""
        decoded = [text.decode(errors="replace") for text in texts]
        found = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [each.ids for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Turn tokens into text, special ones too; one that does not exist is nothing."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def decoded(self, prompt: Sequence[int], parts: Iterable[Sequence[int]]) -> Iterator[bytes]:
        """Turn tokens that come in parts into bytes, as soon as their characters are whole.

        Args:
            prompt: tokens before, whose text is left out.
            parts: the tokens.
        """
        tokens = list(prompt)
        begin, done = 0, len(tokens)  # tokens before are as good as not there, or were told
        for part in parts:
            tokens += part
            whole = self.decode(tokens[begin:])
            if not whole.endswith(HALF):
                if new := whole[len(self.decode(tokens[begin:done])) :]:
                    yield new.encode()
                begin, done = done, len(tokens)
        if new := self.decode(tokens[begin:])[len(self.decode(tokens[begin:done])) :]:
            yield new.encode()


class _OfTokens(Text):
    """Base of texts of tokens: lengths and places are in tokens, files are those of the bytes."""

    tokens: Tokenizer
    _source: Text

    @property
    def source(self) -> Text:
        """The bytes."""
        return self._source

    @property
    def symbol_bytes(self) -> float:
        """Bytes of the text for each token."""
        return len(self._source) / max(1, len(self))

    @property
    def pieces(self) -> list[tuple[Path, int, int]]:
        """List the files of bytes, and which of their bytes."""
        return self._source.pieces

    def window_batch(self, starts: Sequence[int], length: int) -> "Tensor":
        """Copy the windows that begin at `starts` to (B, length) int32 on the CPU."""
        import torch  # takes seconds, and to tokenise needs none

        windows = b"".join([self.read(start, length) for start in starts])
        tokens = np.frombuffer(windows, self.tokens.dtype).astype(np.int32)
        return torch.from_numpy(tokens).view(len(starts), length)


class TokenText(_OfTokens):
    """A text as tokens.

    Args:
        source: the bytes.
        tokens: turns them into tokens.

    Raises:
        ArbError: a file cannot be read, or the cache cannot be written.
    """

    def __init__(self, source: Text, tokens: Tokenizer) -> None:
        self._source, self.tokens = source, tokens
        starts = accumulate(source.sizes, initial=0)
        made = [
            _tokenised(source, begin, piece, tokens)
            for begin, piece in zip(starts, source.pieces, strict=False)
        ]
        self._text = Text(made)

    def __len__(self) -> int:
        return len(self._text) // self.tokens.dtype.itemsize

    def read(self, offset: int, length: int) -> bytes:
        """Copy tokens [offset, offset + length) as they lie in their file."""
        width = self.tokens.dtype.itemsize
        return self._text.read(offset * width, length * width)


class TokenMixture(_OfTokens, Mixture):
    """A mixture of texts as tokens, drawn from by the weights of the mixture of bytes.

    Args:
        source: the bytes.
        tokens: turns them into tokens.
    """

    def __init__(self, source: Mixture, tokens: Tokenizer) -> None:
        self._source, self.tokens, self.weights = source, tokens, source.weights
        self.texts = tuple(TokenText(text, tokens) for text in source.texts)
        self._begins = [0, *accumulate(map(len, self.texts))]

    def read(self, offset: int, length: int) -> bytes:
        """Copy tokens of one of the texts, as they lie in their file."""
        index = bisect_right(self._begins, offset, hi=len(self.texts)) - 1
        return self.texts[index].read(offset - self._begins[index], length)


def tokenised(text: Text, tokens: Tokenizer) -> Text:
    """Turn a text of bytes into one of tokens; what was made before is found again."""
    return TokenMixture(text, tokens) if isinstance(text, Mixture) else TokenText(text, tokens)


def _tokenised(text: Text, begin: int, piece: tuple[Path, int, int], tokens: Tokenizer) -> Path:
    """Find the file of the tokens of a piece of a text, or make it; `begin` is where it begins."""
    path, start, stop = piece
    try:
        status = path.stat()
    except OSError as error:
        raise ArbError(
            f"cannot read `{path}`: {error.strerror or error}",
            hint="check that it is there and that you may read it",
        ) from error
    about = f"{os.path.realpath(path)}\n{status.st_size} {status.st_mtime_ns}\n{start} {stop}"
    about += f"\n{tokens.digest} {VERSION}"
    made = texts_folder() / sha256(about.encode(errors="surrogateescape")).hexdigest()
    if not is_cached(made):
        write_cached(made, _encoded(_blocks(text, begin, begin + stop - start), tokens))
    return made


def _encoded(blocks: Iterator[bytes], tokens: Tokenizer) -> Iterator[bytes]:
    while some := list(islice(blocks, BLOCKS)):
        for found in tokens.encode_all(some):
            yield np.array(found, tokens.dtype).tobytes()


def _blocks(text: Text, begin: int, end: int) -> Iterator[bytes]:
    """Cut bytes of a text into blocks, where a line ends and the next one begins with a word.

    No tokenizer whose words hold no line's end after their beginning makes a token across that.
    """
    rest = b""
    while begin < end or rest:
        size = min(BLOCK_BYTES, end - begin)
        rest += text.read(begin, size)
        begin += size
        cut = len(rest)
        if begin < end:
            found = [*LINE.finditer(rest, max(0, len(rest) - LONGEST_LINE))]
            cut = found[-1].end() if found else _whole_characters(rest)
        yield rest[:cut]
        rest = rest[cut:]


def _whole_characters(block: bytes) -> int:
    """Find the last place of a block where a character of UTF-8 begins."""
    for back in range(1, 5):
        if len(block) > back and block[-back] & 0xC0 != 0x80:
            return len(block) - back
    return len(block)
