"""The server answers as the OpenAI protocol says, whatever clients send or leave unsaid."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from apparatus.killing import start, write_tokenizer
from processes import wait_until

from arbcli.config.model import ModelConfig
from arbcli.config.presets import preset
from arbcli.data.tokens import Tokenizer
from arbcli.model.language_model import LanguageModel
from arbcli.serve import protocol
from arbcli.serve.engine import Engine
from arbcli.serve.texts import Piece
from tests.serve.test_engine import KINDS, model_of

httpx = pytest.importorskip("httpx", reason="needs the package httpx")
apps = pytest.importorskip("arbcli.serve.app", reason="needs the package starlette")
server = pytest.importorskip("arbcli.serve.server", reason="needs the package uvicorn")

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SECONDS = 30
"""Time within which an answer must come."""


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> Callable[..., tuple[LanguageModel, Path]]:
    """Return a function that gives a model of a configuration 300 tokens and a chat template."""
    for package in ("tokenizers", "jinja2"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    run = tmp_path_factory.mktemp("folder") / "chatty"
    run.mkdir()
    write_tokenizer(run / "tokenizer.json", (END,))
    (run / "chat_template.jinja").write_text(TEMPLATE)
    (run / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))

    def build(config: ModelConfig, device: torch.device) -> tuple[LanguageModel, Path]:
        model = model_of(replace(config, vocabulary=300), device)
        model.tokenizer = Tokenizer.read(run / "tokenizer.json")
        model.tokenizer.ends = frozenset([model.tokenizer.special(END)])
        return model, run / "step-1.safetensors"

    return build


@pytest.fixture(scope="module")
def engine(chatty) -> Iterator[Engine]:
    """An engine of a model of tokens with a chat template."""
    config = preset("tiny", dim=32, layers=1, heads=2, ffn=48, ctx=32)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Engine(*chatty(config, device), texts=3, positions=4096, queue=128) as engine:
        yield engine


class Client:
    """A client of a server at a port."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.address = host, port

    def ask(self, path: str, body: Any = None, **headers) -> httpx.Response:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {"headers": {"Content-Type": "Application/JSON ;"} | headers, "content": content}
        given |= {"timeout": SECONDS, "trust_env": False}
        method, (host, port) = "GET" if body is None else "POST", self.address
        return httpx.request(method, f"http://{host}:{port}{path}", **given)

    def answered(self, path: str, body: dict) -> Any:
        """Return the object of an answer, or the text of a stream."""
        answer = self.ask(path, body)
        assert answer.status_code == 200, answer.text
        return answer.text if body.get("stream") else answer.json()

    def complete(self, prompt: Any = "it was", **fields) -> Any:
        return self.answered("/v1/completions", {"prompt": prompt, "seed": 5} | fields)

    def chat(self, *contents: str, **fields) -> Any:
        messages = [{"role": "user", "content": content} for content in contents]
        return self.answered("/v1/chat/completions", {"messages": messages, "seed": 5} | fields)

    def error(self, body: Any, path: str = "/v1/completions", **headers) -> tuple[int, dict]:
        answer = self.ask(path, body, **headers)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"].isprintable()
        return answer.status_code, error

    def connect(self, body: bytes | None = None, path: str = "/v1/completions") -> socket.socket:
        """Open a connection, and send a request but for its answer."""
        sock = socket.create_connection(self.address, timeout=SECONDS)
        if body is not None:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return sock


@contextmanager
def running(engine: Engine, host: str = "127.0.0.1", **options) -> Iterator[Client]:
    """Run a server of an engine in a thread."""
    sock = server.listener(host, 0)
    client, app = Client(sock.getsockname()[1], host), apps.build_app(engine, **options)
    thread = threading.Thread(target=server.serve, args=(app, engine, sock, 9))
    thread.start()
    assert client.ask("/health").json() == {"status": "ok"}
    stop = engine.on_failure  # which a later server replaces
    try:
        yield client
    finally:
        stop()
        thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(engine) -> Iterator[Client]:
    with running(engine) as client:
        yield client


