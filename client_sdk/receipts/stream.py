"""Verify a stream while it arrives: frames come out only once a signed checkpoint or the receipt covers them.

No I/O: synchronous and asynchronous transports and the offline verification feed the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

from client_sdk import signatures
from client_sdk.appraisal.verifier import AttestationResult
from client_sdk.checks import error_class, shown
from client_sdk.errors import Check, MalformedError, Rejection, VerificationError
from client_sdk.policy.policy import Policy
from client_sdk.receipts.sse import Block, BlockSplitter
from client_sdk.receipts.verify import Exchange, StreamTally, VerifiedReceipt, verify_receipt
from client_sdk.routes import table
from client_sdk.routes.chat import choices_asked
from client_sdk.wire import cose, digests, names
from client_sdk.wire.errors import WireError
from client_sdk.wire.stream import Checkpoint, StreamContext, decode_base64url, next_chain

T = TypeVar("T")

LIMIT_END_FRAMES = 64
"""Frames from the end of an answer on, which are held until its receipt verifies. An honest end has one to a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One SSE event block: `index` from 1, `block` with its blank line, `data` the joined payload of its lines."""

    index: int
    block: bytes
    data: bytes


class StreamVerifier:
    """Feed it bytes as they arrive; it returns frames that are verified, in order, and raises at the first lie.

    The end of the answer (the frames from the last finish reason, usage or error on) is held until the receipt
    verifies. `head` is the exchange as known when the head of the answer has come: no body, no tally, and `received_at`
    is not used yet. `clock` gives Unix seconds. After an error every further call raises that error again.
    """

    def __init__(
        self,
        head: Exchange,
        *,
        attestation: AttestationResult,
        policy: Policy,
        clock: Callable[[], float],
        accept_redacted: bool = False,
    ) -> None:
        self._head = head
        self._attestation = attestation
        self._policy = policy
        self._clock = clock
        self._accept_redacted = accept_redacted
        self._splitter = BlockSplitter()
        self._deltas = table.collector(head.route)
        self._choices = choices_asked(table.read_request(head.route, head.request_body) or {})
        self._finished: set[int] = set()
        self._chain = _Chain(head, attestation)
        self._held: list[Frame] = []  # received, not yet handed out
        self._end_from: int | None = None  # index of the first frame that may be the end of the answer
        self._error_frame = False
        self._receipt: bytes | None = None
        self._done = False
        self._failure: VerificationError | None = None

    @property
    def last_verified(self) -> int:
        """Index of the last frame that a checkpoint or the receipt covers; 0 when none is."""
        return self._chain.verified

    @property
    def pending(self) -> tuple[Frame, ...]:
        """Frames received and not handed out yet; those behind `last_verified` may be lies."""
        return tuple(self._held)

    @property
    def receipt(self) -> bytes | None:
        """The receipt as received, once it has come; `finish` judges it."""
        return self._receipt

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take in bytes, return the blocks that may be handed out now. Raises VerificationError."""
        return self._guarded(lambda: self._feed(chunk))

    def finish(self) -> tuple[list[bytes], VerifiedReceipt]:
        """The stream has ended cleanly: verify its receipt, return the blocks still held, `[DONE]` last if it came.

        An answer that failed after its head verifies too; its receipt's status says so. Raises VerificationError.
        """
        return self._guarded(self._finish)

    def _guarded(self, action: Callable[[], T]) -> T:
        if self._failure is not None:
            raise self._failure
        try:
            return action()
        except WireError as error:
            self._failure = MalformedError.of(error)
        except VerificationError as error:
            self._failure = error
        place = f"{self._failure.message}; last verified frame: {self.last_verified}"
        self._failure.message = place
        self._failure.args = (place,)
        if not self._failure.checks:
            self._failure.checks = (Check(name="stream", status="failed", detail=place),)
        raise self._failure

    def _feed(self, chunk: bytes) -> list[bytes]:
        released: list[bytes] = []
        for block in self._splitter.split(chunk):
            if block.kind == "padding":
                continue
            self._check_order(block)
            if block.kind == "frame":
                self._take_frame(block)
            elif block.kind == "checkpoint":
                self._chain.check(block.content)
                released += self._release()
            elif block.kind == "receipt":
                self._receipt = decode_base64url(block.content, limit_bytes=names.LIMIT_RECEIPT_BYTES)
            else:
                self._done = True
        return released

    def _check_order(self, block: Block) -> None:
        """Nothing but [DONE] follows the receipt, nothing but the receipt follows an error, nothing follows [DONE]."""
        if block.kind == "done" and self._receipt is None:
            _fail(Rejection.RECEIPT_MISSING, "the stream says it is done without a receipt")
        if self._done or (self._receipt is not None and block.kind != "done"):
            _fail(Rejection.STREAM_AFTER_RECEIPT, f"a {block.kind} after the end of the stream")
        if self._error_frame and block.kind == "frame":
            _fail(Rejection.MALFORMED_STREAM, "a frame after an error")

    def _take_frame(self, block: Block) -> None:
        self._chain.add(block.raw)
        index = self._chain.frames
        meaning = self._deltas.add(block.content)
        self._finished |= meaning.finished
        self._error_frame = meaning.error
        if self._end_from is None and (meaning.error or meaning.usage or len(self._finished) >= self._choices):
            self._end_from = index
        if self._end_from is not None and index - self._end_from >= LIMIT_END_FRAMES:
            _fail(Rejection.MALFORMED_STREAM, f"more than {LIMIT_END_FRAMES} frames from the end of the answer on")
        self._held.append(Frame(index=index, block=block.raw, data=block.content))

    def _release(self) -> list[bytes]:
        limit = self.last_verified if self._end_from is None else min(self.last_verified, self._end_from - 1)
        ready = [frame.block for frame in self._held if frame.index <= limit]
        del self._held[: len(ready)]
        return ready

    def _finish(self) -> tuple[list[bytes], VerifiedReceipt]:
        if self._splitter.pending_bytes:
            _fail(Rejection.STREAM_TRUNCATED, "the stream ends inside a block")
        if self._receipt is None:
            _fail(Rejection.STREAM_TRUNCATED, "the stream ends without a receipt")
        self._chain.open_with(self._receipt)
        tally = StreamTally(
            frames=self._chain.frames,
            chain=self._chain.value,
            salt=self._chain.salt,
            checkpoint=self._chain.checkpoint,
            content=self._deltas.content(),
            ended_with_error=self._error_frame,
            done=self._done,
        )
        verified = verify_receipt(
            self._receipt,
            replace(self._head, stream=tally, received_at=self._clock()),
            self._attestation,
            self._policy,
            accept_redacted=self._accept_redacted,
        )
        self._chain.verified = self._chain.frames
        blocks = [frame.block for frame in self._held]
        self._held.clear()
        return ([*blocks, names.DONE_BLOCK] if self._done else blocks), verified


