"""httpx transports that attest every connection and verify the receipt of every answer before handing it out.

Nothing is resent, with one exception: an attested connection found dead before the first byte of a request was written
to it (the appliance was restarted) is replaced once, under the same policy. Verdicts are VerificationError, which is no
httpx error: neither httpx nor the openai client catches or retries it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import httpcore
import httpx

from client_sdk.appraisal.session import AttestationRecord, media_type
from client_sdk.errors import AuthenticityError, Rejection, VerificationError
from client_sdk.transport.addresses import Connector
from client_sdk.transport.backend import AsyncAttestingBackend, AttestingBackend, apost_over_stream, post_over_stream
from client_sdk.transport.http_rules import Outgoing, receipt_headers
from client_sdk.transport.pool import CURRENT_ATTEMPT, Attempt, make_async_pool, make_pool
from client_sdk.transport.protocol import Judge, Received, StreamJudge, response_extensions
from client_sdk.transport.tls_streams import AsyncTlsStream, TlsStream
from client_sdk.wire.names import (
    LIMIT_ATTESTATION_BUNDLE_BYTES,
    LIMIT_RECEIPT_BYTES,
    MEDIA_CBOR,
    PATH_ATTESTATION,
    PATH_RECEIPTS,
)

ATTEST_TIMEOUT_S = 60.0
RECEIPT_POLLS = 50
RECEIPT_POLL_S = 0.1

UNVERIFIED_CHUNK = "unverified_chunk"
"""Request extension: a callable that gets every chunk of a stream as it arrives, before it is verified."""

Unverified: TypeAlias = Callable[[bytes], None] | None
_DEAD = (httpcore.NetworkError, httpcore.RemoteProtocolError)


@contextmanager
def _httpx_errors() -> Generator[None]:
    """httpcore's network errors under httpx's names, which are the same; verdicts pass through untouched."""
    try:
        yield
    except httpcore.UnsupportedProtocol as error:
        raise httpx.UnsupportedProtocol(str(error)) from error
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise getattr(httpx, type(error).__name__)(str(error)) from error


class VerifyingTransport(httpx.BaseTransport):
    """For httpx.Client. Reads a whole answer before returning it; streams release verified frames only.

    Raises VerificationError, UndecidedError (no attestation to be had now), ApplianceError (the attestation endpoint
    failed), and httpx's transport errors. `connector` replaces the TCP connection to the origin. Facts about a response
    are in its extensions: `verified`, `verified_receipt`, `attestation`.
    """

    def __init__(
        self, judge: Judge, *, connector: Connector | None = None, attest_timeout_s: float = ATTEST_TIMEOUT_S
    ) -> None:
        self._judge = judge
        self._attest_timeout_s = attest_timeout_s
        backend = AttestingBackend(attest=self._attest, now=judge.surroundings.now, connector=connector)
        self._pool = make_pool(backend, judge.expired)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._judge.check_origin(request)
        assert isinstance(request.stream, httpx.SyncByteStream)
        body = b"".join(request.stream)
        with _httpx_errors():
            outgoing, response, sent_at = self._send(request, body)
            try:
                received = _judge_head(self._judge, outgoing, response, sent_at)
                if received.head.kind == "stream":
                    stream = _VerifyingStream(self._judge, received, response, request.extensions.get(UNVERIFIED_CHUNK))
                    return _build(response, received, stream.extensions, stream)
                content = self._read(response, self._judge.response_limit_bytes)
            except BaseException:
                response.close()
                raise
            response.close()
            extensions = response_extensions(received, response.extensions)
            if received.head.kind == "whole":
                receipt = received.head.receipt or self._fetch_receipt(request, received)
                extensions |= {"verified": True, "verified_receipt": self._judge.whole(received, content, receipt)}
            return _build(response, received, extensions, httpx.ByteStream(content))

    def close(self) -> None:
        self._pool.close()

    def _attest(self, stream: TlsStream) -> AttestationRecord:
        question = self._judge.session.ask()
        answer = post_over_stream(
            stream,
            PATH_ATTESTATION,
            question.body,
            content_type=MEDIA_CBOR,
            timeout_s=self._attest_timeout_s,
            limit_bytes=LIMIT_ATTESTATION_BUNDLE_BYTES,
        )
        return self._judge.attested(question, answer, stream)

    def _send(self, request: httpx.Request, body: bytes) -> tuple[Outgoing, httpcore.Response, float]:
        first = Attempt()
        try:
            return self._attempt(request, body, first)
        except _DEAD:
            if not first.found_dead:
                raise
        return self._attempt(request, body, Attempt())

    def _attempt(
        self, request: httpx.Request, body: bytes, attempt: Attempt
    ) -> tuple[Outgoing, httpcore.Response, float]:
        outgoing = self._judge.prepare(request, body)
        sent_at = self._judge.surroundings.now()
        token = CURRENT_ATTEMPT.set(attempt)
        try:
            return outgoing, self._pool.handle_request(_core_request(request, outgoing)), sent_at
        finally:
            CURRENT_ATTEMPT.reset(token)

    def _read(self, response: httpcore.Response, limit_bytes: int) -> bytes:
        assert isinstance(response.stream, Iterable)
        content = bytearray()
        for chunk in response.stream:
            content += chunk
            if len(content) > limit_bytes:
                raise self._judge.too_large()
        return bytes(content)

    def _fetch_receipt(self, request: httpx.Request, received: Received) -> bytes:
        for _ in range(RECEIPT_POLLS):
            response = self._pool.handle_request(_receipt_request(request, received))
            try:
                body = self._read(response, LIMIT_RECEIPT_BYTES)
            finally:
                response.close()
            receipt = self._judge.receipt_answer(response.status, _media(response), body)
            if receipt is not None:
                return receipt
            time.sleep(RECEIPT_POLL_S)
        raise _still_pending()


class AsyncVerifyingTransport(httpx.AsyncBaseTransport):
    """For httpx.AsyncClient on asyncio. See VerifyingTransport."""

    def __init__(
        self, judge: Judge, *, connector: Connector | None = None, attest_timeout_s: float = ATTEST_TIMEOUT_S
    ) -> None:
        self._judge = judge
        self._attest_timeout_s = attest_timeout_s
        backend = AsyncAttestingBackend(attest=self._attest, now=judge.surroundings.now, connector=connector)
        self._pool = make_async_pool(backend, judge.expired)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._judge.check_origin(request)
        assert isinstance(request.stream, httpx.AsyncByteStream)
        body = b"".join([chunk async for chunk in request.stream])
        with _httpx_errors():
            outgoing, response, sent_at = await self._send(request, body)
            try:
                received = _judge_head(self._judge, outgoing, response, sent_at)
                if received.head.kind == "stream":
                    unverified = request.extensions.get(UNVERIFIED_CHUNK)
                    stream = _AsyncVerifyingStream(self._judge, received, response, unverified)
                    return _build(response, received, stream.extensions, stream)
                content = await self._read(response, self._judge.response_limit_bytes)
            except BaseException:
                await response.aclose()
                raise
            await response.aclose()
            extensions = response_extensions(received, response.extensions)
            if received.head.kind == "whole":
                receipt = received.head.receipt or await self._fetch_receipt(request, received)
                extensions |= {"verified": True, "verified_receipt": self._judge.whole(received, content, receipt)}
            return _build(response, received, extensions, httpx.ByteStream(content))

    async def aclose(self) -> None:
        await self._pool.aclose()

    async def _attest(self, stream: AsyncTlsStream) -> AttestationRecord:
        question = self._judge.session.ask()
        answer = await apost_over_stream(
            stream,
            PATH_ATTESTATION,
            question.body,
            content_type=MEDIA_CBOR,
            timeout_s=self._attest_timeout_s,
            limit_bytes=LIMIT_ATTESTATION_BUNDLE_BYTES,
        )
        return self._judge.attested(question, answer, stream)

    async def _send(self, request: httpx.Request, body: bytes) -> tuple[Outgoing, httpcore.Response, float]:
        first = Attempt()
        try:
            return await self._attempt(request, body, first)
        except _DEAD:
            if not first.found_dead:
                raise
        return await self._attempt(request, body, Attempt())

    async def _attempt(
        self, request: httpx.Request, body: bytes, attempt: Attempt
    ) -> tuple[Outgoing, httpcore.Response, float]:
        outgoing = self._judge.prepare(request, body)
        sent_at = self._judge.surroundings.now()
        token = CURRENT_ATTEMPT.set(attempt)
        try:
            return outgoing, await self._pool.handle_async_request(_core_request(request, outgoing)), sent_at
        finally:
            CURRENT_ATTEMPT.reset(token)

    async def _read(self, response: httpcore.Response, limit_bytes: int) -> bytes:
        assert isinstance(response.stream, AsyncIterable)
        content = bytearray()
        async for chunk in response.stream:
            content += chunk
            if len(content) > limit_bytes:
                raise self._judge.too_large()
        return bytes(content)

    async def _fetch_receipt(self, request: httpx.Request, received: Received) -> bytes:
        for _ in range(RECEIPT_POLLS):
            response = await self._pool.handle_async_request(_receipt_request(request, received))
            try:
                body = await self._read(response, LIMIT_RECEIPT_BYTES)
            finally:
                await response.aclose()
            receipt = self._judge.receipt_answer(response.status, _media(response), body)
            if receipt is not None:
                return receipt
            await asyncio.sleep(RECEIPT_POLL_S)
        raise _still_pending()


class _VerifyingStream(httpx.SyncByteStream):
    """The verified frames of a stream. With `unverified` an empty chunk follows each arrival, so that its reader wakes.

    `extensions` are the response's: `verified` and `verified_receipt` appear there when the stream has ended well.
    """

    def __init__(self, judge: Judge, received: Received, response: httpcore.Response, unverified: Unverified) -> None:
        self._stream = StreamJudge(judge, received)
        self._response = response
        self._unverified = unverified
        self.extensions = response_extensions(received, response.extensions)

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._response.stream, Iterable)
        with _httpx_errors():
            try:
                for chunk in self._response.stream:
                    if self._unverified is not None:
                        self._unverified(chunk)
                        yield b""
                    yield from self._stream.feed(chunk)
            except _DEAD as error:
                raise self._stream.broken() from error
            held, receipt = self._stream.finish()
            self.extensions |= {"verified": True, "verified_receipt": receipt}
            self._response.close()
            yield held

    def close(self) -> None:
        self._response.close()


class _AsyncVerifyingStream(httpx.AsyncByteStream):
    """See _VerifyingStream."""

    def __init__(self, judge: Judge, received: Received, response: httpcore.Response, unverified: Unverified) -> None:
        self._stream = StreamJudge(judge, received)
        self._response = response
        self._unverified = unverified
        self.extensions = response_extensions(received, response.extensions)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._response.stream, AsyncIterable)
        with _httpx_errors():
            try:
                async for chunk in self._response.stream:
                    if self._unverified is not None:
                        self._unverified(chunk)
                        yield b""
                    for released in self._stream.feed(chunk):
                        yield released
            except _DEAD as error:
                raise self._stream.broken() from error
            held, receipt = self._stream.finish()
            self.extensions |= {"verified": True, "verified_receipt": receipt}
            await self._response.aclose()
            yield held

    async def aclose(self) -> None:
        await self._response.aclose()


def _core_request(request: httpx.Request, outgoing: Outgoing) -> httpcore.Request:
    return httpcore.Request(
        method=outgoing.method,
        url=_core_url(outgoing.url, outgoing.url.raw_path),
        headers=list(outgoing.headers),
        content=outgoing.body,
        extensions=_core_extensions(request),
    )


def _receipt_request(request: httpx.Request, received: Received) -> httpcore.Request:
    """The same appliance, over any attested connection: the receipt is signed, its way does not matter."""
    assert received.head.receipt_id is not None
    return httpcore.Request(
        method="GET",
        url=_core_url(received.outgoing.url, f"{PATH_RECEIPTS}{received.head.receipt_id.hex()}".encode()),
        headers=list(receipt_headers(received.outgoing)),
        extensions=_core_extensions(request),
    )


def _core_url(url: httpx.URL, target: bytes) -> httpcore.URL:
    return httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=target)


def _core_extensions(request: httpx.Request) -> dict[str, Any]:
    return {"timeout": request.extensions["timeout"]} if "timeout" in request.extensions else {}


def _judge_head(judge: Judge, outgoing: Outgoing, response: httpcore.Response, sent_at: float) -> Received:
    record = response.extensions["network_stream"].get_extra_info("attestation")
    return judge.received(outgoing, response.status, response.headers, record, sent_at=sent_at)


def _build(
    response: httpcore.Response,
    received: Received,
    extensions: dict[str, Any],
    stream: httpx.SyncByteStream | httpx.AsyncByteStream,
) -> httpx.Response:
    built = httpx.Response(received.head.status, headers=response.headers, stream=stream)
    built.extensions = extensions  # this very dict: a stream adds its verdict at its end
    return built


def _media(response: httpcore.Response) -> str:
    values = [value.decode("latin-1") for name, value in response.headers if name.lower() == b"content-type"]
    return media_type(values[0]) if len(values) == 1 else ""


def _still_pending() -> VerificationError:
    return AuthenticityError(Rejection.RECEIPT_MISSING, "the appliance kept saying that the receipt is pending")