def events(text: str) -> list[dict]:
    """Return the chunks of a stream."""
    *chunks, end = text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def test_signal_lets_running_texts_finish(saved, tmp_path):
    """Of a server that is forked before there are threads."""
    log, said = tmp_path / "log", re.compile(r":(\d+)\n")
    words = ["serve", str(saved().parent), "--port", "0", "--device", "cpu"]
    server_id = start(words, "kept", log)
    try:
        wait_until(lambda: log.exists() and said.search(log.read_text()) is not None)
        begun = log.read_text()
        body = {"prompt": "a", "max_tokens": 80, "stream": True, "logprobs": 0}
        sock = Client(int(said.search(begun)[1])).connect(json.dumps(body).encode())
        received = sock.recv(4096)
        os.kill(server_id, signal.SIGTERM)
        while part := sock.recv(4096):
            received += part
        assert b'"finish_reason":"length"' in received
        assert b"data: [DONE]" in received
        assert os.waitstatus_to_exitcode(os.waitpid(server_id, 0)[1]) == 0
        assert log.read_text() == f"{begun}stopped\n"
    finally:
        with suppress(ProcessLookupError):
            os.kill(server_id, signal.SIGKILL)


def test_model_is_listed(client, engine):
    (model,) = client.ask("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["chat"]) == ("chatty", 4096, True)
    assert client.ask("/v1/models/chatty").json() == model
    assert client.error(None, "/v1/models/gpt")[0] == 404


def test_echo_of_no_token_is_the_prompt_with_its_log_probabilities(client, engine):
    """The sum that lm-evaluation-harness forms, over the tokens from its context to the last."""
    prompt = "it wäs read"
    answer = client.complete(prompt, echo=True, max_tokens=0, logprobs=2)
    (choice,), ids = answer["choices"], engine.encode_prompt(prompt)[0]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert answer["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids),
    }  # fmt: skip
    scores = choice["logprobs"]
    assert {len(part) for part in scores.values()} == {len(ids)}
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    with_next = client.complete([ids], echo=True, max_tokens=1, logprobs=1, temperature=0)
    assert with_next["choices"][0]["logprobs"]["token_logprobs"][:-1] == scores["token_logprobs"]
    with torch.no_grad():
        logits = engine.model(torch.tensor([[*ids]], device=engine.model.device))[0]
    expected = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    given = torch.tensor(scores["token_logprobs"][1:], device=expected.device)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    last = with_next["choices"][0]["logprobs"]
    assert last["token_logprobs"][-1] == max(last["top_logprobs"][-1].values())
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    for token, logprob, top, offset in zip(*(scores[name] for name in names), strict=True):
        if top is not None:
            assert top[token] >= logprob  # several tokens that are no characters have one name
            assert 1 <= len(top) <= 3
        if token.isascii() and not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("chat", [False, True])
def test_stream_has_the_text_of_the_whole_answer(client, chat):
    fields = {"max_tokens": 40, "n": 2, "stop": ["e", "xyz"], "logprobs": True if chat else 2}
    ask = client.chat if chat else client.complete
    whole = ask("it was", **fields)
    chunks = events(ask("it was", stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(whole["choices"]):
        parts = [chunk["choices"][0] for chunk in chunks[:-1]]
        parts = [part for part in parts if part["index"] == index]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        key = "content" if chat else "token_logprobs"
        scores = [s for part in parts if part["logprobs"] for s in part["logprobs"][key]]
        assert scores == choice["logprobs"][key]
        if chat:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        said = [part["delta"]["content"] if chat else part["text"] for part in parts]
        assert "".join(said) == (choice["message"]["content"] if chat else choice["text"])


def test_choices_are_those_of_lone_requests(client, engine):
    prompts = ["it was", "read a line", "a"]
    together = client.complete(prompts, n=2, max_tokens=9)["choices"]
    assert [choice["index"] for choice in together] == [*range(6)]
    assert len({choice["text"] for choice in together}) == 6
    for index, prompt in enumerate(prompts):
        alone = client.complete(prompt, max_tokens=9)["choices"][0]["text"]
        ids = client.complete([*engine.encode_prompt(prompt)[0]], max_tokens=9)["choices"]
        assert together[2 * index]["text"] == alone == ids[0]["text"]


def test_chat_continues_the_template_and_ends_at_its_end(client, engine, monkeypatch):
    text = engine.conversation.render([("user", "hello"), ("user", "you")])
    ids = engine.conversation.encode(text)
    assert engine.model.tokenizer.decode(ids) == f"user: hello{END}user: you{END}assistant: "
    answer = client.chat("hello", "you", max_completion_tokens=9)["choices"][0]
    plain = client.complete(ids, max_tokens=9)["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": plain["text"]}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "you"}]
    body = {"messages": messages, "seed": 5, "max_tokens": 9}
    body |= {"tools": [], "response_format": {"type": "text"}, "repetition_penalty": 1}
    assert client.ask("/v1/chat/completions", body).json()["choices"][0] == answer
    body["messages"][0]["content"] = END
    assert client.error(body, "/v1/chat/completions")[0] == 400
    written, replaced = map(engine.conversation.render, ([("\ud800", "\udfff")], [("?", "?")]))
    assert written == replaced  # unpaired surrogates
    monkeypatch.setattr(engine, "positions", 40)
    answer = client.chat("hello", temperature=0)  # of as many tokens as are left
    reason = answer["choices"][0]["finish_reason"]
    assert answer["usage"]["total_tokens"] == 40 or reason == "stop"


ODD = [
    None, True, 0, -1, 1.5, 10**30, [], [[]], [None], ["a", 1], [-1], [10**9], [[1], "a"], {},
    {"a": 1}, [{"role": "user"}], [{"role": 1, "content": "a"}], [{}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
]  # fmt: skip
VALID = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


WRONG = {
    "model": 3, "max_tokens": -1, "n": 0, "seed": 1.5, "stop": [""], "stream": "yes",
    "stream_options": {"x": True}, "temperature": 3, "top_p": 0, "top_k": 0, "user": 1,
    "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 2,
    "logit_bias": {"1": 2},
}  # fmt: skip
"""A wrong value of every field."""


def malformed() -> Iterator[tuple[str, Any]]:
    """Yield paths and bodies that are not valid."""
    for path, body in VALID.items():
        text = json.dumps(body).encode()
        cut = [text[:place] for place in range(1, len(text))]
        extended = [text + byte for byte in (b"\0", b"{", b"]")]
        unknown = [body | {name: 1} for name in ("prompts", "top_logprobs", "tool", "x\n")]
        wrong = [body | {name: value} for name, value in WRONG.items()]
        odd = [body | {name: value} for name in body for value in ODD]
        for other in (b"[3]", b"\xff", *cut, *extended, *unknown, *wrong, *odd):
            yield path, other


def test_malformed_requests_are_refused(client, engine):
    assert WRONG.keys() == protocol.FIELDS.keys()
    before = engine.num_finished
    for path, body in malformed():
        status, error = client.error(body, path)
        assert status in (400, 404), (path, body)
        assert error["type"] == "invalid_request_error"
    assert engine.num_finished == before


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"prompt": "a", "model": "\ud800\x1b"}, 404, "model", "model_not_found"),
        ({"prompt": "a", "max_tokens": 9999}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [1, 300]}, 400, "prompt", None),
        ({"prompt": ["a"] * 65, "n": 2}, 400, "n", None),
        ({"prompt": ["a"] * 128, "max_tokens": 600, "logprobs": 15}, 400, "logprobs", None),
        ({"prompt": "a", "suffixes": 2}, 400, "suffixes", None),
        ({"prompt": "a", "stop": ["\ud800"]}, 400, "stop", None),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, 400, "stream_options", None),
        (b" " * (2**22 + 1), 413, None, None),
    ],
)
def test_error_names_the_field(client, body, status, param, code):
    given, error = client.error(body)
    assert (given, error["param"], error["code"]) == (status, param, code)


