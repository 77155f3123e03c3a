"""The routes. Each does one thing; what a route does before its body is read decides whether there is a receipt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from appliance.api import openapi
from appliance.api.http_exchange import HttpExchange
from appliance.api.routes import DIALECTS
from appliance.attestation.responder import Responder
from appliance.errors import (
    ApplianceError,
    BadRequest,
    InternalError,
    MethodNotAllowed,
    NotFound,
    TooLarge,
    Unauthorized,
)
from appliance.inference.embedding import VectorDialect
from appliance.inference.request import Dialect
from appliance.inference.service import Service
from appliance.keys import KeyRing
from appliance.listener.connection import ChannelState
from appliance.receipts.issuer import ChainScope
from client_sdk.wire import cose, names
from client_sdk.wire.attestation import AttestationRequest
from client_sdk.wire.errors import WireError
from client_sdk.wire.stream import encode_base64url

_NO_STORE = {"cache-control": "no-store"}


class Gate:
    """Who may do what. Without configured keys everybody may infer, and receipts belong to the connection."""

    def __init__(self, ring: KeyRing | None, clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._scopes: dict[str, ChainScope] = {}

    def enter(self, request: Request, scope: str) -> ChainScope:
        """The chain of receipts this caller's answers belong to. Raises Unauthorized, Forbidden."""
        if self._ring is None:
            channel: ChannelState = request.scope["state"]["channel"]
            if not isinstance(channel.chain_scope, ChainScope):
                channel.chain_scope = ChainScope(None)
            return channel.chain_scope
        key_id = self._ring.authenticate(request.headers.get("authorization"), scope, self._clock()).key_id
        return self._scopes.setdefault(key_id, ChainScope(key_id))

    @property
    def has_keys(self) -> bool:
        return self._ring is not None


class InferenceAnswer(Response):
    """Hands the raw ASGI exchange to the service, whose bytes must reach the transport exactly as committed to."""

    def __init__(
        self,
        service: Service,
        dialect: Dialect | VectorDialect,
        *,
        chain_scope: ChainScope,
        max_body_bytes: int,
    ) -> None:
        super().__init__()
        self._service = service
        self._dialect = dialect
        self._chain_scope = chain_scope
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(
            scope, receive, send, chain_scope=self._chain_scope, max_body_bytes=self._max_body_bytes
        )
        try:
            await self._service.respond(exchange, self._dialect)
        finally:
            exchange.close()


def build_app(
    *,
    service: Service,
    responder: Responder,
    ring: KeyRing | None,
    clock: Callable[[], float],
    max_body_bytes: int,
) -> FastAPI:
    """The application of the attested listener. `clock` is Unix seconds."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    gate = Gate(ring, clock)
    _add_errors(app, service)
    _add_inference(app, service, gate, max_body_bytes)
    _add_attestation(app, service, responder, gate)
    _add_operations(app, service, gate)
    return app


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApplianceError)
    async def appliance_error(_request: Request, error: ApplianceError) -> Response:
        if isinstance(error, Unauthorized):
            service.metrics.unauthorized.inc()
        headers = dict(_NO_STORE)
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        if isinstance(error, Unauthorized):
            headers["www-authenticate"] = "Bearer"
        return Response(error.body(), status_code=error.status, media_type=names.MEDIA_JSON, headers=headers)

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """Unknown routes and methods: OpenAI's error shape, no receipt."""
        if error.status_code == 405:
            answer = await appliance_error(
                request, MethodNotAllowed("method_not_allowed", "This route does not take that method.")
            )
            answer.headers.update(error.headers or {})  # Allow, which belongs to every 405 (RFC 9110, 15.5.6)
            return answer
        return await appliance_error(request, NotFound("route_not_found", "There is no such route here."))

    @app.exception_handler(Exception)
    async def fault(request: Request, _error: Exception) -> Response:
        """A fault of ours, in the bytes that the receipt of an inference request commits to."""
        return await appliance_error(request, InternalError())


