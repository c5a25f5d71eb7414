"""Chats and other documents as windows of tokens: which are learnt, and which belong together.

A record of JSON lines is a document. A window holds several, one after another; nothing attends
from one to the next, and only answers are learnt. Documents are tokenised once, to a file of the
cache, and packed into windows in an order that follows from their lengths alone.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from arbcli.cached_files import is_cached, write_cached
from arbcli.chat_template import ChatTemplate, Message, is_table
from arbcli.data import Mixture, Text
from arbcli.errors import ArbError
from arbcli.plain_text import RECORD_BYTES, texts_folder
from arbcli.reading import parse_json
from arbcli.tokens import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

MESSAGES = "messages"
"""The field of records that hold chats."""
JOINED = "+"
"""Between the field of a question and that of its answer."""
ROLES = "user", "assistant"
MOST_DOCUMENTS = 64
"""In a window."""
NOT_LEARNT = -1
"""A target that counts for nothing."""
HEAD = 2
"""Numbers before the tokens of a document: how many tokens, and how many bytes are learnt."""
VERSION = 1
"""Of how records become tokens: another one makes the files of the cache anew."""


def has_documents(field: str | None) -> bool:
    """Return whether the `field` of a run names documents, and no plain text."""
    return field is not None and (field == MESSAGES or JOINED in field)


class Document(NamedTuple):
    """The tokens of a record."""

    tokens: list[int]
    """Of which those that are learnt are bitwise inverted, and so negative."""
    learnt_bytes: int
    """Of the text of these."""


class Chats(Text):
    """Documents of files of JSON lines, packed into windows.

    Args:
        source: the files' bytes; a record that is cut at an end of them is left out.
        field: `messages`, or those of a question and its answer, `prompt+answer`; without the
            first, `+text`, each document is learnt whole, and no template is needed.
        tokenizer: turns texts into tokens.
        template: writes messages as texts.
        context: positions of a window.

    Raises:
        ArbError: a record is damaged, or there is none.
    """

    packs = True

    def __init__(
        self,
        source: Text,
        field: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        context: int,
    ) -> None:
        if isinstance(source, Mixture):
            raise ArbError("documents cannot be mixed by weights", hint="leave the weights out")
        if template is None and not field.startswith(JOINED):
            raise ArbError(
                f"`--field {field}` has messages, and no chat template lies next to the tokenizer",
                hint="put the model's `chat_template.jinja` there, or use `--field +FIELD`",
            )
        self._source, self.context = source, context
        reader = _Reader(field, tokenizer, template)
        made = [_tokenised(piece, reader) for piece in source.pieces]
        parts = [np.fromfile(path, np.int32) for path in made]
        self._flat = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        self._places, self.learnt_tokens, self.learnt_bytes = [], 0, 0
        self.cut = 0
        """Documents of which the end is left out, as they are longer than a window."""
        at = 0
        while at < len(self._flat):
            size, learnt_bytes = map(int, self._flat[at : at + HEAD])
            begin = at + HEAD
            at = begin + size
            kept = min(size, context + 1)
            learnt = int((self._flat[begin + 1 : begin + kept] < 0).sum())
            if learnt:
                self.cut += kept < size
                self._places.append((begin, kept))
                self.learnt_tokens += learnt
                self.learnt_bytes += learnt_bytes
        if not self._places:
            raise ArbError(
                f"no record has an answer that begins within {context:,} tokens",
                hint="use a larger `--ctx`, or name more records, as with `--val`",
            )
        self.bins = pack([size - 1 for _, size in self._places], context)
        """Documents of each window."""

    def __len__(self) -> int:
        """Count tokens."""
        return sum(size for _, size in self._places)

    @property
    def source(self) -> Text:
        """The bytes of the files."""
        return self._source

    @property
    def symbol_bytes(self) -> float:
        """Bytes for each token that is learnt."""
        return self.learnt_bytes / self.learnt_tokens

    @property
    def pieces(self) -> list[tuple[Path, int, int]]:
        """List the files of bytes, and which of their bytes."""
        return self._source.pieces

    def windows(self, _length: int) -> int:
        """Count the windows."""
        return len(self.bins)

    def packed_batch(self, starts: Sequence[int]) -> "tuple[Tensor, Tensor, Tensor]":
        """Fill windows.

        Args:
            starts: numbers of windows.

        Returns:
            (B, T) int64 each: inputs; targets, `NOT_LEARNT` where nothing is; and numbers of the
            documents of each window, from 0 on.
        """
        import torch  # takes seconds, and to tokenise needs none

        shape = len(starts), self.context
        ids, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        targets = np.full(shape, NOT_LEARNT, np.int64)
        for row, window in enumerate(starts):
            at = 0
            for number, index in enumerate(self.bins[window]):
                begin, size = self._places[index]
                tokens = self._flat[begin : begin + size].astype(np.int64)
                here = slice(at, at + size - 1)
                ids[row, here] = np.where(tokens < 0, ~tokens, tokens)[:-1]
                targets[row, here] = np.where(tokens < 0, ~tokens, NOT_LEARNT)[1:]
                documents[row, here] = number
                at += size - 1
            documents[row, at:] = len(self.bins[window])  # what is left over is nobody's
        ids_, targets_, documents_ = map(torch.from_numpy, (ids, targets, documents))
        return ids_, targets_, documents_


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Put documents into windows: the longest first, each where the least room is left after it.

    Args:
        sizes: positions of each document, at most `room`.
        room: positions of a window.

    Returns:
        Numbers of the documents of each window, at most `MOST_DOCUMENTS` - 1.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room that is left, and the window, the fullest first
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        place = bisect_left(free, (sizes[index], -1))
        left, window = free.pop(place) if place < len(free) else (room, len(bins))
        if window == len(bins):
            bins.append([])
        bins[window].append(index)
        left -= sizes[index]
        if left and len(bins[window]) < MOST_DOCUMENTS - 1:
            insort(free, (left, window))
    return bins


class _Reader:
    """Turns records into documents."""

    def __init__(self, field: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.field, self.tokenizer, self.template = field, tokenizer, template
        self.ending = tokenizer.special(template.tokens["eos_token"]) if template else None
        self.specials = tokenizer.specials
        source = template.source if template else ""
        tokens = template.tokens.values() if template else ()
        identity = VERSION, field, tokenizer.digest, source, *tokens
        self.digest = sha256(repr(identity).encode()).hexdigest()

    def documents(self, record: Any) -> Iterator[Document]:
        """Read the documents of a record: one, or one for each answer.

        Raises:
            ValueError: it is not such a record.
        """
        if not is_table(record):
            raise ValueError("it is not an object")
        question, _, answer = self.field.rpartition(JOINED)
        if not answer or self.field == MESSAGES:
            yield from self._chat(self._messages(record.get(MESSAGES)))
        elif question:
            texts = [self._text(record, name) for name in (question, answer)]
            pairs = zip(ROLES, texts, strict=True)
            yield from self._chat([{"role": role, "content": text} for role, text in pairs])
        else:
            text = self._text(record, answer)
            tokens = [*self.tokenizer.beginning, *self.tokenizer.encode(text.encode())]
            tokens += [] if self.ending is None else [self.ending]
            yield Document([~token for token in tokens], len(text.encode()))

    def _messages(self, messages: Any) -> list[Message]:
        if not isinstance(messages, list) or not all(map(is_table, messages)):
            raise ValueError(f"its `{MESSAGES}` are not a list of objects")
        for message in messages:
            if not isinstance(message.get("role"), str):
                raise ValueError("a message has no `role`")
            if not isinstance(message.get("content"), str):
                raise ValueError("a message has no `content` that is a text")
        if not any(message["role"] == ROLES[1] for message in messages):
            raise ValueError(f"no message has the role `{ROLES[1]}`")
        return messages

    def _text(self, record: dict[str, Any], name: str) -> str:
        if not isinstance(text := record.get(name), str):
            raise ValueError(f"it has no `{name}` that is a text")
        return text

    def _chat(self, messages: list[Message]) -> Iterator[Document]:
        """Write a chat as one document, or, where its template alters answers later, as several.

        An answer is what the whole text has after that of the messages before it and the
        beginning of an answer.
        """
        template = self.template
        assert template is not None, "`Chats` refuses messages without a template"
        for message in messages:
            message["content"].encode()  # half a character is an error
            if found := [name for name in self.specials if name in message["content"]]:
                raise ValueError(f"a message has `{found[0]}`, which is a special token")
        answers = [i for i, message in enumerate(messages) if message["role"] == ROLES[1]]
        spans, texts = [], []
        for index in answers:
            before = template.render(messages[:index], asks=True)
            text = template.render(messages[: index + 1])
            if not text.startswith(before):
                raise ValueError("the template writes no answer after the messages before it")
            spans.append((len(before), len(text)))
            texts.append(text)
        last = texts[-1]
        if all(last.startswith(text) for text in texts):
            yield self._document(last, spans)
            return
        for text, span in zip(texts, spans, strict=True):
            yield self._document(text, [span])

    def _document(self, text: str, spans: list[tuple[int, int]]) -> Document:
        tokens = [
            ~token if any(begin <= start < end for begin, end in spans) else token
            for token, start in self.tokenizer.encode_marked(text)
        ]
        return Document(tokens, sum(len(text[begin:end].encode()) for begin, end in spans))


def _tokenised(piece: tuple[Path, int, int], reader: _Reader) -> Path:
    """Find the file of the documents of a piece of a text, or make it."""
    path, start, stop = piece
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    about = f"{path.resolve()}\n{status.st_size} {status.st_mtime_ns}\n{start} {stop}"
    about += f"\nchats {reader.digest}"
    made = texts_folder() / sha256(about.encode(errors="surrogateescape")).hexdigest()
    if not is_cached(made):
        write_cached(made, _encoded(path, start, stop, reader))
    return made


def _unreadable(path: Path, error: OSError) -> ArbError:
    return ArbError(
        f"cannot read `{path}`: {error.strerror or error}",
        hint="check that it is there and that you may read it",
    )


def _encoded(path: Path, start: int, stop: int, reader: _Reader) -> Iterator[bytes]:
    for line, begin in _lines(path, start, stop):
        try:
            for document in reader.documents(parse_json(line)):
                head = [len(document.tokens), document.learnt_bytes]
                yield np.array([*head, *document.tokens], np.int32).tobytes()
        except ValueError as error:
            raise ArbError(
                f"the record at byte {begin:,} of `{path}`: {error}",
                hint="each line must be an object with the fields that `--field` names",
            ) from None


def _lines(path: Path, start: int, stop: int) -> Iterator[tuple[bytes, int]]:
    """Read the whole lines of a part of a file, and where each begins; empty ones are left out."""
    try:
        with path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # the rest of a line that begins before
            while (begin := file.tell()) < stop:
                line = file.readline(RECORD_BYTES + 1)
                if len(line) > RECORD_BYTES:
                    raise ArbError(
                        f"`{path}` has a line of more than {RECORD_BYTES:,} bytes",
                        hint="split the record",
                    )
                if line.strip() and begin + len(line.rstrip(b"\r\n")) <= stop:
                    yield line, begin
    except OSError as error:
        raise _unreadable(path, error) from error
