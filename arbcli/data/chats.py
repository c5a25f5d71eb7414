"""Chats and other documents, packed into windows of tokens for fine-tuning.

A record of JSON lines is a document. A window has several, one after another; attention does not
cross documents, and only answers have a loss. Documents are tokenised once, to a file in the cache,
and packed in an order that only depends on their lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from arbcli.base.errors import ArbError
from arbcli.base.reading import parse_json, unreadable
from arbcli.data.chat_template import ChatTemplate, Message, is_table, template_digest
from arbcli.data.conversion import RECORD_BYTES, converted
from arbcli.data.text import Mixture, Text
from arbcli.data.tokens import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

MESSAGES = "messages"
"""Field of records with chats."""
JOINED = "+"
"""Separator of the fields of a question and its answer."""
ROLES = "user", "assistant"
MOST_DOCUMENTS = 64
"""Maximum number of documents in a window, including the padding."""
NOT_LEARNT = -1
"""Target without a loss."""
HEAD = 2
"""Length of a document's header in the cache: its number of tokens and of bytes with a loss."""
VERSION = 1
"""Version of the tokenised files in the cache; changed if records are tokenised otherwise."""


def has_documents(field: str | None) -> bool:
    """Return whether the `field` of a run names documents in place of plain text."""
    return field is not None and (field == MESSAGES or JOINED in field)


class Document(NamedTuple):
    """Tokens of a record."""

    tokens: list[int]
    """Tokens; those with a loss are bitwise inverted, and thus negative."""
    learnt_bytes: int
    """Size in bytes of the text with a loss."""


class Chats(Text):
    """Documents in files of JSON lines, packed into windows.

    Args:
        source: text of bytes; records that are cut at its ends are left out.
        field: `messages`; or the fields of a question and its answer, `prompt+answer`; or `+text`,
            where all of each document has a loss and no template is needed.
        tokenizer: tokenizer of the documents.
        template: chat template, which formats messages as text.
        context: number of positions of a window.

    Raises:
        ArbError: a record is invalid, or there is none.
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
        self.template_digest = template_digest(template)
        reader = _Reader(field, tokenizer, template)
        parts = [np.fromfile(_tokenised(piece, reader), np.int32) for piece in source.pieces]
        self._flat = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        self._places, self.learnt_tokens, self.learnt_bytes = [], 0, 0
        self.cut = 0
        """Number of documents that were truncated to the length of a window."""
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
        """Numbers of the documents of each window."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(size for _, size in self._places)

    @property
    def source(self) -> Text:
        """The text of bytes."""
        return self._source

    @property
    def symbol_bytes(self) -> float:
        """Average number of bytes per token with a loss."""
        return self.learnt_bytes / self.learnt_tokens

    @property
    def pieces(self) -> list[tuple[Path, int, int]]:
        """Parts of the text's files: (path, start, stop) each, in bytes."""
        return self._source.pieces

    def windows(self, _length: int) -> int:
        """Return the number of windows."""
        return len(self.bins)

    def packed_batch(self, starts: Sequence[int]) -> "tuple[Tensor, Tensor, Tensor]":
        """Return windows packed with documents.

        Args:
            starts: numbers of B windows.

        Returns:
            (B, T) int64 each: inputs; targets, `NOT_LEARNT` where there is no loss; and the number
            of the document in its window, from 0.
        """
        import torch  # takes seconds, and is not needed to tokenise

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
            documents[row, at:] = len(self.bins[window])  # padding has a number of its own
        ids_, targets_, documents_ = map(torch.from_numpy, (ids, targets, documents))
        return ids_, targets_, documents_


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Pack documents into windows by best fit, in decreasing order of length.

    Args:
        sizes: number of positions of each document, at most `room`.
        room: number of positions of a window.

    Returns:
        Numbers of the documents of each window, at most `MOST_DOCUMENTS` - 1.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free positions and number of windows, the fullest first
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
    """Converts records to documents."""

    def __init__(self, field: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.field, self.tokenizer, self.template = field, tokenizer, template
        self.ending = tokenizer.special(template.tokens["eos_token"]) if template else None
        self.specials = tokenizer.specials
        source = template.source if template else ""
        tokens = template.tokens.values() if template else ()
        identity = VERSION, field, tokenizer.digest, source, *tokens
        self.digest = sha256(repr(identity).encode()).hexdigest()

    def documents(self, record: Any) -> Iterator[Document]:
        """Yield the documents of a record: one, or one for each answer.

        Raises:
            ValueError: the record is invalid.
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
                raise ValueError("the `content` of a message is not a text")
        if not any(message["role"] == ROLES[1] for message in messages):
            raise ValueError(f"no message has the role `{ROLES[1]}`")
        return messages

    def _text(self, record: dict[str, Any], name: str) -> str:
        if not isinstance(text := record.get(name), str):
            raise ValueError(f"its `{name}` is missing or not a text")
        return text

    def _chat(self, messages: list[Message]) -> Iterator[Document]:
        """Yield a chat as one document, or as one per answer if the template rewrites earlier ones.

        An answer is the part of the rendered text after the preceding messages and the generation
        prompt.
        """
        template = self.template
        assert template is not None, "`Chats` refuses messages without a template"
        for message in messages:
            message["content"].encode()  # raises UnicodeEncodeError for unpaired surrogates
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
    """Return the file with the documents of a piece of a text, created in the cache if needed."""
    path, start, stop = piece
    settings = f"{start} {stop}\nchats {reader.digest}"
    return converted(path, settings, lambda _size: _encoded(path, start, stop, reader))


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
    """Yield the complete lines of a part of a file with their offsets, except empty lines."""
    try:
        with path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # skip the rest of a line that begins before `start`
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
        raise unreadable(path, error) from error
