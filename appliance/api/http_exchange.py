"""One inference request over ASGI: the rules for its head, its bounded body, and the way back to its client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from appliance.attestation.responder import InForce
from appliance.errors import BadRequest, TooLarge, UnsupportedMediaType
from appliance.inference.event_reader import ClientGone
from appliance.listener.connection import ChannelState
from appliance.receipts.issuer import ChainScope
from client_sdk.wire import names

_SECONDS = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")


class HttpExchange:
    """An `inference.request.Exchange`. `received` holds every body byte read so far, `complete` says all."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, *, chain_scope: ChainScope, max_body_bytes: int
    ) -> None:
        latched: InForce | None = scope["state"]["latched"]
        self.method: str = scope["method"]
        self.route: str = scope["path"]
        self.attestation = latched.attestation if latched else None
        self.channel = latched.binder if latched else None
        self.scope = chain_scope
        self.nonce: bytes | None = None
        self.received = b""
        self.complete = False
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._query: bytes = scope["query_string"]
        self._channel: ChannelState = scope["state"]["channel"]
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] | None = None
        self.timeout_s: float | None = None
        self._fault: BadRequest | None = None
        self._read_nonce()
        self._read_timeout()

    def _read_nonce(self) -> None:
        """Taken before anything can fail, so that a refusal echoes it. A malformed one is refused with a receipt."""
        values = self._values(names.HEADER_INFERENCE_NONCE)
        if not values:
            return
        field = names.HEADER_INFERENCE_NONCE
        low, high = names.INFERENCE_NONCE_MIN_BYTES, names.INFERENCE_NONCE_MAX_BYTES
        text = values[0]
        well_formed = len(values) == 1 and text.isalnum() and len(text) % 2 == 0 and low <= len(text) // 2 <= high
        try:
            nonce = bytes.fromhex(text.decode("ascii")) if well_formed else None
        except ValueError:
            nonce = None
        if nonce is None:
            self._fault = BadRequest(
                "invalid_nonce", f"The header {field} must be there once, {low}..{high} bytes in hex.", param=field
            )
        self.nonce = nonce

    def _read_timeout(self) -> None:
        """`x-request-timeout`: seconds within which the answer has to be there, decimal, once."""
        values = self._values(names.HEADER_REQUEST_TIMEOUT)
        if not values:
            return
        if len(values) == 1 and _SECONDS.fullmatch(values[0]) and float(values[0]) > 0:
            self.timeout_s = float(values[0])
        elif self._fault is None:
            field = names.HEADER_REQUEST_TIMEOUT
            message = f"The header {field} must be there once, a decimal number of seconds above 0."
            self._fault = BadRequest("invalid_timeout", message, param=field)

    async def read_body(self) -> bytes:
        """The whole body, its head checked first. Raises BadRequest, TooLarge, UnsupportedMediaType, ClientGone."""
        self._check_head()
        chunks = bytearray()
        try:
            while not self.complete:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks += message.get("body", b"")
                if len(chunks) > self._max_body_bytes:
                    raise self._too_large()
                self.complete = not message.get("more_body", False)
        finally:
            self.received = bytes(chunks)  # also when the wait is cut short: the receipt says how much had come
        self._watcher = asyncio.create_task(self._watch())
        return self.received

    def _check_head(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._query:
            raise BadRequest("query_not_supported", "Inference routes take no query string.")
        if self._values("content-encoding"):
            raise UnsupportedMediaType("content_encoding", "The request body must not be encoded.")
        media_types = self._values("content-type")
        if len(media_types) > 1:
            raise BadRequest("repeated_header", "The header content-type must be there once.", param="content-type")
        if b"".join(media_types).partition(b";")[0].strip().lower() != b"application/json":
            raise UnsupportedMediaType("media_type", "The request body must be application/json.")
        lengths = self._values("content-length")
        # Digits only: the framing layer has refused everything else.
        if lengths and int(lengths[0]) > self._max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> TooLarge:
        return TooLarge("body_too_large", f"The request body exceeds {self._max_body_bytes} bytes.")

    def _values(self, name: str) -> list[bytes]:
        wanted = name.encode()
        return [value for field, value in self._headers if field == wanted]

    async def _watch(self) -> None:
        """After the body, the next message can only be the disconnect."""
        while (await self._receive())["type"] != "http.disconnect":
            continue
        if not self.gone.done():
            self.gone.set_result(None)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        fields = {"content-type": names.MEDIA_JSON, "content-length": str(len(body)), **headers}
        await self._start(status, fields)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_head(self, headers: Mapping[str, str]) -> None:
        fields = {"content-type": names.MEDIA_EVENT_STREAM, **headers}
        await self._start(200, fields)

    async def send_part(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def send_end(self, *, close: bool) -> None:
        if close:
            self._channel.close_after_response = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, status: int, fields: Mapping[str, str]) -> None:
        fields = {**fields, "cache-control": "no-store"}
        headers = [(name.encode("ascii"), value.encode("ascii")) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
