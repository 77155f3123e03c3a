"""The rules both transports apply to what they carry, without I/O: which attestation, which receipt, which verdict."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import httpx

from client_sdk.appraisal.session import AttestationQuestion, AttestationRecord, AttestationSession, check_answer_head
from client_sdk.appraisal.verifier import ChannelFacts
from client_sdk.errors import AuthenticityError, Check, FreshnessError, MalformedError, Rejection, VerificationError
from client_sdk.policy.policy import Policy
from client_sdk.receipts.chain import ChainTracker, Gap
from client_sdk.receipts.stream import StreamVerifier
from client_sdk.receipts.verify import Exchange, VerifiedReceipt, verify_receipt
from client_sdk.system import Surroundings
from client_sdk.tee.evidence import Endorsements
from client_sdk.transport.backend import StreamResponse
from client_sdk.transport.http_rules import Head, Outgoing, RawHeaders, check_origin, prepare, read_head
from client_sdk.transport.tls import Channel
from client_sdk.wire import names
from client_sdk.wire.names import EXPORTER_BYTES, EXPORTER_LABEL, MEDIA_COSE, NONCE_BYTES

RESPONSE_LIMIT_BYTES = 64 << 20
WAITING_LIMIT_BYTES = 64 << 10
_BLOCK_END = b"\n\n"
_RELEASING = (names.COMMENT_CHECKPOINT, names.COMMENT_RECEIPT, names.DONE_BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedAnswer:
    """An answer whose receipt verified, with all that is needed to verify it again.

    `body` is the response as received: the whole body, or the whole stream with its comments when it was kept (None
    when it was not).
    """

    exchange: Exchange
    attestation: AttestationRecord
    receipt: VerifiedReceipt
    body: bytes | None


OnVerified = Callable[[VerifiedAnswer], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A response head on an attested connection, not judged any further yet."""

    outgoing: Outgoing
    head: Head
    record: AttestationRecord
    sent_at: float

    def exchange(self, *, received_at: float, body: bytes | None) -> Exchange:
        return Exchange(
            method=self.outgoing.method,
            route=self.outgoing.route,
            request_body=self.outgoing.body,
            nonce=self.outgoing.nonce,
            http_status=self.head.status,
            media_type=self.head.media_type,
            receipt_id=self.head.receipt_id,
            response_body=body,
            stream=None,
            sent_at=self.sent_at,
            received_at=received_at,
        )


def check_channel_age(policy: Policy, *, verified_at: float, sent_at: float) -> None:
    """Whether a request at `sent_at` may rest on an attestation verified at `verified_at` (Unix seconds).

    Raises FreshnessError ATTESTATION_TOO_OLD.
    """
    if sent_at - verified_at > policy.max_channel_age_s + policy.max_clock_skew_s:
        message = "the connection is older than the policy allows"
        check = Check(name="age of the connection", status="failed", detail=message)
        raise FreshnessError(Rejection.ATTESTATION_TOO_OLD, message, checks=(check,))


class Judge:
    """Everything of a transport that is not I/O. Thread-safe.

    `endorsements` are the caller's own, for evidence that comes without. `on_verified` is told of every verified
    answer, after its verification and before it is handed out; `keep_streams` keeps the bytes of streams for it, up to
    `response_limit_bytes`.
    """

    def __init__(
        self,
        origin: httpx.URL,
        policy: Policy,
        surroundings: Surroundings,
        *,
        endorsements: Endorsements | None = None,
        on_verified: OnVerified | None = None,
        keep_streams: bool = False,
        response_limit_bytes: int = RESPONSE_LIMIT_BYTES,
    ) -> None:
        self.origin = origin
        self.policy = policy
        self.surroundings = surroundings
        self.session = AttestationSession(policy, surroundings, endorsements)
        self.keep_streams = keep_streams
        self.response_limit_bytes = response_limit_bytes
        self._on_verified = on_verified
        self._lock = threading.Lock()
        self._chains = ChainTracker()

    def prepare(self, request: httpx.Request, body: bytes) -> Outgoing:
        """See http_rules.prepare; every attempt draws its own nonce."""
        return prepare(request, body, nonce=self.surroundings.draw(NONCE_BYTES))

    def check_origin(self, request: httpx.Request) -> None:
        check_origin(request.url, self.origin)

    def attested(self, question: AttestationQuestion, answer: StreamResponse, stream: Channel) -> AttestationRecord:
        """Judge the answer to `question` on the connection `stream`. Raises as session.check_answer_head and judge."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}
        check_answer_head(answer.status, headers, answer.body)
        exported = stream.export(EXPORTER_LABEL, EXPORTER_BYTES, question.nonce)
        return self.session.judge(
            question, answer.body, ChannelFacts(spki=stream.spki, exported=exported), stream.suite
        )

    def expired(self, record: object) -> bool:
        """Whether the connection with this attestation is too old to be used for another request."""
        if not isinstance(record, AttestationRecord):
            return True
        # Both clocks: the monotonic one stands still while a machine sleeps, the other one can be set.
        age_s = max(self.surroundings.monotonic() - record.verified_mono, self.surroundings.now() - record.verified_at)
        return age_s > self.policy.max_channel_age_s

    def received(
        self, outgoing: Outgoing, status: int, headers: RawHeaders, record: object, *, sent_at: float
    ) -> Received:
        """Judge a response head. Raises VerificationError."""
        if not isinstance(record, AttestationRecord):
            raise AuthenticityError(Rejection.BINDER_MISSING, "the response came over a connection without attestation")
        check_channel_age(self.policy, verified_at=record.verified_at, sent_at=sent_at)
        head = read_head(outgoing, status, headers)
        return Received(outgoing=outgoing, head=head, record=record, sent_at=sent_at)

    def receipt_answer(self, status: int, media: str, body: bytes) -> bytes | None:
        """The fetched receipt, None while the appliance says that it is pending. Raises RECEIPT_MISSING."""
        if status == 409:
            return None
        if status != 200 or media != MEDIA_COSE:
            raise AuthenticityError(Rejection.RECEIPT_MISSING, f"fetching the receipt answered {status}")
        return body

    def whole(self, received: Received, body: bytes, receipt: bytes) -> VerifiedReceipt:
        """Verify a whole answer. Raises VerificationError."""
        exchange = received.exchange(received_at=self.surroundings.now(), body=body)
        verified = verify_receipt(receipt, exchange, received.record.result, self.policy)
        self.report(VerifiedAnswer(exchange=exchange, attestation=received.record, receipt=verified, body=body))
        return verified

    def report(self, answer: VerifiedAnswer) -> None:
        """Add a verified answer to the chains of receipts, then tell of it. Raises PolicyError on a contradiction."""
        with self._lock:
            self._chains.record(answer.receipt.claims, answer.receipt.digest)
        if self._on_verified is not None:
            self._on_verified(answer)

    def gaps(self) -> tuple[Gap, ...]:
        """Receipts that this transport's chains lack. Other holders of the same API key cause gaps as well."""
        with self._lock:
            return self._chains.gaps()

    def check_chains(self) -> None:
        """At the end, where the policy asks for chains without gaps. Raises PolicyError RECEIPT_CHAIN_GAP."""
        if self.policy.require_gap_free_chain:
            with self._lock:
                self._chains.require_no_gaps()

    def too_large(self) -> MalformedError:
        limit = self.response_limit_bytes
        return MalformedError(Rejection.MALFORMED_RESPONSE, f"the answer exceeds the limit of {limit} bytes")