def test_prompt_that_no_tokens_can_hold_is_refused_before_it_is_tokenised(
    client, engine, monkeypatch
):
    for name in ("encode_all", "encode_marked"):
        monkeypatch.setattr(Tokenizer, name, lambda *_: pytest.fail("tokenised"))
    size = engine.positions * engine.model.tokenizer.longest
    wanted = f"a text has at most 4,096 tokens of at most {len(END)} bytes, and the prompt has"
    chat = {"messages": [{"role": "user", "content": "a" * (size + 1)}]}
    for body, path in (({"prompt": "a" * (size + 1)}, ""), (chat, "chat/")):
        status, error = client.error(body, f"/v1/{path}completions")
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith(wanted)


def test_wrong_ways_are_refused(client):
    assert [client.error(None, path)[0] for path in (*VALID, "/v2")] == [405, 405, 404]
    assert client.ask("/v1/completions").headers["allow"] == "POST"
    assert client.error({"prompt": "a"}, **{"Content-Type": "text/plain"})[0] == 415
    assert client.ask("/health", Host="elsewhere.example").status_code == 400
    assert client.ask("/health", Host="localhost:1").status_code == 200


@pytest.fixture
def endless(monkeypatch):
    """Let no token end a text."""
    monkeypatch.setattr(protocol, "stop_symbols", lambda _: frozenset())


