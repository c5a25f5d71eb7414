"""The OpenAI protocol: parsing of requests, errors, and the JSON of answers."""

import codecs
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from arbcli.base.errors import ArbError
from arbcli.base.output import printable
from arbcli.base.reading import has_type, parse_json
from arbcli.config.model import MAX_SIZE
from arbcli.generation.conversation import Conversation
from arbcli.generation.sampling import Sampling
from arbcli.generation.tokens import stop_symbols
from arbcli.serve.engine import MAX_LOGPROBS, Engine
from arbcli.serve.texts import Piece, Symbol, Text

DEFAULT_LENGTH = 16
"""Default `max_tokens` of a completion."""
MAX_STOPS, MAX_STOP = 16, 256
"""Maximum number of stop strings, and of bytes of each."""
MAX_TEXTS = 128
"""Maximum number of texts of a request."""
MAX_SCORES = 2**20
"""Maximum number of log probabilities of an answer, whose JSON has about 25 bytes for each."""


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        message: what is wrong.
        status: HTTP status.
        param: field of the request that is wrong; None is none.
        code: name of the error for programs; None is none.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if status == 429 else kind
        error = {"message": printable(message), "type": kind, "param": param, "code": code}
        self.body = {"error": error}
        """The JSON of the answer."""


class Field(NamedTuple):
    """A field of a request."""

    kind: Any
    """Type of its value, for `has_type`."""
    expected: str
    """Values that it can have, for errors."""
    fits: Callable[[Any], bool] = lambda _: True
    """Checks a value of this type."""


def _bounded(minimum: int, maximum: int) -> Field:
    allowed = f"an integer from {minimum:,} to {maximum:,}"
    return Field(int, allowed, lambda value: minimum <= value <= maximum)


def _fits_stop(stop: str | list[str]) -> bool:
    stops = [stop] if isinstance(stop, str) else stop
    # generated text never contains a lone surrogate
    valid = all(text == text.encode(errors="replace").decode() for text in stops)
    return valid and len(stops) <= MAX_STOPS and all(0 < len(text) <= MAX_STOP for text in stops)