class _Chain:
    """The receiver's own hash chain. It starts when the first checkpoint (or the receipt) discloses the salt."""

    def __init__(self, head: Exchange, attestation: AttestationResult) -> None:
        self._head = head
        self._attestation = attestation
        self._waiting: list[bytes] = []  # frames not chained yet, for want of the salt
        self._context: StreamContext | None = None
        self.salt: bytes | None = None
        self.value: bytes | None = None
        self.frames = 0
        self.verified = 0
        self.checkpoint: tuple[int, bytes] | None = None

    def add(self, frame: bytes) -> None:
        covered = self.verified
        if self.frames >= (covered + names.CHECKPOINT_MAX_FRAMES if covered else 1):
            _fail(Rejection.STREAM_CHECKPOINT_MISSING, f"no checkpoint covers frame {covered + 1}")
        self.frames += 1
        if self.value is None:
            self._waiting.append(frame)
        else:
            self.value = next_chain(self.value, self.frames, frame)

    def check(self, encoded: bytes) -> None:
        """Authenticate a checkpoint comment and hold it against what really arrived."""
        sign1 = cose.parse_sign1(
            decode_base64url(encoded, limit_bytes=names.LIMIT_CHECKPOINT_BYTES),
            typ=names.TYP_CHECKPOINT,
            salted=True,
            limit_bytes=names.LIMIT_CHECKPOINT_BYTES,
        )
        signatures.authenticate(sign1, self._attestation.receipt_key)
        signed = Checkpoint.parse(sign1.payload)
        if sign1.salt is None:
            _fail(Rejection.STREAM_CHECKPOINT_MISMATCH, "a checkpoint came without its salt")
        if self.salt is None:
            self._open(sign1.salt)
        _same(Rejection.STREAM_CHECKPOINT_MISMATCH, "salt of the checkpoint", self.salt, sign1.salt)
        context = self._context
        assert context is not None
        for name in ("cti", "eat_nonce", "attestation", "channel", "request"):
            ours, theirs = getattr(context, name), getattr(signed.context, name)
            _same(Rejection.STREAM_CHECKPOINT_MISMATCH, f"{name} of the checkpoint", ours, theirs)
        _same(Rejection.STREAM_CHECKPOINT_MISMATCH, "frames of the checkpoint", self.frames, signed.index)
        _same(Rejection.STREAM_CHAIN_MISMATCH, "chain of the checkpoint", self.value, signed.chain)
        if self.frames == 0:
            _fail(Rejection.STREAM_CHECKPOINT_MISMATCH, "a checkpoint before the first frame")
        self.verified = self.frames
        self.checkpoint = (signed.index, signed.chain)

    def open_with(self, receipt: bytes) -> None:
        """Start the chain with the receipt's salt where no checkpoint came. A wrong salt yields a wrong chain."""
        if self.salt is None:
            sign1 = cose.parse_sign1(receipt, typ=names.TYP_RECEIPT, salted=True, limit_bytes=names.LIMIT_RECEIPT_BYTES)
            if sign1.salt is not None:
                self._open(sign1.salt)

    def _open(self, salt: bytes) -> None:
        head = self._head
        if head.receipt_id is None or len(head.receipt_id) != names.CTI_BYTES:
            _fail(Rejection.RECEIPT_ID_MISMATCH, "the answer's head names no receipt")
        self._context = StreamContext(
            cti=head.receipt_id,
            eat_nonce=head.nonce,
            attestation=self._attestation.claims_digest,
            channel=self._attestation.binder,
            request=digests.commitment(salt, names.LABEL_REQUEST, head.request_body),
        )
        self.salt = salt
        self.value = self._context.initial_chain(salt)
        for index, frame in enumerate(self._waiting, start=1):
            self.value = next_chain(self.value, index, frame)
        self._waiting.clear()


def _same(code: Rejection, name: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise error_class(code)(code, f"{name} differs", expected=shown(expected), actual=shown(actual))


def _fail(code: Rejection, message: str) -> NoReturn:
    raise error_class(code)(code, message)
