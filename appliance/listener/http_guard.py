"""uvicorn's httptools protocol with the limits it lacks, and with the channel in every request's scope."""

from __future__ import annotations

import asyncio
import http
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from appliance.listener.connection import ChannelState, ConnectionLimits, ConnectionStats
from appliance.listener.http_framing import BadHttp, Body, End, Head, Phase, RequestFramer

MAX_HELD_BYTES = 65_536


class _HeldFlow(FlowControl):
    """uvicorn resumes reading whenever the application asks for a message, even only to notice a disconnect. Pipelined
    bytes that are held already stay the limit all the same."""

    def __init__(self, transport: asyncio.Transport, full: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._full = full

    def resume_reading(self) -> None:
        if not self._full():
            super().resume_reading()


class GuardedHttp(HttpToolsProtocol):
    """One HTTP/1.1 connection.

    Requests are taken strictly one after the other: bytes of a pipelined request wait until the answer before it is
    out, together with the attestation that was in force when they arrived, because a request latches at its head.
    `scope["state"]` carries `channel` (the ChannelState) and `latched` (its `in_force` at that moment).
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        channel: ChannelState,
        limits: ConnectionLimits,
        stats: ConnectionStats,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state)
        # uvicorn's own parser tolerates data after a closing request; the framer never hands it any.
        self.parser = httptools.HttpRequestParser(self)
        self.app = self._with_early_answer_closing(self.app)
        self.timeout_keep_alive = limits.keep_alive_s  # type: ignore[assignment]
        self.channel = channel
        self._limits = limits
        self._stats = stats
        self._framer = RequestFramer(head_bytes=limits.head_bytes)
        self._held: deque[tuple[bytes, object | None]] = deque()
        self._held_bytes = 0
        self._latched: object | None = None
        self._answering = False
        self._parsed_end = False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # What the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _HeldFlow(transport, lambda: self._held_bytes > MAX_HELD_BYTES)
        self._arm(self._limits.head_s, self._head_timed_out)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._held.append((data, self.channel.in_force))
        self._held_bytes += len(data)
        self._pump()
        if self._held_bytes > MAX_HELD_BYTES:
            self.flow.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_write()
        self._unset_keepalive_if_required()
        self._held.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_stall_s, self._write_stalled)

    def resume_writing(self) -> None:
        self._disarm_write()
        super().resume_writing()

    def request_incomplete(self) -> bool:
        """Whether the client may still be sending: closing now has to leave it time to read the answer."""
        return self._framer.phase is not Phase.IDLE or bool(self._held)

    # Framing

    def _pump(self) -> None:
        """Feed what was held, up to the end of one request whose answer is not out yet."""
        while self._held and not self._answering and not self.transport.is_closing():
            data, self._latched = self._held.popleft()
            self._held_bytes -= len(data)
            try:
                rest = self._feed(data)
            except BadHttp as error:
                self._stats.bad_requests += 1
                self._refuse(error.status, error.reason)
                return
            if rest:
                self._held.appendleft((rest, self._latched))
                self._held_bytes += len(rest)

    def _feed(self, data: bytes) -> bytes:
        """Take one request's bytes from `data`; returns what belongs to the next one. Raises BadHttp."""
        before = self._framer.phase
        for event, rest in self._framer.feed(data):
            if isinstance(event, Head):
                self._disarm()
                self._stats.requests += 1
                self._parsed_end = False
                self._parse(event.data)
            elif isinstance(event, Body):
                self._parse(event.data)
            elif isinstance(event, End):
                self._disarm()
                if not self._parsed_end:
                    raise BadHttp(400, "The request is malformed.")
                self._answering = not self.cycle.response_complete
                if self._answering:
                    return rest
        self._watch(before)
        return b""

    def _parse(self, data: bytes) -> None:
        if self._parsed_end:
            raise BadHttp(400, "The request is malformed.")
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadHttp(400, "The request is malformed.") from error

    def _watch(self, before: Phase) -> None:
        """Start or restart the clock of whatever is incomplete now."""
        phase = self._framer.phase
        if phase is Phase.HEAD and before is not Phase.HEAD:
            # On a fresh connection the clock has been running since it opened.
            if self._timer is None:
                self._arm(self._limits.head_s, self._head_timed_out)
        elif phase is Phase.BODY:
            self._arm(self._limits.body_idle_s, self._body_timed_out)

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        state = self.scope["state"]
        state["channel"] = self.channel
        state["latched"] = self._latched

    def on_message_complete(self) -> None:
        self._parsed_end = True
        super().on_message_complete()

    # The answer

    def _with_early_answer_closing(self, app: Callable[..., Any]) -> Callable[..., Any]:
        """An answer that starts before its request is complete says `connection: close`."""

        async def guarded(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
            cycle = self.cycle

            async def send_noting_early_answers(message: ASGISendEvent) -> None:
                early = message["type"] == "http.response.start" and cycle.more_body
                if early or self.channel.close_after_response:
                    cycle.keep_alive = False
                await send(message)

            await app(scope, receive, send_noting_early_answers)

        return guarded

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answering = False
        self._pump()
        self.flow.resume_reading()

    def _refuse(self, status: int, reason: str) -> None:
        """Answer a request that cannot be taken in the shape of OpenAI's errors, unless its answer has begun; close."""
        self._disarm()
        cycle = self.cycle
        answered = cycle is not None and not cycle.response_complete and cycle.response_started
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if answered:
            self.transport.abort()
            return
        phrase = http.HTTPStatus(status).phrase
        kind = "timeout_error" if status == http.HTTPStatus.REQUEST_TIMEOUT else "invalid_request_error"
        code = phrase.lower().replace(" ", "_").replace("-", "_")
        error = {"message": reason, "type": kind, "param": None, "code": code}
        body = json.dumps({"error": error}).encode("ascii")
        fields = [*self.server_state.default_headers, (b"content-type", b"application/json")]
        fields += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head = b"HTTP/1.1 %d %s\r\n" % (status, phrase.encode("ascii"))
        self.transport.write(head + b"".join(b"%s: %s\r\n" % field for field in fields) + b"\r\n" + body)
        self.transport.close()

    # Clocks

    def _arm(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(delay_s, callback)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _disarm_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _head_timed_out(self) -> None:
        self._timer = None
        self._stats.head_timeouts += 1
        if self._framer.phase is Phase.HEAD:
            self._refuse(408, "The request head took too long.")
        else:
            self.transport.close()

    def _body_timed_out(self) -> None:
        self._timer = None
        if self.flow.read_paused:
            # The client is not late: this side has stopped reading until the application catches up.
            self._arm(self._limits.body_idle_s, self._body_timed_out)
            return
        self._stats.body_timeouts += 1
        self._refuse(408, "The request body took too long.")

    def _write_stalled(self) -> None:
        self._write_timer = None
        self._stats.write_stalls += 1
        self.transport.abort()
