"""What really left for one client: request bytes in, body or frames out, and the commitments over both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client_sdk.wire import cbor, digests, names
from client_sdk.wire.receipt import OutputFacts, PromptFacts, RequestFacts, StreamFacts
from client_sdk.wire.stream import Checkpoint, StreamContext, next_chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Who and what one answer is tied to. `attestation` and `channel` are null where no attestation is in force."""

    cti: bytes
    salt: bytes
    iat: int
    eat_nonce: bytes | None
    attestation: bytes | None
    channel: bytes | None

    def commit(self, label: str, data: bytes) -> bytes:
        return digests.commitment(self.salt, label, data)


def request_facts(subject: Subject, *, method: str, route: str, body: bytes, complete: bool) -> RequestFacts:
    """Facts of the request: `body` is every byte received after transfer decoding, all of them or not."""
    return RequestFacts(
        method=method,
        route=route,
        length=len(body),
        complete=complete,
        body=subject.commit(names.LABEL_REQUEST, body),
    )


def prompt_facts(subject: Subject, prompts: Sequence[tuple[str, bytes]]) -> PromptFacts:
    """`prompts` are (text, token ids as u32 little-endian): one prompt as it is, several as arrays of what they are."""
    if len(prompts) == 1:
        text, tokens = prompts[0][0].encode(), prompts[0][1]
    else:
        text, tokens = (cbor.encode(column) for column in zip(*prompts, strict=True))
    return PromptFacts(
        text=subject.commit(names.LABEL_PROMPT_TEXT, text),
        tokens=subject.commit(names.LABEL_PROMPT_TOKENS, tokens),
        count=sum(len(token_ids) // 4 for _, token_ids in prompts),
    )


class OutputTranscript:
    """Text and tokens of one choice as they were generated. `token_ids` is u32 little-endian."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tokens = bytearray()
        self.finish: str | None = None

    def add(self, text: str, token_ids: bytes) -> None:
        if text:
            self._text.append(text)
        self._tokens += token_ids

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def count(self) -> int:
        return len(self._tokens) // 4

    def facts(self, subject: Subject, choice: int) -> OutputFacts:
        return OutputFacts(
            text=subject.commit(names.label_output_text(choice), self.text.encode()),
            tokens=subject.commit(names.label_output_tokens(choice), bytes(self._tokens)),
            count=self.count,
            finish=self.finish,
        )


class StreamTranscript:
    """The hash chain over the frames of one stream, and when its next checkpoint is due.

    `clock` is monotonic seconds.
    """

    def __init__(self, subject: Subject, request_commitment: bytes, *, clock: Callable[[], float]) -> None:
        self._context = StreamContext(
            cti=subject.cti,
            eat_nonce=subject.eat_nonce,
            attestation=subject.attestation,
            channel=subject.channel,
            request=request_commitment,
        )
        self._clock = clock
        self._chain = self._context.initial_chain(subject.salt)
        self._frames = 0
        self._unchained: list[bytes] = []
        self._checkpoint: tuple[int, bytes] | None = None
        self._uncovered_since: float | None = None

    def add_frame(self, frame: bytes) -> None:
        """Account for one SSE event block, handed to the transport in this moment, its blank line included."""
        self._frames += 1
        self._unchained.append(frame)
        if self._uncovered_since is None:
            self._uncovered_since = self._clock()

    def _settle(self) -> bytes:
        """The chain value after all frames so far. They are hashed together, when somebody asks: one by one, each
        would find the caches emptied by the model's weights."""
        first = self._frames - len(self._unchained) + 1
        for index, frame in enumerate(self._unchained, start=first):
            self._chain = next_chain(self._chain, index, frame)
        self._unchained.clear()
        return self._chain

    @property
    def checkpoint_due(self) -> bool:
        """After frame 1, then at least every 16 frames or half a second after a frame not yet covered."""
        wait_s = self.checkpoint_wait_s
        return wait_s is not None and wait_s <= 0

    @property
    def checkpoint_wait_s(self) -> float | None:
        """Seconds until a checkpoint is due; None when every frame is covered."""
        if self._uncovered_since is None:
            return None
        covered = self._checkpoint[0] if self._checkpoint else 0
        if self._checkpoint is None or self._frames - covered >= names.CHECKPOINT_MAX_FRAMES:
            return 0.0
        return self._uncovered_since + names.CHECKPOINT_MAX_DELAY_S - self._clock()

    def take_checkpoint(self) -> Checkpoint:
        """The payload that covers all frames so far; from now on they count as covered."""
        chain = self._settle()
        self._checkpoint = (self._frames, chain)
        self._uncovered_since = None
        return Checkpoint(context=self._context, index=self._frames, chain=chain)

    def facts(self) -> StreamFacts:
        return StreamFacts(frames=self._frames, chain=self._settle(), checkpoint=self._checkpoint)