TEXT_FORMAT = {"type": "text"}
NO_PENALTY = Field(float, "0, as there are no penalties", lambda value: value == 0)
FLAG, OBJECT = Field(bool, "true or false"), Field(dict, "an object")
FIELDS = {
    "model": Field(str, "the name of the model"),
    "max_tokens": _bounded(0, MAX_SIZE),
    "n": _bounded(1, MAX_TEXTS),
    "seed": Field(int, "an integer"),
    "stop": Field(str | list[str], f"up to {MAX_STOPS} strings of 1 to {MAX_STOP} characters",
        _fits_stop),
    "stream": FLAG,
    "stream_options": OBJECT,
    "temperature": Field(float, "0, or a number from 1e-6 to 2",
        lambda value: value == 0 or 1e-6 <= value <= 2),
    "top_p": Field(float, "a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": _bounded(1, MAX_SIZE),
    "user": Field(str, "a string"),
    "presence_penalty": NO_PENALTY,
    "frequency_penalty": NO_PENALTY,
    "repetition_penalty": Field(float, "1, as there are no penalties", lambda value: value == 1),
    "logit_bias": Field(dict, "empty, as there are no biases", lambda value: not value),
}  # fmt: skip
"""Fields of both kinds of requests. A field may also be null, which is its default."""
COMPLETION_FIELDS = FIELDS | {
    "prompt": Field(str | list[str] | list[int] | list[list[int]], "a text or tokens, or several"),
    "echo": FLAG,
    "logprobs": _bounded(0, MAX_LOGPROBS),
    "best_of": Field(int, "1, as all texts are returned", lambda value: value == 1),
    "suffix": Field(str, "empty, as texts are continued only", lambda value: not value),
}
CHAT_FIELDS = FIELDS | {
    "messages": Field(list[dict], "a list of messages", bool),
    "max_completion_tokens": _bounded(0, MAX_SIZE),
    "logprobs": FLAG,
    "top_logprobs": _bounded(0, MAX_LOGPROBS),
    "tools": Field(list[dict], "empty, as there are no tools", lambda value: not value),
    "response_format": Field(dict, 'text: {"type": "text"}', lambda value: value == TEXT_FORMAT),
}


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A valid request."""

    chat: bool
    texts: list[Text]
    """Texts to generate, by the index of their choice."""
    num_prompt_tokens: int
    stream: bool
    include_usage: bool
    """Whether a stream ends with the usage."""


def parse_request(body: bytes, engine: Engine, *, chat: bool) -> ParsedRequest:
    """Parse and validate the body of a request.

    Args:
        body: the body.
        engine: engine of the model.
        chat: whether it asks for a chat completion.

    Raises:
        RequestError: it is invalid.
    """
    fields = _fields(body, CHAT_FIELDS if chat else COMPLETION_FIELDS)
    if fields.get("model", engine.name) != engine.name:
        raise RequestError(
            f"the model `{fields['model'][:80]}` does not exist; this server has `{engine.name}`",
            404,
            param="model",
            code="model_not_found",
        )
    options = fields.get("stream_options", {})
    if {*options} - {"include_usage"} or not has_type(options, dict[str, bool]):
        expected = '{"include_usage": true} or {"include_usage": false}'
        raise RequestError(f"`stream_options` must be {expected}", param="stream_options")
    try:
        prompts = [_chat_prompt(fields, engine)] if chat else _prompts(fields, engine)
    except ArbError as error:
        raise RequestError(str(error), param="messages" if chat else "prompt") from error
    copies = fields.get("n", 1)
    if copies * len(prompts) > MAX_TEXTS:
        many = f"{copies * len(prompts)} texts are asked for, and a request may have {MAX_TEXTS}"
        raise RequestError(many, param="n")
    texts = [
        _text(fields, engine, *prompt, stream, chat=chat)
        for prompt in prompts
        for stream in range(copies)
    ]
    scores = sum(map(_count_scores, texts))
    if scores > MAX_SCORES:
        raise RequestError(
            f"the answer may have {scores:,} log probabilities, and at most {MAX_SCORES:,} are"
            " returned: ask for fewer texts, or for shorter ones",
            param="logprobs",
        )
    return ParsedRequest(
        chat=chat,
        texts=texts,
        num_prompt_tokens=sum(len(prompt) for prompt, _ in prompts),
        stream=fields.get("stream", False),
        include_usage=options.get("include_usage", False),
    )


def _fields(body: bytes, known: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields of a request that are not null."""
    try:
        values = parse_json(body)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestError("the body is not a JSON object")
    fields = {name: value for name, value in values.items() if value is not None}
    for name, value in fields.items():
        if name not in known:
            shown = ascii(name)[1:-1][:80]
            raise RequestError(f"the field `{shown}` is not supported", param=shown)
        kind, expected, fits = known[name]
        if not has_type(value, kind) or not fits(value):
            raise RequestError(f"`{name}` must be {expected}", param=name)
    return fields


def _prompts(fields: dict[str, Any], engine: Engine) -> list[tuple[Sequence[int], int]]:
    """Return the prompts, each with the number of symbols before its text."""
    prompt = fields.get("prompt")
    if not prompt and prompt != "":
        raise RequestError("there is no `prompt`", param="prompt")
    prompts = [prompt] if isinstance(prompt, str) or has_type(prompt, list[int]) else prompt
    if len(prompts) > MAX_TEXTS:
        raise RequestError(f"there are more than {MAX_TEXTS} prompts", param="prompt")
    for text in prompts:
        if isinstance(text, str):
            _check_size(text, engine, "prompt")
    return [
        engine.encode_prompt(text) if isinstance(text, str) else (_checked_ids(text, engine), 0)
        for text in prompts
    ]


def _check_size(text: str, engine: Engine, param: str) -> None:
    """Refuse a text that is too long for any number of tokens, before it is tokenised."""
    tokenizer, size = engine.model.tokenizer, len(text.encode(errors="replace"))
    if tokenizer is not None and size > tokenizer.longest * engine.positions:
        raise RequestError(
            f"a text has at most {engine.positions:,} tokens of at most {tokenizer.longest:,}"
            f" bytes, and the prompt has {size:,} bytes",
            param=param,
            code="context_length_exceeded",
        )


def _checked_ids(ids: list[int], engine: Engine) -> Sequence[int]:
    vocabulary = engine.model.config.vocabulary
    if not all(0 <= token < vocabulary for token in ids):
        raise RequestError(f"tokens of `prompt` are 0 to {vocabulary - 1:,}", param="prompt")
    return bytes(ids) if engine.model.tokenizer is None else ids


def _chat_prompt(fields: dict[str, Any], engine: Engine) -> tuple[Sequence[int], int]:
    if isinstance(engine.conversation, ArbError):
        raise RequestError(str(engine.conversation), code="no_chat_template")
    if "messages" not in fields:
        raise RequestError("there are no `messages`", param="messages")
    messages = [(message.get("role"), message.get("content")) for message in fields["messages"]]
    pairs = [(role, _content(content)) for role, content in messages]
    if not all(isinstance(role, str) for role, _ in pairs):
        raise RequestError("a message has no `role`", param="messages")
    text = engine.conversation.render(pairs)
    _check_size(text, engine, "messages")
    return engine.conversation.encode(text), 0


def _content(content: Any) -> str:
    """Return the text of a message, which may be in parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        is_text = has_type(part, dict[str, str]) and part.keys() == {"type", "text"}
        if not is_text or part["type"] != "text":
            raise RequestError("the `content` of a message must be text", param="messages")
    return "".join(part["text"] for part in parts)


def _text(
    fields: dict[str, Any],
    engine: Engine,
    prompt: Sequence[int],
    beginning: int,
    stream: int,
    *,
    chat: bool,
) -> Text:
    room = engine.positions - len(prompt)
    length = fields.get("max_completion_tokens", fields.get("max_tokens"))
    if length is None:
        length = room if chat else DEFAULT_LENGTH
    if not prompt:
        raise RequestError("the prompt is empty; give a newline at least", param="prompt")
    if room < max(length, int(chat)):
        raise RequestError(
            f"a text has at most {engine.positions:,} tokens, and the prompt has {len(prompt):,}"
            f" and `max_tokens` is {length:,}",
            param="messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    logprobs = fields.get("logprobs")
    if chat:
        count = fields.get("top_logprobs", 0)
        if count and not logprobs:
            raise RequestError("`top_logprobs` needs `logprobs`: true", param="top_logprobs")
        logprobs = count if logprobs else None
    chatting = engine.conversation if chat else None
    ends = chatting.ends if isinstance(chatting, Conversation) else stop_symbols(engine.model)
    stop = fields.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    return Text(
        prompt=prompt,
        length=length,
        sampling=Sampling(
            temperature=fields.get("temperature", 1.0),
            top_k=fields.get("top_k", MAX_SIZE),
            top_p=fields.get("top_p", 1.0),
            seed=fields.get("seed", secrets.randbits(31)) % 2**31,
        ),
        stream=stream,
        stops=tuple(text.encode() for text in stops),
        ends=frozenset(ends),
        logprobs=logprobs,
        echo=fields.get("echo", False),
        beginning=beginning,
    )


def _count_scores(text: Text) -> int:
    """Return the maximum number of log probabilities of a text."""
    if text.logprobs is None:
        return 0
    return (text.length + text.echo * len(text.prompt)) * (1 + text.logprobs)


class Choice:
    """The JSON of a text: one answer, or the chunks of a stream.

    Args:
        text: the text.
        engine: engine of the model.
        chat: whether it is an answer of a chat.
    """

    def __init__(self, text: Text, engine: Engine, *, chat: bool) -> None:
        self.chat, self.num_tokens = chat, 0
        """Number of symbols generated so far."""
        self._scores, self._tokenizer = text.logprobs is not None, engine.model.tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def chunk(self, pieces: Sequence[Piece]) -> tuple[str, dict[str, Any] | None, str | None]:
        """Return the text, the log probabilities, and the reason of the end of new pieces."""
        finish = pieces[-1].finish
        symbols = [symbol for piece in pieces for symbol in piece.symbols]
        self.num_tokens += sum(len(piece.symbols) for piece in pieces if not piece.echoed)
        texts, offsets = [], []
        for symbol in symbols:
            offsets.append(self._characters)
            texts.append(self._decoder.decode(symbol.content))
            self._characters += len(texts[-1])
        if finish:
            texts.append(self._decoder.decode(b"", final=True))
        if not self._scores:
            return "".join(texts), None, finish
        logprobs = (
            {"content": [*map(self._chat_logprobs, symbols)]}
            if self.chat
            else {
                "tokens": [*map(self._name, symbols)],
                "token_logprobs": [symbol.logprob for symbol in symbols],
                "top_logprobs": [*map(self._likeliest, symbols)],
                "text_offset": offsets,
            }
        )
        return "".join(texts), logprobs, finish

    def _name(self, symbol: Symbol) -> str:
        """Return the text of a symbol, or `bytes:` and hexadecimals for bytes that are not text."""
        content = symbol.content or self._bytes(symbol.id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _bytes(self, symbol: int) -> bytes:
        tokenizer = self._tokenizer
        return bytes([symbol]) if tokenizer is None else tokenizer.decode([symbol]).encode()

    def _likeliest(self, symbol: Symbol) -> dict[str, float | None] | None:
        """Return the likeliest symbols by name, with the symbol itself; names may coincide."""
        if symbol.logprob is None:
            return None
        names: dict[str, float | None] = {}
        for other, logprob in (*symbol.likeliest, (symbol.id, symbol.logprob)):
            name = self._name(symbol if other == symbol.id else Symbol(other))
            names.setdefault(name, logprob)
        return names

    def _entry(self, symbol: Symbol) -> dict[str, Any]:
        content = symbol.content or self._bytes(symbol.id)
        return {"token": self._name(symbol), "logprob": symbol.logprob, "bytes": [*content]}

    def _chat_logprobs(self, symbol: Symbol) -> dict[str, Any]:
        likeliest = [self._entry(Symbol(other, b"", score)) for other, score in symbol.likeliest]
        return self._entry(symbol) | {"top_logprobs": likeliest}


class Answer:
    """Builds the JSON objects of the answer to a request.

    Args:
        request: the request.
        engine: engine of the model.
    """

    def __init__(self, request: ParsedRequest, engine: Engine) -> None:
        self.request = request
        self.choices = [Choice(text, engine, chat=request.chat) for text in request.texts]
        prefix = "chatcmpl" if request.chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": engine.name,
        }

    def complete(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """Return the answer with the pieces of all choices."""
        kind = "chat.completion" if self.request.chat else "text_completion"
        choices = [
            self._choice(index, of_choice, "message", {"role": "assistant"})
            for index, of_choice in enumerate(pieces)
        ]
        return self._head | {"object": kind, "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return a chunk of a stream with new pieces of a choice."""
        return self._chunk([self._choice(index, pieces, "delta", {})])

    def role_chunk(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice])

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream, with the usage."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Return the numbers of symbols so far."""
        prompt, generated = self.request.num_prompt_tokens, sum(c.num_tokens for c in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        return self._head | {"object": kind, "choices": choices}

    def _choice(
        self, index: int, pieces: Sequence[Piece], name: str, role: dict[str, str]
    ) -> dict[str, Any]:
        """Return new pieces of a choice; those of a chat are the content of a field."""
        text, logprobs, finish = self.choices[index].chunk(pieces)
        content = {name: role | {"content": text}} if self.request.chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
