"""Chats and other documents, packed into windows of tokens for fine-tuning.

A record of JSON lines is a document. A window has several, one after another; attention does not
cross documents, and only answers have a loss. Documents are tokenised once, to a file in the cache,
and packed in an order that only depends on their lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from arbcli.base.errors import ArbError
from arbcli.base.reading import has_type, parse_json, unreadable
from arbcli.data.chat_template import (
    ChatTemplate,
    Message,
    find_template,
    template_digest,
)
from arbcli.data.conversion import RECORD_BYTES, converted, source_of
from arbcli.data.files import CHATS, JOINED
from arbcli.data.special_tokens import stop_tokens
from arbcli.data.text import Mixture, Text
from arbcli.data.tokens import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

SHARE_GPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip
"""Roles by their names in ShareGPT."""
VARIABLES = "tools", "documents"
"""Fields of a record that templates read as variables."""
REFUSED = "chat_template", "chat_template_kwargs", "functions"
"""Fields of a record that decide its text elsewhere, and are refused."""
REFUSED_IN_MESSAGES = "train", "train_on", "mask"
"""Fields of a message that select learnt tokens elsewhere, and are refused."""
ROLES = "user", "assistant"
MAX_DOCUMENTS = 64
"""Maximum number of documents in a window, including the padding."""
NOT_LEARNT = -1
"""Target without a loss."""
VERSION = 2
"""Version of the tokenised files in the cache; changed if records are tokenised otherwise."""


class Document(NamedTuple):
    """Tokens of a record."""

    tokens: list[int]
    """Tokens; those with a loss are bitwise inverted, and thus negative."""
    sizes: list[int]
    """Bytes of text of each token, which add up to those of the text."""


class Chats(Text):
    """Documents in files of JSON lines, packed into windows.

    Args:
        source: text of bytes; records that are cut at its ends are left out.
        field: `messages`; or the fields of a question and its answer, `prompt+answer`; or `+text`,
            where all of each document has a loss and no template is needed.
        tokenizer: tokenizer of the documents.
        template: chat template, which formats messages as text.
        context: number of positions of a window.
        ending: token that ends each text of `+text`; None for none.

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
        ending: int | None = None,
    ) -> None:
        if isinstance(source, Mixture):
            raise ArbError("documents cannot be mixed by weights", "leave the weights out")
        if template is None and not field.startswith(JOINED):
            raise ArbError(
                f"`--field {field}` has messages, and no chat template lies next to the tokenizer",
                "put the model's `chat_template.jinja` there, or use `--field +FIELD`",
            )
        self._source, self.context = source, context
        self.template_digest: str | None = template_digest(template)
        reader = _Reader(field, tokenizer, template, ending)
        self._spans: list[tuple[int, int]] = []
        """Begin of each document in `_flat`, and the number of its tokens."""
        self.learnt_tokens = self.learnt_bytes = 0
        documents: list[np.ndarray] = []
        totals: list[tuple[int, int]] = []
        begin = 0
        for tokens, sizes in _read_documents(
            [_tokenised(piece, reader) for piece in source.pieces]
        ):
            window = tokens[: context + 1]
            is_learnt = window[1:] < 0  # the first token is not predicted
            learnt = int(is_learnt.sum())
            self.cut += len(window) < len(tokens)
            if learnt:
                self._spans.append((begin, len(window)))
                begin += len(window)
                documents.append(np.array(window))
                totals.append((learnt, int(sizes[: len(window)].sum())))
                self.learnt_tokens += learnt
                self.learnt_bytes += int(sizes[1 : len(window)][is_learnt].sum())
        if not self.learnt_bytes:
            raise ArbError(
                f"no record has an answer that begins within {context:,} tokens",
                "use a larger `--ctx`, or name more records, as with `--val`",
            )
        self._flat = np.concatenate(documents)
        self.bins = pack([size - 1 for _, size in self._spans], context)
        """Numbers of the documents of each window."""
        document_totals = np.array(totals)
        window_totals = [document_totals[window].sum(axis=0) for window in self.bins]
        self._learnt, self._bytes = np.array(window_totals).T
        """Number of tokens with a loss, and bytes of text, of each window."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return sum(size for _, size in self._spans)

    @property
    def longest(self) -> int:
        """Number of positions of the longest document."""
        return max(size for _, size in self._spans) - 1

    @property
    def symbol_bytes(self) -> float:
        """Average number of bytes per token with a loss."""
        return self.learnt_bytes / self.learnt_tokens

    def windows(self, _length: int) -> int:
        """Return the number of windows."""
        return len(self.bins)

    def learnt_symbols(self, starts: Sequence[int], _context: int) -> int:
        """Return the number of tokens with a loss in windows."""
        return int(self._learnt[[*starts]].sum())

    @property
    def pass_symbols(self) -> int:
        """Number of positions of all windows."""
        return len(self.bins) * self.context

    def window_bytes(self, starts: Sequence[int], _context: int) -> int:
        """Return the number of bytes of text in windows, without padding."""
        return int(self._bytes[[*starts]].sum())

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
            column = 0
            for number, index in enumerate(self.bins[window]):
                begin, size = self._spans[index]
                tokens = self._flat[begin : begin + size].astype(np.int64)
                columns = slice(column, column + size - 1)
                ids[row, columns] = np.where(tokens < 0, ~tokens, tokens)[:-1]
                targets[row, columns] = np.where(tokens < 0, ~tokens, NOT_LEARNT)[1:]
                documents[row, columns] = number
                column += size - 1
            documents[row, column:] = len(self.bins[window])  # padding has a number of its own
        ids_, targets_, documents_ = map(torch.from_numpy, (ids, targets, documents))
        return ids_, targets_, documents_


def open_documents(
    text: Text, field: str, tokenizer: Tokenizer | None, path: Path | str, context: int
) -> Chats:
    """Tokenise the records of a text with the template and the stop tokens of a tokenizer.

    Args:
        text: text of bytes.
        field: see `Chats`.
        tokenizer: tokenizer of the documents.
        path: path of its file, next to which the template and the special tokens are.
        context: number of positions of a window.

    Raises:
        ArbError: there is no tokenizer, or `Chats` refuses the records.
    """
    if tokenizer is None:
        raise ArbError(
            f"`--field {field}` needs a tokenizer, as it has documents",
            "train with `--tokenizer tokenizer.json`, or name a model that was",
        )
    ending = next(iter(stop_tokens(tokenizer, path)), None)
    return Chats(text, field, tokenizer, find_template(path), context, ending)


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Pack documents into windows by best fit, in decreasing order of length.

    Args:
        sizes: number of positions of each document, at most `room`.
        room: number of positions of a window.

    Returns:
        Numbers of the documents of each window, at most `MAX_DOCUMENTS` - 1.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free positions and number of windows, the fullest first
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        fitting = bisect_left(free, (sizes[index], -1))
        left, window = free.pop(fitting) if fitting < len(free) else (room, len(bins))
        if window == len(bins):
            bins.append([])
        bins[window].append(index)
        left -= sizes[index]
        if left and len(bins[window]) < MAX_DOCUMENTS - 1:
            insort(free, (left, window))
    return bins


class _Reader:
    """Converts records to documents."""

    def __init__(
        self, field: str, tokenizer: Tokenizer, template: ChatTemplate | None, ending: int | None
    ) -> None:
        self.field, self.tokenizer, self.template = field, tokenizer, template
        self.ending = ending
        self.specials = tokenizer.specials
        source = template.source if template else ""
        tokens = sorted(template.tokens.items()) if template else ()
        identity = VERSION, field, tokenizer.digest, source, ending, *tokens
        self.digest = sha256(repr(identity).encode()).hexdigest()

    def documents(self, record: Any) -> Iterator[Document]:
        """Yield the documents of a record: one, or one for each answer.

        Raises:
            ValueError: the record is invalid.
        """
        if not isinstance(record, dict):
            raise ValueError("it is not an object")
        question, _, answer = self.field.rpartition(JOINED)
        if self.field in CHATS:
            yield from self._chat(self._messages(record), self._variables(record))
        elif question:
            texts = [self._text(record, name) for name in (question, answer)]
            messages: list[Message] = [
                {"role": role, "content": text} for role, text in zip(ROLES, texts, strict=True)
            ]
            yield from self._chat(messages, self._variables(record))
        else:
            text = self._text(record, answer)
            text.encode()  # raises UnicodeEncodeError for unpaired surrogates
            before, after = self.tokenizer.beginning, [] if self.ending is None else [self.ending]
            marked = self.tokenizer.encode_marked(text, specials=False)
            tokens = [*before, *(token for token, _ in marked), *after]
            sizes = [0] * len(before) + _sizes(text, marked) + [0] * len(after)
            yield Document([~token for token in tokens], sizes)

    def _variables(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the variables of a template that a record sets.

        Raises:
            ValueError: the record has a field that decides the text, and that is not read.
        """
        template = self.template
        assert template is not None, "`Chats` refuses messages without a template"
        for name in REFUSED:
            if record.get(name) is not None:
                raise ValueError(f"its `{name}` is not read; remove the field")
        variables = {name: record[name] for name in VARIABLES if record.get(name)}
        for name in variables:
            if name not in template.variables:
                raise ValueError(f"it has `{name}`, and the chat template does not read them")
        return variables

    def _messages(self, record: dict[str, Any]) -> list[Message]:
        """Return the messages of a record, with texts as their contents."""
        messages = record.get(self.field)
        if messages is None:
            messages = next((record[name] for name in CHATS if record.get(name)), None)
        if not isinstance(messages, list) or not has_type(messages, list[dict]):
            raise ValueError(f"its `{self.field}` are not a list of objects")
        converted = [self._message(message) for message in messages]
        if not any(message["role"] == ROLES[1] for message in converted):
            raise ValueError(f"no message has the role `{ROLES[1]}`")
        return converted

    def _message(self, message: dict[str, Any]) -> Message:
        if "role" not in message and "from" in message:  # ShareGPT
            role, others = message["from"], {k: v for k, v in message.items() if k != "from"}
            if role not in SHARE_GPT:
                raise ValueError(f"a message is from `{role}`, and not of {[*SHARE_GPT]}")
            message = {"role": SHARE_GPT[role], "content": others.pop("value", None)} | others
        if not isinstance(message.get("role"), str):
            raise ValueError("a message has no `role`")
        for name in REFUSED_IN_MESSAGES:
            if message.get(name) is not None:
                raise ValueError(f"the `{name}` of a message is not read; remove the field")
        content = message.get("content")
        if isinstance(content, list) and all(map(_is_text_part, content)):
            message = message | {"content": "".join(part["text"] for part in content)}
        elif content is None and message.get("tool_calls"):
            pass  # templates write the calls instead
        elif not isinstance(content, str):
            raise ValueError("the `content` of a message is not a text")
        if message.get("weight") not in (None, 0, 1):
            raise ValueError("the `weight` of a message is not 0 or 1")
        return message

    def _text(self, record: dict[str, Any], name: str) -> str:
        if not isinstance(text := record.get(name), str):
            raise ValueError(f"its `{name}` is missing or not a text")
        return text

    def _chat(self, messages: list[Message], variables: dict[str, Any]) -> Iterator[Document]:
        """Yield a chat as one document, or as one per answer if the template rewrites earlier ones.

        Answers are the `{% generation %}` blocks of the template. A template without them has as
        an answer the text that it adds to that of the preceding messages, with the generation
        prompt if it begins with it. An answer with a `weight` of 0 has no loss.
        """
        template = self.template
        assert template is not None, "`Chats` refuses messages without a template"
        for text in _texts_in([messages, variables]):
            text.encode()  # raises UnicodeEncodeError for unpaired surrogates
            if specials := [name for name in self.specials if name in text]:
                raise ValueError(f"a message has `{specials[0]}`, which is a special token")
        answers = [i for i, message in enumerate(messages) if message["role"] == ROLES[1]]
        learnt = [messages[index].get("weight") != 0 for index in answers]
        messages = [
            {name: value for name, value in message.items() if name != "weight"}
            for message in messages
        ]
        text, marks = template.render_marked(messages, **variables)
        if marks:
            if len(marks) != len(answers) and not all(learnt):
                raise ValueError("the template marks other answers than those with a `weight`")
            is_target = learnt if len(marks) == len(answers) else [True] * len(marks)
            yield self._document(text, list(compress(marks, is_target)))
            return
        spans, texts = [], []
        for index in answers:
            text = template.render(messages[: index + 1], **variables)
            before = template.render(messages[:index], add_generation_prompt=True, **variables)
            if not text.startswith(before):  # the prompt has more than an answer begins with
                before = template.render(messages[:index], **variables)
            if not text.startswith(before):
                raise ValueError("the template writes no answer after the messages before it")
            spans.append((len(before), len(text)))
            texts.append(text)
        last = texts[-1]
        if all(last.startswith(text) for text in texts):
            yield self._document(last, list(compress(spans, learnt)))
            return
        for text, span in compress(zip(texts, spans, strict=True), learnt):
            yield self._document(text, [span])

    def _document(self, text: str, spans: list[tuple[int, int]]) -> Document:
        """Encode a text; tokens with a character of one of the spans have a loss."""
        marked = self.tokenizer.encode_marked(text)
        tokens = [
            ~token if any(_overlaps(offsets, span) for span in spans) else token
            for token, offsets in marked
        ]
        return Document(tokens, _sizes(text, marked))


