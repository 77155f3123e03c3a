"""Which reader reads the answers of which route, and what a request means in the terms that receipts speak in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from client_sdk.routes import tokens
from client_sdk.routes.chat import AnswerContent, DeltaCollector, FrameMeaning, load_request, read_whole
from client_sdk.routes.responses import ROUTE_RESPONSES, ResponseCollector, read_response
from client_sdk.wire import responses


class Collector(Protocol):
    """Takes the frames of one stream in order. Raises MalformedError MALFORMED_STREAM."""

    def add(self, data: bytes) -> FrameMeaning: ...
    def content(self) -> AnswerContent: ...


def collector(route: str) -> Collector:
    return ResponseCollector() if route == ROUTE_RESPONSES else DeltaCollector(route)


def read_answer(route: str, body: bytes) -> AnswerContent:
    """A successful whole answer. Raises MalformedError MALFORMED_RESPONSE."""
    if route in tokens.ROUTES:
        return tokens.read_tokens(route, body)
    return read_response(body) if route == ROUTE_RESPONSES else read_whole(route, body)


def stated(route: str, body: bytes, decoding: Mapping[str, object]) -> Mapping[str, object] | None:
    """What an answer has to repeat of its request, None where answers of this route repeat nothing."""
    request = load_request(body) if route == ROUTE_RESPONSES else None
    if request is None:
        return None
    return {**responses.stated(request), "temperature": decoding["temperature"], "top_p": decoding["top_p"]}


def read_request(route: str, body: bytes) -> dict[str, object] | None:
    """The request as receipts speak of it, None if it is no JSON object with distinct keys."""
    request = load_request(body)
    if request is not None and route == ROUTE_RESPONSES:
        return responses.chat_form(request)
    return tokens.request_as_prompt(request) if request is not None and route in tokens.ROUTES else request
