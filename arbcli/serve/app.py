"""Routes of the server, which submit requests to the engine and wait for its texts."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from arbcli.base.errors import ArbError
from arbcli.generation.conversation import Conversation
from arbcli.serve.engine import Busy, Closed, Engine
from arbcli.serve.protocol import Answer, RequestError, parse_request
from arbcli.serve.runs import json_answer
from arbcli.serve.runs import routes as page_routes
from arbcli.serve.texts import Piece, Text

OPEN_PATHS = ("/", "/health")
"""Paths that need no API key."""
RETRY_SECONDS = 1
"""Time after which a client may retry if the queue is full, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request."""

    body_bytes: int = 4 * 2**20
    body_seconds: float = 20
    """Timeout for receiving the body, in seconds."""
    seconds: float = 600
    """Timeout for all texts of a request, including their time in the queue, in seconds."""


def build_app(
    engine: Engine | None,
    *,
    api_key: str | None = None,
    limits: Limits = Limits(),
    watch: Path | None = None,
) -> Starlette:
    """Create the application.

    Args:
        engine: engine of the model, which the caller starts and closes; None only serves runs.
        api_key: key that clients must send as a bearer token; None requires none.
        limits: limits of requests.
        watch: folder of runs to show; None shows none.
    """
    routes = page_routes(watch)
    if engine is not None:
        service = _Service(engine, limits)
        routes += [
            Route("/v1/models", service.models),
            Route("/v1/models/{name}", service.model),
            Route("/v1/completions", partial(service.complete, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(service.complete, chat=True), methods=["POST"]),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ]
    handlers: Any = {
        RequestError: _request_error,
        HTTPException: _http_error,
        ArbError: _runs_error,
        ClientDisconnect: _client_closed_request,
        Exception: _server_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.add_middleware(_Guard, api_key=api_key, seconds=limits.seconds + 2 * limits.body_seconds)
    return app


class _Guard:
    """Rejects requests without the API key, and ends those whose client reads too slowly."""

    def __init__(self, app: ASGIApp, api_key: str | None, seconds: float) -> None:
        self._app, self._seconds = app, seconds
        self._token = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._token and scope["path"] not in OPEN_PATHS:
            authorization = Headers(scope=scope).get("authorization", "")
            if not secrets.compare_digest(authorization.encode("latin-1"), self._token):
                error = RequestError("the API key is missing or wrong", 401, code="invalid_api_key")
                await _error_response(error)(scope, receive, send)
                return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await self._app(scope, receive, send)


class _Service:
    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine, self._limits = engine, limits
        self._started, self._num_requests = int(time.time()), 0
        # one thread, as tokenizers are not thread-safe; long prompts must not block the event loop
        self._parser = ThreadPoolExecutor(1, "parser")

    async def models(self, _: Request) -> Response:
        """List the single model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe the model by name."""
        if request.path_params["name"] != self._engine.name:
            raise RequestError("this model does not exist", 404, code="model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "id": engine.name,
            "object": "model",
            "created": self._started,
            "owned_by": "arb",
            "max_model_len": engine.positions,
            "unit": "byte" if engine.model.tokenizer is None else "token",
            "chat": isinstance(engine.conversation, Conversation),
        }

    async def health(self, _: Request) -> Response:
        """Report whether texts can be generated."""
        healthy = self._engine.failure is None
        return JSONResponse({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)

    async def metrics(self, _: Request) -> Response:
        """Return counters and gauges in the Prometheus text format."""
        engine, lines = self._engine, []
        for name, kind, value in (
            ("requests_total", "counter", self._num_requests),
            ("texts_finished_total", "counter", engine.num_finished),
            ("prompt_tokens_total", "counter", engine.num_read),
            ("generated_tokens_total", "counter", engine.num_generated),
            ("texts_running", "gauge", engine.num_running),
            ("texts_waiting", "gauge", engine.num_waiting),
            ("slots", "gauge", engine.texts),
        ):
            lines += [f"# TYPE arb_{name} {kind}", f"arb_{name} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def complete(self, request: Request, *, chat: bool) -> Response:
        """Handle a completion request."""
        self._num_requests += 1
        body = await self._body(request)
        loop = asyncio.get_running_loop()
        parse = partial(parse_request, body, self._engine, chat=chat)
        parsed = await loop.run_in_executor(self._parser, parse)
        pieces = _Pieces(parsed.texts, self._engine, self._limits.seconds)
        answer = Answer(parsed, self._engine)
        if parsed.stream:
            return _Stream(answer, pieces)
        with pieces:
            collecting = asyncio.create_task(_collect(pieces, len(parsed.texts)))
            tasks = {collecting, asyncio.create_task(_wait_for_disconnect(request))}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not collecting.done():
                    raise ClientDisconnect
                collected = collecting.result()
                # in a thread, as log probabilities of many symbols take seconds to format
                return await asyncio.to_thread(lambda: JSONResponse(answer.complete(collected)))
            finally:
                for task in tasks:
                    task.cancel()

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() != "application/json":
            raise RequestError("the header must have `Content-Type: application/json`", 415)
        body, maximum = bytearray(), self._limits.body_bytes
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > maximum:
                        raise RequestError(f"the body has more than {maximum:,} bytes", 413)
        except TimeoutError:
            raise RequestError("the body did not arrive in time", 408) from None
        return bytes(body)


class _Pieces:
    """The pieces of texts in order of arrival; unfinished texts are cancelled at exit.

    Args:
        texts: texts, which are submitted to the engine.
        engine: the engine.
        seconds: timeout for all texts, in seconds.

    Raises:
        RequestError: the engine was closed.
    """

    def __init__(self, texts: list[Text], engine: Engine, seconds: float) -> None:
        self._texts, self._engine = texts, engine
        loop = asyncio.get_running_loop()
        self._end = loop.time() + seconds
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

        def put(index: int, piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

        for index, text in enumerate(texts):
            text.on_piece = partial(put, index)
        try:
            engine.submit(texts)
        except Busy:
            message = "the queue is full; try again later"
            raise RequestError(message, 429, code="rate_limit_exceeded") from None
        except Closed:
            raise RequestError("the server is stopping", 503) from None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._engine.cancel(self._texts)

    async def __aiter__(self) -> AsyncIterator[tuple[int, list[Piece]]]:
        """Yield the index of a text and its new pieces, until all texts have ended."""
        num_unfinished = len(self._texts)
        while num_unfinished:
            try:
                async with asyncio.timeout_at(self._end):
                    new = [await self._queue.get()]
            except TimeoutError:
                raise RequestError("the texts took too long", 504, code="timeout") from None
            while not self._queue.empty():
                new.append(self._queue.get_nowait())
            pieces_by_text: dict[int, list[Piece]] = {}
            for index, piece in new:
                pieces_by_text.setdefault(index, []).append(piece)
            for index, pieces in pieces_by_text.items():
                num_unfinished -= pieces[-1].finish is not None
                if pieces[-1].finish == "error":
                    raise RequestError("the model failed", 500)
                yield index, pieces


class _Stream(StreamingResponse):
    """An answer as server-sent events; the texts are cancelled if the client disconnects."""

    def __init__(self, answer: Answer, pieces: _Pieces) -> None:
        super().__init__(_events(answer, pieces), media_type="text/event-stream")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._pieces:
            await super().__call__(scope, receive, send)


async def _events(answer: Answer, pieces: _Pieces) -> AsyncIterator[bytes]:
    try:
        if answer.request.chat:
            for index in range(len(answer.choices)):
                yield _event(answer.role_chunk(index))
        async for index, new in pieces:
            # log probabilities of a prompt take seconds to format
            make = partial(answer.chunk, index, new)
            chunk = await asyncio.to_thread(make) if new[0].echoed else make()
            yield _event(chunk)
        if answer.request.include_usage:
            yield _event(answer.usage_chunk())
    except RequestError as error:
        yield _event(error.body)
    yield b"data: [DONE]\n\n"


async def _collect(pieces: _Pieces, count: int) -> list[list[Piece]]:
    collected: list[list[Piece]] = [[] for _ in range(count)]
    async for index, new in pieces:
        collected[index] += new
    return collected


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _error_response(error: RequestError) -> Response:
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == 429 else None
    return JSONResponse(error.body, error.status, headers)


async def _request_error(_: Request, error: RequestError) -> Response:
    return _error_response(error)


async def _http_error(_: Request, error: HTTPException) -> Response:
    response = _error_response(RequestError(error.detail, error.status_code))
    response.headers.update(error.headers or {})  # the methods of a path
    return response


async def _runs_error(_: Request, error: ArbError) -> Response:
    return json_answer({"error": {"message": str(error)}}, 500)


async def _server_error(_: Request, __: Exception) -> Response:
    return _error_response(RequestError("the server failed", 500))


async def _client_closed_request(*_: object) -> Response:
    return Response(status_code=499)
