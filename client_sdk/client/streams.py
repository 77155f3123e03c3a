"""Verified text as it comes: the iterators behind `Appliance.stream` and `AsyncAppliance.stream`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import httpx

from client_sdk.client.answers import BlockReader, Pending, Verified, refusal
from client_sdk.errors import ApplianceError, MalformedError, Rejection, TransportError
from client_sdk.receipts.verify import VerifiedReceipt
from client_sdk.transport.httpx_transport import UNVERIFIED_CHUNK

Piece = TypeVar("Piece")


@contextmanager
def sdk_errors() -> Generator[None]:
    """httpx's network errors as TransportError; everything of the SDK passes through."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise TransportError("TIMED_OUT", f"no answer in time ({type(error).__name__})") from error
    except httpx.ConnectError as error:
        raise TransportError("CONNECT_FAILED", str(error) or "cannot connect") from error
    except httpx.TransportError as error:
        raise TransportError("CONNECTION_BROKEN", str(error) or type(error).__name__) from error


class StreamReader:
    """Turns what the transport releases into pieces of text; with `pending`, what it has not released yet as well."""

    def __init__(self, *, pending: bool) -> None:
        self._pending = pending
        self._verified = BlockReader()
        self._unverified = BlockReader()
        self._waiting: list[str] = []
        self._text: list[str] = []
        self.receipt: VerifiedReceipt | None = None

    def extensions(self) -> dict[str, Any]:
        """Request extensions that make the transport tell of unverified chunks, if they are wanted."""
        return {UNVERIFIED_CHUNK: self._arrived} if self._pending else {}

    def released(self, chunk: bytes) -> Iterator[Pending | Verified]:
        """The pieces to hand out after the transport released `chunk`, which may be empty."""
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            yield Pending(text)
        text = self._verified.feed(chunk)
        if text:
            self._text.append(text)
            yield Verified(text)

    def finish(self, response: httpx.Response) -> None:
        """At the verified end. Raises ApplianceError(verified=True) if the stream ended in an error."""
        self.receipt = response.extensions["verified_receipt"]
        if self._verified.error is not None:
            raise refusal(response.status_code, self._verified.error, verified=True)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def response_id(self) -> str:
        return self._verified.response_id

    def _arrived(self, chunk: bytes) -> None:
        text = self._unverified.feed(chunk)
        if text:
            self._waiting.append(text)


class _Common(Generic[Piece]):
    """The answer so far. `receipt` exists when the iteration has ended without an exception."""

    def __init__(self, reader: StreamReader, *, marked: bool) -> None:
        self._reader = reader
        self._marked = marked

    @property
    def text(self) -> str:
        """The verified text so far; the whole answer at the end."""
        return self._reader.text

    @property
    def response_id(self) -> str:
        return self._reader.response_id

    @property
    def receipt(self) -> VerifiedReceipt:
        """Raises RuntimeError before the verified end of the stream."""
        if self._reader.receipt is None:
            raise RuntimeError("the stream has not ended: there is no verified receipt yet")
        return self._reader.receipt

    def _pieces(self, chunk: bytes) -> Iterator[Piece]:
        for piece in self._reader.released(chunk):
            yield cast(Piece, piece if self._marked else piece.text)


class AnswerStream(_Common[Piece]):
    """Iterate once over the pieces of an answer; verified text only, unless pending text was asked for."""

    def __init__(self, http: httpx.Client, request: httpx.Request, reader: StreamReader, *, marked: bool) -> None:
        super().__init__(reader, marked=marked)
        self._http = http
        self._request = request

    def __iter__(self) -> Iterator[Piece]:
        with sdk_errors():
            response = self._http.send(self._request, stream=True)
            try:
                if "verified_receipt" in response.extensions or response.status_code != 200:
                    raise _not_a_stream(response, response.read())
                assert isinstance(response.stream, Iterable)
                for chunk in response.stream:
                    yield from self._pieces(chunk)
            finally:
                response.close()
            self._reader.finish(response)


class AsyncAnswerStream(_Common[Piece]):
    """See AnswerStream."""

    def __init__(self, http: httpx.AsyncClient, request: httpx.Request, reader: StreamReader, *, marked: bool) -> None:
        super().__init__(reader, marked=marked)
        self._http = http
        self._request = request

    async def __aiter__(self) -> AsyncIterator[Piece]:
        with sdk_errors():
            response = await self._http.send(self._request, stream=True)
            try:
                if "verified_receipt" in response.extensions or response.status_code != 200:
                    raise _not_a_stream(response, await response.aread())
                assert isinstance(response.stream, AsyncIterable)
                async for chunk in response.stream:
                    for piece in self._pieces(chunk):
                        yield piece
            finally:
                await response.aclose()
            self._reader.finish(response)


def _not_a_stream(response: httpx.Response, body: bytes) -> ApplianceError | MalformedError:
    if response.status_code == 200:
        return MalformedError(Rejection.MALFORMED_RESPONSE, "a stream was asked for and a whole answer came")
    return refusal(response.status_code, body, verified=response.extensions["verified"])
