"""Runs the application with uvicorn until a signal; running texts are finished first."""

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from arbcli.base.errors import os_errors
from arbcli.base.output import note
from arbcli.serve.engine import Engine

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Hosts in URLs of this machine."""
HEAD_SECONDS = 20
"""Time within which the head of a request must arrive."""
MAX_CONNECTIONS = 1024


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request does not come in time."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def _expect_head(self) -> None:
        """Start the timer between requests, and stop it during one."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal; uvicorn would raise it again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        stopping = signal.SIGINT, signal.SIGTERM
        previous = {number: signal.signal(number, self.handle_exit) for number in stopping}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def listener(host: str, port: int) -> socket.socket:
    """Listen at an address; port 0 chooses a free one.

    Raises:
        ArbError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with os_errors("listen at", f"{host}:{port}", "choose another `--host` or `--port`"):
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)


def serve(app: ASGIApp, engine: Engine | None, sock: socket.socket, seconds: float) -> None:
    """Answer requests until SIGINT or SIGTERM; a second SIGINT does not wait for running ones.

    Args:
        app: the application.
        engine: its engine, which has started; if it fails, the server stops. None is none.
        sock: from `listener`.
        seconds: maximum time that running requests are given to finish.
    """
    host, port = sock.getsockname()[:2]
    if is_loopback(host):  # pages of other sites must not reach it by a name of their own
        app = TrustedHostMiddleware(app, (host, *LOOPBACK))
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=HEAD_SECONDS,
        timeout_graceful_shutdown=math.ceil(seconds),
    )
    server = _Server(config)
    if engine is not None:
        engine.on_failure = partial(setattr, server, "should_exit", True)
    logging.getLogger("uvicorn.error").addFilter(_is_not_of_the_end)
    shown = f"[{host}]" if ":" in host else host
    note(f"`{engine.name if engine else 'the folder of runs'}` is served at http://{shown}:{port}")
    asyncio.run(server.serve([sock]))


def _is_not_of_the_end(record: logging.LogRecord) -> bool:
    """Return whether a record has another error than that of a request that a signal cancels."""
    return not record.exc_info or record.exc_info[0] is not asyncio.CancelledError


def is_loopback(host: str) -> bool:
    """Return whether an address is only reached from this machine."""
    return host == "localhost" or host == "::1" or host.startswith("127.")