def _is_text_part(part: Any) -> bool:
    """Return whether a part of a message's content is a text."""
    return has_type(part, dict) and part.get("type") == "text" and has_type(part.get("text"), str)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, without names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(part)


def _overlaps(offsets: tuple[int, int], span: tuple[int, int]) -> bool:
    """Return whether a token has a character of a span; an empty token, whether it lies within."""
    (begin, end), (first, last) = offsets, span
    return begin < last and (end > first or begin >= first)


def _sizes(text: str, marked: list[tuple[int, tuple[int, int]]]) -> list[int]:
    """Return the bytes of text of each token, from the end of the one before to its own.

    Text between tokens counts with the next one. Of tokens that share a character, as in a
    byte-level encoding, the first has all of its bytes.
    """
    sizes, last_end = [], 0
    for index, (_, (_, end)) in enumerate(marked):
        end = len(text) if index == len(marked) - 1 else end
        sizes.append(len(text[last_end:end].encode()) if end > last_end else 0)
        last_end = max(last_end, end)
    return sizes


def _read_documents(paths: Sequence[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tokens and their sizes in bytes of each document in tokenised files, int32."""
    for path in paths:
        if not path.stat().st_size:
            continue
        flat, begin = np.memmap(path, np.int32, "r"), 0
        while begin < len(flat):
            size = int(flat[begin])
            yield flat[begin + 1 : begin + 1 + size], flat[begin + 1 + size : begin + 1 + 2 * size]
            begin += 1 + 2 * size


def _tokenised(piece: tuple[Path, int, int], reader: _Reader) -> Path:
    """Return the file with the documents of a piece of a text, created in the cache if needed."""
    path, start, stop = piece
    settings = f"{start} {stop}\nchats {reader.digest}"
    return converted(path, settings, lambda _size: _encoded(path, start, stop, reader))


def _encoded(path: Path, start: int, stop: int, reader: _Reader) -> Iterator[bytes]:
    for line, begin in _lines(path, start, stop):
        try:
            for document in reader.documents(parse_json(line)):
                numbers = [len(document.tokens), *document.tokens, *document.sizes]
                yield np.array(numbers, np.int32).tobytes()
        except ValueError as error:
            source, location = source_of(path), f"the record at byte {begin:,}"
            if source != path:  # its bytes are not those of the file
                newlines = np.count_nonzero(np.memmap(path, np.uint8, "r")[:begin] == ord("\n"))
                location = f"line {newlines + 1:,}"
            raise ArbError(
                f"{location} of `{source}`: {error}",
                "each line must be an object with the fields that `--field` names",
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
                        f"`{source_of(path)}` has a line of more than {RECORD_BYTES:,} bytes",
                        "split the record",
                    )
                if line.strip() and begin + len(line.rstrip(b"\r\n")) <= stop:
                    yield line, begin
    except OSError as error:
        raise unreadable(path, error) from error
