"""Runs uvicorn on sockets made by the caller. Signals stay the caller's business."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Generator, Sequence
from typing import Any

import uvicorn

from appliance.errors import BootError
from appliance.listener.tls_server import ChannelProtocol


class _WithoutContent(logging.Filter):
    """uvicorn logs an application's exception with its message, which may quote a prompt: keep its type only."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            kind = record.exc_info[0]
            record.msg = f"{record.msg.strip()} ({kind.__name__ if kind else 'unknown'})"
            record.exc_info = None
            record.exc_text = None
        return True


class ServerHandle(uvicorn.Server):
    """A running server. `should_exit = True` asks it to stop within its grace period."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[ServerHandle], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    def stop(self) -> None:
        """Stop accepting, let answers in flight end, then close."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise BootError("the application refused to start; see the log above") from error
        self._on_started(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def serve(
    app: Callable[..., Any],
    sockets: Sequence[socket.socket],
    protocol_class: type[ChannelProtocol],
    *,
    grace_s: float,
    backlog: int = 512,
    on_started: Callable[[ServerHandle], None],
) -> None:
    """Serve `app` (ASGI 3, with lifespan) on listening `sockets` until the handle given to `on_started` is stopped.

    Needs the selector event loop of asyncio. After `grace_s` seconds answers still in flight are cancelled. Raises
    BootError if the application's start-up fails. `backlog` is the sockets' own once more: asyncio calls listen again.
    """
    config = uvicorn.Config(
        app,
        http=protocol_class,
        ws="none",
        loop="asyncio",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=True,
        backlog=backlog,
        timeout_keep_alive=math.ceil(protocol_class.limits.keep_alive_s),
        timeout_graceful_shutdown=max(1, math.ceil(grace_s)),
    )
    logger = logging.getLogger("uvicorn.error")
    content_filter = _WithoutContent()
    logger.addFilter(content_filter)
    try:
        await ServerHandle(config, on_started).serve(sockets=list(sockets))
    finally:
        logger.removeFilter(content_filter)