def test_texts_of_a_client_that_leaves_are_cancelled(client, engine, endless):
    finished = engine.num_finished
    for stream in (True, False):
        body = {"prompt": "a", "max_tokens": 4000, "n": 3, "stream": stream, "seed": 1}
        with client.connect(json.dumps(body).encode()) as sock:
            wait_until(lambda: engine.num_running == 3)
            if stream:
                assert sock.recv(15) == b"HTTP/1.1 200 OK"
        wait_until(lambda: engine.num_running == 0)
    assert engine.num_finished == finished


def test_end_that_does_not_wait_for_texts_prints_no_traceback(engine, endless, capfd):
    body = {"prompt": "a", "max_tokens": 4000, "n": 3, "stream": True}
    with running(engine) as client:
        sock = client.connect(json.dumps(body).encode())
        wait_until(lambda: engine.num_running == 3)
        engine.on_failure.args[0].force_exit = True  # as by a second Ctrl-C
    with sock:
        wait_until(lambda: engine.num_running == 0)
    assert "Traceback" not in capfd.readouterr().err


def test_full_queue_and_long_texts_are_refused(engine, endless):
    with running(engine, limits=apps.Limits(seconds=0.4, body_seconds=0.3)) as client:
        body = {"prompt": "a", "max_tokens": 4000, "seed": 1}
        assert client.error(body)[1]["code"] == "timeout"
        wait_until(lambda: engine.num_running == engine.num_waiting == 0)
        stream = client.ask("/v1/completions", body | {"stream": True}).text
        assert events(stream)[-1]["error"]["code"] == "timeout"
        many = json.dumps(body | {"n": 128}).encode()
        with client.connect(many):
            wait_until(lambda: engine.num_waiting == 125)
            status, error = client.error(body | {"n": 9})
            assert (status, error["type"]) == (429, "rate_limit_error")
        wait_until(lambda: engine.num_running == engine.num_waiting == 0)
        with client.connect() as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
            )
            assert sock.recv(99).startswith(b"HTTP/1.1 408")


def test_text_that_goes_on_after_the_server_is_not_delivered(monkeypatch):
    """Also if the server ends between a look whether it has and the delivery."""
    text, engine = SimpleNamespace(), SimpleNamespace(submit=lambda _: None)

    async def submit() -> None:
        apps._Pieces([text], engine, 1)
        monkeypatch.setattr(asyncio.get_running_loop(), "is_closed", lambda: False)

    asyncio.run(submit())
    text.on_piece(Piece([], "stop"))


def test_long_prompt_is_echoed_from_a_thread():
    asked = SimpleNamespace(chat=False, include_usage=False)
    here = SimpleNamespace(request=asked, chunk=lambda *_: threading.get_native_id())

    async def pieces():
        yield 0, [Piece([], echoed=True)]

    async def first() -> bytes:
        return await anext(apps._events(here, pieces()))

    assert asyncio.run(first()) != f"data: {threading.get_native_id()}\n\n".encode()