class StreamJudge:
    """Drives one StreamVerifier for either transport and keeps what a saved answer needs."""

    def __init__(self, judge: Judge, received: Received) -> None:
        self._judge = judge
        self._received = received
        self._kept = bytearray()
        self._waiting = bytearray()
        self._waiting_chunks = 0
        self._at_block_start = True  # whether what has been verified so far ends with a whole block
        self._verifier = StreamVerifier(
            received.exchange(received_at=judge.surroundings.now(), body=None),
            attestation=received.record.result,
            policy=judge.policy,
            clock=judge.surroundings.now,
        )

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The bytes that are verified and may be released now. Raises VerificationError.

        Frames wait here until something comes that can release them: read together they cost a fraction of what they
        cost one by one, between which the model's weights drive everything out of the caches.
        """
        if self._judge.keep_streams:
            if len(self._kept) + len(chunk) > self._judge.response_limit_bytes:
                raise self._judge.too_large()
            self._kept += chunk
        self._waiting += chunk
        self._waiting_chunks += 1
        if not self._may_wait(chunk):
            yield from self._verify()

    def _may_wait(self, chunk: bytes) -> bool:
        """Whether all that waits is whole blocks without a checkpoint, a receipt or an end, and not many of them."""
        return (
            chunk.endswith(_BLOCK_END)
            and self._at_block_start
            and self._waiting_chunks < names.CHECKPOINT_MAX_FRAMES
            and len(self._waiting) <= WAITING_LIMIT_BYTES
            and not any(mark in chunk for mark in _RELEASING)
        )

    def _verify(self) -> Iterator[bytes]:
        """Checkpoint by checkpoint, so that what was verified before a lie in the same chunk is still handed out."""
        waiting = bytes(self._waiting)
        self._waiting.clear()
        self._waiting_chunks = 0
        start = 0
        while start < len(waiting):
            piece = waiting[start : self._release_point(waiting, start)]
            start += len(piece)
            self._at_block_start = piece.endswith(_BLOCK_END)
            released = b"".join(self._verifier.feed(piece))
            if released:
                yield released

    def _release_point(self, waiting: bytes, start: int) -> int:
        """Behind the next block that may release something: a checkpoint, or the rest of a block begun before."""
        mark = waiting.find(names.COMMENT_CHECKPOINT, start) if self._at_block_start else start
        end = waiting.find(_BLOCK_END, mark) if mark >= 0 else -1
        return len(waiting) if end < 0 else end + len(_BLOCK_END)

    def finish(self) -> tuple[bytes, VerifiedReceipt]:
        """At the clean end: what was held back, and the receipt. Raises VerificationError."""
        released = b"".join(self._verify())
        blocks, receipt = self._verifier.finish()
        exchange = self._received.exchange(received_at=self._judge.surroundings.now(), body=None)
        body = bytes(self._kept) if self._judge.keep_streams else None
        self._judge.report(
            VerifiedAnswer(exchange=exchange, attestation=self._received.record, receipt=receipt, body=body)
        )
        return released + b"".join(blocks), receipt

    def broken(self) -> VerificationError:
        """The connection failed before the stream ended. A lie that came before counts more."""
        try:
            for _ in self._verify():
                continue
        except VerificationError as error:
            return error
        last = self._verifier.last_verified
        return AuthenticityError(
            Rejection.STREAM_TRUNCATED, f"the connection broke in mid-stream; the last verified frame is {last}"
        )


def response_extensions(received: Received, core: MutableMapping[str, Any]) -> dict[str, Any]:
    """What the SDK tells about a response, in httpx's own place for such facts."""
    extensions: dict[str, Any] = {key: core[key] for key in ("http_version", "reason_phrase") if key in core}
    return extensions | {"attestation": received.record.result, "record": received.record, "verified": False}
