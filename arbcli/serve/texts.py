"""Texts that the server generates: the request of a text, and its output up to a stop string."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from arbcli.data.tokens import Tokenizer, TokenStream
from arbcli.generation.sampling import Sampling


class Symbol(NamedTuple):
    """A byte or token of a text."""

    id: int
    content: bytes = b""
    """Its part of the text; a character of several tokens belongs to the last of them."""
    logprob: float | None = None
    """Natural logarithm of its probability at temperature 1; None if it was not computed."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """The likeliest symbols at its position, with their log probabilities."""


class Piece(NamedTuple):
    """Symbols of a text that were generated since the last piece."""

    symbols: list[Symbol]
    finish: str | None = None
    """`stop`, `length` or `error` in the last piece."""
    echoed: bool = False
    """Whether the symbols are those of the prompt."""


@dataclass(eq=False, kw_only=True)
class Text:
    """A text to be generated."""

    prompt: Sequence[int]
    """Bytes or tokens, at least one."""
    length: int
    """Maximum number of symbols to generate."""
    sampling: Sampling
    on_piece: Callable[[Piece], None] = lambda _: None
    """Called with new symbols, in the thread of the engine."""
    stream: int = 0
    """Index of the seed's random stream."""
    stops: tuple[bytes, ...] = ()
    """Strings that end the text, and are not part of it."""
    ends: frozenset[int] = frozenset()
    """Symbols that end the text; they have no content."""
    logprobs: int | None = None
    """Number of likeliest symbols to report at each position; None computes no log probabilities.
    """
    echo: bool = False
    """Whether to report the symbols of the prompt."""
    beginning: int = 0
    """Number of symbols before the prompt's text, which have no content."""
    cancelled: bool = False


class Output:
    """The generated symbols of a text, of which those are held back that may begin a stop string.

    Args:
        text: the text.
        tokenizer: tokenizer of the model; None for bytes.
    """

    def __init__(self, text: Text, tokenizer: Tokenizer | None) -> None:
        self.text = text
        self.unlaunched = text.length
        """Number of symbols that no step was launched for."""
        self.finish: str | None = None
        """Why the text ended; None before."""
        self.left = text.length
        """Number of symbols that the text may still get."""
        self._held: list[Symbol] = []
        self._stream = None if tokenizer is None else TokenStream(tokenizer, text.prompt)

    def take(self, symbols: Iterable[Symbol]) -> list[Symbol]:
        """Append symbols without content, and return those that are certain, with theirs."""
        certain = []
        for symbol in symbols:
            if self.finish is not None:
                break
            self.left -= 1
            ended = symbol.id in self.text.ends
            self.finish = "stop" if ended else None if self.left else "length"
            content = b"" if ended else spelled(self._stream, symbol.id)
            if self.finish and self._stream is not None:
                content += self._stream.flush()
            self._held.append(symbol._replace(content=content))
            certain += self._certain()
        return certain

    def _certain(self) -> list[Symbol]:
        held, stops = b"".join(symbol.content for symbol in self._held), self.text.stops
        stops_at = [index for stop in stops if (index := held.find(stop)) >= 0]
        if stops_at:
            self.finish = "stop"
        end = min(stops_at, default=len(held))
        if self.finish is None:
            end -= max((_overlap(held, stop) for stop in stops), default=0)
        begin, certain = 0, []
        while self._held and begin + len(self._held[0].content) <= end:
            certain.append(self._held.pop(0))
            begin += len(certain[-1].content)
        if stops_at and begin < end:
            certain.append(self._held[0]._replace(content=self._held[0].content[: end - begin]))
        return certain


def _overlap(text: bytes, stop: bytes) -> int:
    """Return the length of the longest end of a text that begins a stop string."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def spelled(stream: TokenStream | None, symbol: int) -> bytes:
    """Return the bytes that a symbol adds to a text."""
    return bytes([symbol]) if stream is None else stream.add([symbol])


def echoed(text: Text, tokenizer: Tokenizer | None, scored: Sequence[Symbol]) -> list[Symbol]:
    """Return the symbols of a prompt with their content.

    Args:
        text: the text.
        tokenizer: tokenizer of the model; None for bytes.
        scored: the prompt's symbols after the first with their log probabilities; may be empty.
    """
    scored = [Symbol(text.prompt[0]), *(scored or map(Symbol, text.prompt[1:]))]
    first = text.beginning
    stream = None if tokenizer is None else TokenStream(tokenizer, text.prompt[:first])
    symbols = scored[:first]
    for symbol in scored[first:]:
        symbols.append(symbol._replace(content=spelled(stream, symbol.id)))
    if stream is not None:
        symbols[-1] = symbols[-1]._replace(content=symbols[-1].content + stream.flush())
    return symbols