def _add_inference(app: FastAPI, service: Service, gate: Gate, max_body_bytes: int) -> None:
    def route(dialect: Callable[[], Dialect | VectorDialect]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            chain_scope = gate.enter(request, "inference")
            return InferenceAnswer(service, dialect(), chain_scope=chain_scope, max_body_bytes=max_body_bytes)

        return answer

    for path, dialect in DIALECTS.items():
        app.add_api_route(path, route(dialect), methods=["POST"])

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        gate.enter(request, "inference")
        listed = [
            {"id": model.name, "object": "model", "created": model.created, "owned_by": "attested-inference"}
            for model in service.models.values()
        ]
        return JSONResponse({"object": "list", "data": listed}, headers=_NO_STORE)


def _add_attestation(app: FastAPI, service: Service, responder: Responder, gate: Gate) -> None:
    @app.post(names.PATH_ATTESTATION)
    async def attest(request: Request) -> Response:
        body = await _small_body(request, names.LIMIT_ATTESTATION_REQUEST_BYTES)
        try:
            asked = AttestationRequest.parse(body)
        except WireError as error:
            raise BadRequest(error.code.lower(), error.detail) from None
        bundle = await responder.answer(asked, request.scope["state"]["channel"])
        service.metrics.attestations.labels("continued" if bundle.continued else "full").inc()
        return Response(bundle.encode(), media_type=names.MEDIA_CBOR, headers=_NO_STORE)

    @app.get(names.PATH_ATTESTATION_JSON)
    async def show(request: Request) -> Response:
        gate.enter(request, "inference")
        nonce = _query_nonce(request)
        bundle = await responder.show(nonce, request.scope["state"]["channel"])
        service.metrics.attestations.labels("shown").inc()
        document = {
            "claims": _text(bundle.claims or b""),
            "evidence": [[item.kind, _text(item.content)] for item in bundle.evidence],
            "channel-proof": _text(bundle.channel_proof),
            "endorsements": [[item.kind, _text(item.content)] for item in bundle.endorsements],
            "event-logs": [[item.kind, _text(item.content)] for item in bundle.event_logs],
        }
        return JSONResponse(document, headers=_NO_STORE)


def _add_operations(app: FastAPI, service: Service, gate: Gate) -> None:
    @app.get(names.PATH_RECEIPTS + "{identifier}")
    async def receipt(request: Request, identifier: str) -> Response:
        chain_scope = gate.enter(request, "receipts")
        cti = _hex(names.receipt_part(identifier), names.CTI_BYTES)
        if cti is None:
            raise NotFound("receipt_not_found", "A receipt id has 32 hex digits.")
        query = request.url.query
        if query not in ("", "redact=1"):
            # A misspelt "redact" must not hand out the salt.
            raise BadRequest("query_not_supported", "This route takes ?redact=1 or no query.", param="redact")
        found = service.issuer.store.get(cti, chain_scope.store_key)
        if query:
            found = cose.redacted(found, limit_bytes=names.LIMIT_RECEIPT_BYTES)
        return Response(found, media_type=names.MEDIA_COSE, headers=_NO_STORE)

    @app.get(openapi.PATH)
    async def description() -> Response:
        return Response(openapi.document_bytes(), media_type=names.MEDIA_JSON, headers=_NO_STORE)

    @app.get("/healthz")
    async def healthz() -> Response:
        return PlainTextResponse("alive\n", headers=_NO_STORE)

    @app.get("/readyz")
    async def readyz() -> Response:
        ready = service.ready
        return PlainTextResponse(
            "ready\n" if ready else "not ready\n", status_code=200 if ready else 503, headers=_NO_STORE
        )

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if not gate.has_keys:
            raise NotFound("route_not_found", "There is no such route here.")
        gate.enter(request, "metrics")
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4", headers=_NO_STORE)


def build_metrics_app(service: Service) -> FastAPI:
    """The application of the separate metrics listener: /metrics and nothing else."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_errors(app, service)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4", headers=_NO_STORE)

    return app


async def _small_body(request: Request, limit_bytes: int) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise TooLarge("body_too_large", f"The request body exceeds {limit_bytes} bytes.")
    return body


def _query_nonce(request: Request) -> bytes:
    values = request.query_params.getlist("nonce")
    nonce = _hex(values[0], names.NONCE_BYTES) if len(values) == 1 else None
    if nonce is None or not any(nonce):
        raise BadRequest("invalid_nonce", "The query needs nonce= with 64 hex digits, not all zero.", param="nonce")
    return nonce


def _hex(text: str, size: int) -> bytes | None:
    """Exactly `size` bytes in lower- or upper-case hex, or None. `bytes.fromhex` alone would take spaces."""
    if len(text) != 2 * size or not text.isascii() or not text.isalnum():
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def _text(content: bytes) -> str:
    return encode_base64url(content).decode()
