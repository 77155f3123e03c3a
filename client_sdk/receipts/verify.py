"""Verify a receipt against what was really sent and received: seven numbered steps, written once.

The same function serves live answers, streams (through `streams.StreamVerifier`) and saved files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from client_sdk import signatures
from client_sdk.appraisal.verifier import AttestationResult, Fact
from client_sdk.checks import CheckLog
from client_sdk.errors import Check, Rejection
from client_sdk.policy.policy import Policy
from client_sdk.receipts import comparisons
from client_sdk.receipts.embedding_comparisons import verify_embedding
from client_sdk.routes import table
from client_sdk.routes import tokens as answer_tokens
from client_sdk.routes.chat import AnswerContent
from client_sdk.routes.commitment import commitment
from client_sdk.routes.embeddings import ROUTE_EMBEDDINGS
from client_sdk.tee.evidence import Trust
from client_sdk.wire import cose, digests, names
from client_sdk.wire.receipt import ReceiptClaims

_OTHER_REQUEST = "the answer repeats another request than was sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTally:
    """What was received of a stream, counted and chained by the receiver.

    `chain` and `salt` are None only where neither a checkpoint nor the receipt disclosed a salt; `checkpoint` is the
    last verified one (frames, chain value).
    """

    frames: int
    chain: bytes | None
    salt: bytes | None
    checkpoint: tuple[int, bytes] | None
    content: AnswerContent
    ended_with_error: bool
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its answer as the caller saw them: the side of every comparison that no server can choose.

    `nonce` is the decoded x-inference-nonce sent, `receipt_id` the decoded x-receipt-id received, `media_type` comes
    without parameters. `response_body` is a whole answer, `stream` the tally of a stream; one of them must be there
    when a receipt is verified. Times are Unix seconds.
    """

    method: str
    route: str
    request_body: bytes
    nonce: bytes
    http_status: int
    media_type: str
    receipt_id: bytes | None
    response_body: bytes | None
    stream: StreamTally | None
    sent_at: float
    received_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedReceipt:
    """Proof that a receipt was verified against an exchange; made by `verify_receipt` alone.

    `digest` is what the next receipt of the chain calls `previous`. `opened` is False for a redacted receipt, whose
    commitments could not be compared: it says nothing about the request and the answer at hand.
    """

    claims: ReceiptClaims
    raw: bytes
    digest: bytes
    opened: bool
    checks: tuple[Check, ...]
    facts: tuple[Fact, ...]