def test_connection_without_a_request_is_closed(engine, monkeypatch):
    """Also after an answer, then by uvicorn."""
    configured = mock.Mock(wraps=server.uvicorn.Config)
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(server.uvicorn, "Config", configured)
    with running(engine) as client:
        assert configured.call_args.kwargs["timeout_keep_alive"] == 0.3
        for start in (
            b"",
            b"GET /health HTTP/1.1\r\nHost: loc",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET",
        ):
            with client.connect() as sock:
                sock.sendall(start)
                received = b""
                while part := sock.recv(4096):
                    received += part
                assert received.startswith(b"HTTP/1.1 200" if start.endswith(b"GET") else b"")


def test_key_is_needed_for_all_but_the_health(engine):
    host = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"  # any name of this machine
    with running(engine, host, api_key="sësame") as client:
        assert client.error(None, "/v1/models")[1]["code"] == "invalid_api_key"
        for wrong in ("Bearer x", "sesame", "Bearer sesame", ""):
            assert client.error({"prompt": "a"}, Authorization=wrong)[0] == 401
        right = "Bearer sësame".encode()
        assert client.ask("/v1/models", Authorization=right).status_code == 200
        assert client.error(None, "/metrics")[0] == 401


def test_metrics_count_the_tokens(client, engine):
    client.complete(max_tokens=7, temperature=0)
    text = client.ask("/metrics").text
    values = dict(re.findall(r"^(arb_\w+) (\d+)$", text, re.MULTILINE))
    assert int(values["arb_generated_tokens_total"]) == engine.num_generated >= 7
    assert values["arb_texts_running"] == "0"
    assert len(values) == text.count("# TYPE")


def test_openai_client_is_answered(chatty, device):
    openai = pytest.importorskip("openai", reason="needs the package openai")
    model, path = chatty(KINDS["hnet"], device)
    with Engine(model, path, texts=2, positions=60) as engine, running(engine) as client:
        asked = openai.OpenAI(base_url=f"http://127.0.0.1:{client.address[1]}/v1", api_key="none")
        (name,) = [model.id for model in asked.models.list()]
        options = {"model": name, "seed": 5, "max_tokens": 9}
        complete = partial(asked.completions.create, prompt="it was", **options)
        whole = complete(logprobs=2, echo=True)
        scores = whole.choices[0].logprobs
        assert len(scores.tokens) == len(scores.token_logprobs) == whole.usage.prompt_tokens + 9
        text = "".join(part.choices[0].text for part in complete(stream=True))
        assert whole.choices[0].text == f"it was{text}"
        with pytest.raises(openai.BadRequestError):
            complete(temperature=9)
        messages = [{"role": "user", "content": "hello"}]
        talk = partial(asked.chat.completions.create, messages=messages, **options)
        (answer,) = talk(logprobs=True, top_logprobs=2).choices
        assert len(answer.logprobs.content[0].top_logprobs) == 2
        text = "".join(part.choices[0].delta.content for part in talk(stream=True))
        assert answer.message.content == text


def test_addresses_are_refused_and_a_model_without_a_template_has_no_chats(
    saved, arb_error, device
):
    run = str(saved().parent)
    said = "`--host 0.0.0.0` can be reached from other machines"
    assert said in arb_error("serve", run, "--host", "0.0.0.0")
    words = ("--port", "1", "--host", "192.0.2.1", "--api-key", "k")
    assert "cannot listen at `192.0.2.1:1`" in arb_error("serve", run, *words)
    model, path = model_of(KINDS["dense"], device), "/v1/chat/completions"
    name = Path("r\udcff/1")  # of bytes that are not UTF-8
    with Engine(model, name, texts=2, positions=60) as engine, running(engine) as client:
        assert client.ask("/v1/models").json()["data"][0]["id"] == "r\\udcff"
        status, error = client.error(VALID[path], path)
        assert (status, "chat template" in error["message"]) == (400, True)