def verify_receipt(
    receipt: bytes,
    exchange: Exchange,
    attestation: AttestationResult,
    policy: Policy,
    *,
    accept_redacted: bool = False,
) -> VerifiedReceipt:
    """Verify `receipt` (a tagged COSE_Sign1) for `exchange` under the keys of `attestation` (docs/receipt-format.md).

    `accept_redacted` admits a receipt without its salt, for saved answers only. The checkpoints of a stream disclose
    the same salt, so it is verified as a whole all the same; of a whole answer the request and the response are then
    listed as not checked: nothing ties them to the receipt. Raises VerificationError, its `checks` ending with the
    failed one.
    """
    if (exchange.response_body is None) == (exchange.stream is None):
        raise ValueError("an exchange has either a whole answer or a stream")
    log = CheckLog()
    # (1) decode
    with log.step("receipt well formed"):
        sign1 = cose.parse_sign1(receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    # (2) algorithm
    with log.step("receipt algorithm"):
        signatures.check_algorithm(sign1)
    # (3) signature under the attested key
    with log.step("receipt authentic"):
        signatures.check_signature(sign1, attestation.receipt_key)
    # (4) claims well formed
    with log.step("receipt claims well formed"):
        claims = ReceiptClaims.parse(sign1.payload)
    # (5) digests and parameters equal what we sent and received
    if sign1.salt is None and not accept_redacted:
        log.reject("salt", Rejection.REQUIRED_CLAIM_MISSING, "the salt that opens the receipt's commitments is missing")
    # Whoever redacts a receipt must not thereby switch off checks that can be made: a wrong salt opens nothing.
    salt = exchange.stream.salt if sign1.salt is None and exchange.stream is not None else sign1.salt
    _check_request(log, claims, exchange, salt)
    _check_response(log, claims, exchange, salt)
    _check_answer(log, claims, exchange, salt)
    # (6) model, configuration, device and channel as attested
    _check_attested(log, claims, attestation)
    # (7) policy
    _check_policy(log, claims, exchange, policy)
    return VerifiedReceipt(
        claims=claims,
        raw=receipt,
        digest=digests.receipt_link(cose.redacted(receipt, limit_bytes=names.LIMIT_RECEIPT_BYTES)),
        opened=salt is not None,
        checks=log.checks,
        facts=_facts(claims, attestation),
    )


def _check_request(log: CheckLog, claims: ReceiptClaims, exchange: Exchange, salt: bytes | None) -> None:
    log.equal("inference nonce", Rejection.RECEIPT_NONCE_MISMATCH, expected=exchange.nonce, actual=claims.eat_nonce)
    log.equal("receipt id", Rejection.RECEIPT_ID_MISMATCH, expected=exchange.receipt_id, actual=claims.cti)
    request, sent = claims.request, exchange.request_body
    log.equal("request method", Rejection.REQUEST_MISMATCH, expected=exchange.method, actual=request.method)
    log.equal("request route", Rejection.REQUEST_MISMATCH, expected=exchange.route, actual=request.route)
    if request.complete:
        log.equal("request length", Rejection.REQUEST_MISMATCH, expected=len(sent), actual=request.length)
    else:
        # Refused or cut before all of it was read: what was read must still be what we sent.
        partial = request.length <= len(sent) and claims.response.status != names.STATUS_COMPLETE
        log.require(partial, "request length", Rejection.REQUEST_MISMATCH, "the request was not received as sent")
    commitment(
        log,
        "request body",
        Rejection.REQUEST_MISMATCH,
        salt,
        (names.LABEL_REQUEST, sent[: request.length], request.body),
    )


def _check_response(log: CheckLog, claims: ReceiptClaims, exchange: Exchange, salt: bytes | None) -> None:
    response = claims.response
    log.equal("HTTP status", Rejection.STATUS_MISMATCH, expected=exchange.http_status, actual=response.http_status)
    log.equal("media type", Rejection.RESPONSE_MISMATCH, expected=exchange.media_type, actual=response.media_type)
    comparisons.terminal_status(log, response.status, exchange.http_status, streamed=exchange.stream is not None)
    if exchange.stream is not None:
        _check_stream(log, claims, exchange.stream, salt)
        return
    body = exchange.response_body
    assert body is not None
    log.equal("response length", Rejection.RESPONSE_MISMATCH, expected=len(body), actual=response.length)
    commitment(log, "response body", Rejection.RESPONSE_MISMATCH, salt, (names.LABEL_RESPONSE, body, response.body))


def _check_stream(log: CheckLog, claims: ReceiptClaims, tally: StreamTally, salt: bytes | None) -> None:
    signed = claims.stream
    if signed is None:
        log.reject("stream", Rejection.RESPONSE_MISMATCH, "a stream came, the receipt is for a whole answer")
    if tally.frames < signed.frames:
        log.reject(
            "frames",
            Rejection.STREAM_TRUNCATED,
            "frames are missing",
            expected=str(signed.frames),
            actual=str(tally.frames),
        )
    log.equal("frames", Rejection.STREAM_CHAIN_MISMATCH, expected=signed.frames, actual=tally.frames)
    if signed.checkpoint != tally.checkpoint:
        log.reject("last checkpoint", Rejection.STREAM_CHECKPOINT_MISMATCH, "the receipt names another last checkpoint")
    log.passed("last checkpoint")
    if salt is None or tally.salt is None:
        log.not_checked("stream chain", "the receipt came without its salt")
    else:
        log.equal("stream salt", Rejection.STREAM_CHECKPOINT_MISMATCH, expected=tally.salt, actual=salt)
        log.equal("stream chain", Rejection.STREAM_CHAIN_MISMATCH, expected=signed.chain, actual=tally.chain)
    complete = claims.response.status == names.STATUS_COMPLETE
    log.require(
        tally.ended_with_error != complete,
        "end of the stream",
        Rejection.STATUS_MISMATCH,
        f"the receipt says {claims.response.status}, the last frame says otherwise",
    )
    if complete != tally.done:
        log.reject(
            "[DONE]", Rejection.STREAM_TRUNCATED, "[DONE] belongs at the end of complete streams, and only there"
        )
    log.passed("[DONE]")


def _check_answer(log: CheckLog, claims: ReceiptClaims, exchange: Exchange, salt: bytes | None) -> None:
    """What was asked against what was done, and what was said against what was generated."""
    if claims.prompt is not None and (exchange.route == ROUTE_EMBEDDINGS) != (claims.embedding is not None):
        log.reject("kind of answer", Rejection.PARAMETER_MISMATCH, "the receipt is for another kind than was asked for")
    if claims.embedding is not None:
        verify_embedding(log, claims, exchange.request_body, exchange.response_body or b"", salt)
        return
    if claims.decoding is None or claims.model is None:
        log.not_checked("parameters", "the request was not evaluated")
        log.not_checked("output text", "the request was not evaluated")
        return
    request = table.read_request(exchange.route, exchange.request_body)
    if request is None:
        log.reject("parameters", Rejection.PARAMETER_MISMATCH, "the request is no JSON object with distinct keys")
    log.equal("model asked for", Rejection.MODEL_MISMATCH, expected=request.get("model"), actual=claims.model.name)
    comparisons.streaming(log, request, streamed=exchange.stream is not None)
    comparisons.parameters(log, request, claims.decoding, salt)
    if claims.response.status != names.STATUS_COMPLETE:
        log.not_checked("output text", f"the answer ended with status {claims.response.status}")
        return
    content = exchange.stream.content if exchange.stream is not None else _read_whole(log, exchange)
    comparisons.output(log, claims, content, request, salt)
    if exchange.route in answer_tokens.ROUTES:
        answer_tokens.verify_tokens(log, claims, exchange.route, request, exchange.response_body or b"", salt)
    stated = table.stated(exchange.route, exchange.request_body, claims.decoding)
    if stated is not None:
        log.require(content.stated == stated, "request as repeated", Rejection.PARAMETER_MISMATCH, _OTHER_REQUEST)


def _read_whole(log: CheckLog, exchange: Exchange) -> AnswerContent:
    with log.step("answer well formed"):
        return table.read_answer(exchange.route, exchange.response_body or b"")


def _check_attested(log: CheckLog, claims: ReceiptClaims, attestation: AttestationResult) -> None:
    attested = attestation.claims
    log.equal(
        "attestation",
        Rejection.RECEIPT_ATTESTATION_MISMATCH,
        expected=attestation.claims_digest,
        actual=claims.attestation,
    )
    log.equal("channel", Rejection.RECEIPT_CHANNEL_MISMATCH, expected=attestation.binder, actual=claims.channel)
    log.equal("mode", Rejection.RECEIPT_MODE_MISMATCH, expected=attested.mode, actual=claims.mode)
    log.equal("configuration", Rejection.CONFIG_MISMATCH, expected=attested.config, actual=claims.config)
    if claims.model is None:
        log.not_checked("model identity", "the request reached no model")
    else:
        log.equal(
            "model identity",
            Rejection.MODEL_MISMATCH,
            expected=attested.models.get(claims.model.name),
            actual=claims.model.identity,
        )
    if claims.device.gpu is None:
        log.not_checked("GPU", "the receipt names none")
    else:
        known = any(digest == claims.device.gpu for _, digest in attested.devices)
        log.require(known, "GPU", Rejection.DEVICE_NOT_ALLOWED, "the receipt names a GPU that was not attested")


def _check_policy(log: CheckLog, claims: ReceiptClaims, exchange: Exchange, policy: Policy) -> None:
    if claims.model is None:
        log.not_checked("model accepted", "the request reached no model")
    else:
        pins = policy.models.get(claims.model.name, frozenset())
        if claims.model.identity not in pins:
            log.reject(
                "model accepted",
                Rejection.MODEL_NOT_ALLOWED,
                f"the policy does not accept this model as {claims.model.name}",
                expected=" or ".join(pin.hex() for pin in sorted(pins)) or "a model the policy names",
                actual=claims.model.identity.hex(),
            )
        log.passed("model accepted", claims.model.name)
    if policy.devices is None:
        log.not_checked("device kind", "the policy pins none")
    elif claims.device.kind not in policy.devices:
        log.reject(
            "device kind",
            Rejection.DEVICE_NOT_ALLOWED,
            "the policy does not accept answers from this kind of device",
            expected=" or ".join(sorted(policy.devices)),
            actual=claims.device.kind,
        )
    else:
        log.passed("device kind", claims.device.kind)
    _check_arithmetic(log, claims, policy)
    if claims.response.status == names.STATUS_COMPLETE:
        comparisons.required_claims(log, claims, policy.required_claims)
    comparisons.issued_at(log, claims.iat, (exchange.sent_at, exchange.received_at), skew_s=policy.max_clock_skew_s)


def _check_arithmetic(log: CheckLog, claims: ReceiptClaims, policy: Policy) -> None:
    if policy.arithmetic is None:
        log.not_checked("arithmetic", "the policy pins none")
    elif claims.prompt is None:
        log.not_checked("arithmetic", "the request was not evaluated")
    elif claims.engine.arithmetic not in policy.arithmetic:
        log.reject(
            "arithmetic",
            Rejection.ARITHMETIC_NOT_ALLOWED,
            "the policy does not accept answers computed in this arithmetic",
            expected=" or ".join(sorted(policy.arithmetic)),
            actual=claims.engine.arithmetic or "none stated",
        )
    else:
        log.passed("arithmetic", claims.engine.arithmetic or "")


def _facts(claims: ReceiptClaims, attestation: AttestationResult) -> tuple[Fact, ...]:
    signed: Trust = "key-signed"
    channel: Trust = "holder-asserted" if attestation.holder_asserted else signed
    rows: list[tuple[str, str, Trust]] = [
        ("receipt id", claims.cti.hex(), signed),
        ("mode", claims.mode, signed),
        ("status", f"{claims.response.status}, HTTP {claims.response.http_status}", signed),
        ("issuer", claims.iss, "self-asserted"),
        ("accepted at", str(claims.iat), "self-asserted"),
        ("place in chain", f"{claims.sequence} of {claims.chain.hex()}", signed),
        ("channel", claims.channel.hex() if claims.channel else "none", channel),
        ("configuration", claims.config.hex(), signed),
        ("device", f"{claims.device.kind} {claims.device.digest.hex()}", signed),
        ("engine", f"{claims.engine.name} {claims.engine.version} {claims.engine.digest.hex()}", signed),
    ]
    if claims.engine.arithmetic is not None:
        rows.append(("arithmetic", claims.engine.arithmetic, signed))
    if claims.engine.kernels is not None:
        rows.append(("kernels", claims.engine.kernels, signed))
    if claims.model is not None:
        rows.append(("model", f"{claims.model.name} {claims.model.identity.hex()}", signed))
    if claims.prompt is not None:
        rows.append(("prompt tokens", str(claims.prompt.count), signed))
    if claims.embedding is not None:
        made = claims.embedding
        size = f"{made.inputs} of {made.dimensions} dimensions (the model has {made.native})"
        rows += [("vectors", size, signed), ("pooling", made.pooling, signed)]
    rows += [(f"output {i}", f"{c.count} tokens, {c.finish}", signed) for i, c in enumerate(claims.output or ())]
    rows += [(f"decoding {key}", _plain(value), signed) for key, value in sorted((claims.decoding or {}).items())]
    rows += [(f"execution {key}", _plain(value), signed) for key, value in sorted(_execution(claims).items())]
    return tuple(Fact(name=name, value=value, trust=trust) for name, value, trust in rows)


def _execution(claims: ReceiptClaims) -> Mapping[str, object]:
    return claims.execution or {}


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else "none" if value is None else str(value)
