"""A whole appliance of the insecure family in memory: keys, bundles, answers, streams, receipts. No sockets.

Everything it makes is valid. A test overrides exactly one property: the claims through an `edit_*` function that gets
the honest value and returns the one to use, keys and salts through `Keys` and `Options`, blocks of a stream by
rearranging the list. Randomness is drawn from a seed, the clock is a number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from client_sdk.appraisal.verifier import ChannelFacts
from client_sdk.receipts.verify import Exchange
from client_sdk.tee.insecure import abi
from client_sdk.wire import cbor, cose, digests, names
from client_sdk.wire.attestation import AttestationBundle, AttestationClaims, ChannelProof, EvidenceItem
from client_sdk.wire.receipt import (
    DeviceFacts,
    EngineFacts,
    ModelFacts,
    OutputFacts,
    PromptFacts,
    ReceiptClaims,
    RequestFacts,
    ResponseFacts,
    StreamFacts,
)
from client_sdk.wire.stream import Checkpoint, StreamContext, comment, next_chain

T = TypeVar("T")
Edit = Callable[[T], T]
MODEL = "smollm2-135m-instruct"
NOW = 1_790_000_000.0
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def same(value: T) -> T:
    return value


def seeded(label: str, size: int = 32) -> bytes:
    """`size` reproducible bytes that look random."""
    return hashlib.shake_256(label.encode()).digest(size)


class SigningKey:
    """An Ed25519 key with its COSE form. `kid` may be set to lie about itself."""

    def __init__(self, label: str) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seeded(label))
        self.public = self._private.public_key().public_bytes_raw()
        self.cose_key = cose.okp_key(self.public, curve=names.CURVE_ED25519)
        self.kid = cose.key_id(self.cose_key)

    def sign(self, data: bytes) -> bytes:
        return self._private.sign(data)

    def sign1(
        self, payload: bytes, *, typ: str, salt: bytes | None = None, protected: Mapping[int, object] | None = None
    ) -> bytes:
        """A COSE_Sign1; `protected` replaces single entries of its protected header."""
        header = {names.HEADER_ALG: names.ALG_EDDSA, names.HEADER_KID: self.kid, names.HEADER_TYP: typ}
        encoded = cbor.encode({**header, **(protected or {})})
        return cose.sign1(protected=encoded, salt=salt, payload=payload, sign=self.sign)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A TLS connection as both ends see it, and the attestation in force on it."""

    channel: ChannelFacts
    attestation: bytes | None = None
    binder: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What went over the wire for one whole answer; `exchange` is how an honest client records it."""

    exchange: Exchange
    receipt: bytes
    claims: ReceiptClaims

    @property
    def body(self) -> bytes:
        assert self.exchange.response_body is not None
        return self.exchange.response_body


@dataclass(frozen=True, kw_only=True)
class StreamBlock:
    kind: str
    raw: bytes


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A stream as blocks (frame, checkpoint, receipt, done, padding); `head` is the exchange before any byte of it."""

    head: Exchange
    blocks: tuple[StreamBlock, ...]
    claims: ReceiptClaims

    @property
    def raw(self) -> bytes:
        return b"".join(block.raw for block in self.blocks)

    @property
    def receipt_comment(self) -> bytes:
        return next(block.raw for block in self.blocks if block.kind == "receipt")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One property of one answer, overridden. The defaults are the honest ones."""

    text: str = "Four."
    prompt: str = "What is two plus two?"
    finish: str = "stop"
    status: str = names.STATUS_COMPLETE
    http_status: int = 200
    error_body: bytes | None = None
    salted: bool = True
    salt: bytes | None = None
    signer: SigningKey | None = None
    typ: str = names.TYP_RECEIPT
    protected: Mapping[int, object] = field(default_factory=dict)
    edit_claims: Edit[ReceiptClaims] = same
    edit_payload: Edit[bytes] = same
    edit_body: Edit[dict[str, Any]] = same
    # streams
    pieces: tuple[str, ...] = ("Fo", "ur", ".")
    include_usage: bool = True
    frames_after_finish: int = 0
    checkpoint_every: int = 16
    fail_after: int | None = None
    edit_checkpoint: Edit[Checkpoint] = same
    checkpoint_salt: bytes | None = None
    checkpoint_signer: SigningKey | None = None


class InsecureAppliance:
    """One boot of an appliance: its own keys, its own chain of receipts."""

    def __init__(self, label: str = "appliance", *, model: str = MODEL, mode: str = names.MODE_INSECURE) -> None:
        self.label = label
        self.now = NOW
        self.mode = mode
        self.receipt_key = SigningKey(f"{label} receipt")
        self.channel_key = SigningKey(f"{label} channel")
        self.evidence_key = SigningKey(f"{label} evidence")
        self.tls_private = ec.derive_private_key(int.from_bytes(seeded(f"{label} tls", 31), "big"), ec.SECP256R1())
        self.spki = self.tls_private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.config = digests.config_digest({"threads": "auto"})
        self.model = ModelFacts(
            name=model,
            identity=seeded(f"{model} identity"),
            weights=((98_362_432, seeded(f"{model} weights")),),
            tokenizer=seeded(f"{model} tokenizer"),
            chat_template=seeded(f"{model} template"),
            format="gguf",
        )
        self.instance = seeded(f"{label} instance", 16)
        self.chain = seeded(f"{label} chain", 16)
        self._sequence = 0
        self._previous: bytes | None = None
        self._drawn = 0

    def draw(self, size: int) -> bytes:
        self._drawn += 1
        return seeded(f"{self.label} draw {self._drawn}", size)

    # --- attestation -------------------------------------------------------------------------------------------------

    def connect(self, label: str = "connection") -> Connection:
        """A connection before its attestation. The exporter's output would depend on the nonce; here on the label."""
        return Connection(channel=ChannelFacts(spki=self.spki, exported=seeded(f"{label} exported")))

    def claims(self, nonce: bytes, connection: Connection) -> AttestationClaims:
        channel = connection.channel
        return AttestationClaims(
            nonce=nonce,
            binder=digests.channel_binder(channel.spki, channel.exported),
            tls_key=digests.sha256(channel.spki),
            receipt_key=self.receipt_key.cose_key,
            channel_key=self.channel_key.cose_key,
            config=self.config,
            models={self.model.name: self.model.identity},
            mode=self.mode,
            instance=self.instance,
            issued_at=int(self.now),
        )

    def bundle(
        self,
        nonce: bytes,
        connection: Connection,
        *,
        edit_claims: Edit[AttestationClaims] = same,
        edit_proof: Edit[ChannelProof] = same,
        edit_report: Edit[bytes] = same,
        edit_items: Edit[tuple[EvidenceItem, ...]] = same,
    ) -> bytes:
        """A full bundle. What follows from the claims (report data, proof) follows from the edited ones."""
        claims = edit_claims(self.claims(nonce, connection)).encode()
        report = edit_report(digests.report_data(claims))
        evidence = self.evidence_key.sign1(report, typ=names.TYP_INSECURE_EVIDENCE)
        item = EvidenceItem(kind=abi.KIND, content=abi.encode_item(self.evidence_key.cose_key, evidence))
        return AttestationBundle(
            channel_proof=self.channel_proof(nonce, connection, digests.sha256(claims), edit_proof),
            claims=claims,
            evidence=edit_items((item,)),
        ).encode()

    def continued(
        self, nonce: bytes, connection: Connection, have: bytes, *, edit_proof: Edit[ChannelProof] = same
    ) -> bytes:
        return AttestationBundle(channel_proof=self.channel_proof(nonce, connection, have, edit_proof)).encode()

    def channel_proof(
        self, nonce: bytes, connection: Connection, claims_digest: bytes, edit: Edit[ChannelProof] = same
    ) -> bytes:
        channel = connection.channel
        binder = digests.channel_binder(channel.spki, channel.exported)
        proof = edit(ChannelProof(nonce=nonce, binder=binder, claims=claims_digest))
        return self.channel_key.sign1(proof.encode(), typ=names.TYP_CHANNEL_PROOF)

    def attested(self, nonce: bytes, connection: Connection) -> Connection:
        """The connection once `bundle(nonce, connection)` has been answered on it."""
        claims = self.claims(nonce, connection)
        return replace(connection, attestation=digests.sha256(claims.encode()), binder=claims.binder)

    # --- answers -----------------------------------------------------------------------------------------------------

    def answer(
        self,
        request: Mapping[str, Any],
        connection: Connection,
        *,
        route: str = CHAT,
        nonce: bytes | None = None,
        options: Options | None = None,
    ) -> Answer:
        """A whole answer to `request` (its JSON), with its receipt."""
        o = options or Options()
        head = self._head(json.dumps(request).encode(), route, nonce, o, names.MEDIA_JSON)
        salt = o.salt or self.draw(names.SALT_BYTES)
        evaluated = o.status not in (names.STATUS_REFUSED,) and o.error_body is None
        body = o.error_body if o.error_body is not None else self._whole_body(head, o)
        claims = self._claims(head, connection, salt, o, request if evaluated else None)
        claims = replace(
            claims,
            response=replace(
                claims.response,
                length=len(body),
                body=digests.commitment(salt, names.LABEL_RESPONSE, body),
            ),
        )
        claims = o.edit_claims(claims)
        return Answer(exchange=replace(head, response_body=body), receipt=self.seal(claims, salt, o), claims=claims)

    def refusal(self, request: Mapping[str, Any], connection: Connection, *, http_status: int = 400) -> Answer:
        options = Options(
            status=names.STATUS_REFUSED,
            http_status=http_status,
            error_body=b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":"refused"}}',
        )
        return self.answer(request, connection, options=options)

    def stream(
        self,
        request: Mapping[str, Any],
        connection: Connection,
        *,
        route: str = CHAT,
        nonce: bytes | None = None,
        options: Options | None = None,
    ) -> Stream:
        """A stream answering `request` (which must ask for one), block by block."""
        o = options or Options()
        head = self._head(json.dumps(request).encode(), route, nonce, o, names.MEDIA_EVENT_STREAM)
        assert head.receipt_id is not None
        salt = o.salt or self.draw(names.SALT_BYTES)
        context = StreamContext(
            cti=head.receipt_id,
            eat_nonce=head.nonce,
            attestation=connection.attestation,
            channel=connection.binder,
            request=digests.commitment(salt, names.LABEL_REQUEST, head.request_body),
        )
        chain, last, blocks = context.initial_chain(salt), None, []
        frames = self._frames(head, o)
        for index, frame in enumerate(frames, start=1):
            chain = next_chain(chain, index, frame)
            blocks.append(StreamBlock(kind="frame", raw=frame))
            if index == 1 or index - (last[0] if last else 0) >= o.checkpoint_every:
                last = (index, chain)
                blocks.append(self._checkpoint(Checkpoint(context=context, index=index, chain=chain), salt, o))
                blocks.append(StreamBlock(kind="padding", raw=names.COMMENT_PADDING + b"AAAA\n\n"))
        claims = replace(
            self._claims(head, connection, salt, o, request),
            stream=StreamFacts(frames=len(frames), chain=chain, checkpoint=last),
        )
        claims = o.edit_claims(claims)
        receipt = comment(names.COMMENT_RECEIPT, self.seal(claims, salt, o))
        blocks.append(StreamBlock(kind="receipt", raw=receipt))
        if o.fail_after is None:
            blocks.append(StreamBlock(kind="done", raw=names.DONE_BLOCK))
        return Stream(head=head, blocks=tuple(blocks), claims=claims)

    def seal(self, claims: ReceiptClaims, salt: bytes, options: Options | None = None) -> bytes:
        """Sign claims as a receipt, the next of this boot's chain."""
        o = options or Options()
        receipt = (o.signer or self.receipt_key).sign1(
            o.edit_payload(claims.encode()), typ=o.typ, salt=salt if o.salted else None, protected=o.protected
        )
        redacted = cose.redacted(receipt, limit_bytes=names.LIMIT_RECEIPT_BYTES)
        self._sequence, self._previous = self._sequence + 1, digests.receipt_link(redacted)
        return receipt

    def _head(self, body: bytes, route: str, nonce: bytes | None, o: Options, media_type: str) -> Exchange:
        return Exchange(
            method="POST",
            route=route,
            request_body=body,
            nonce=nonce or self.draw(32),
            http_status=o.http_status,
            media_type=media_type,
            receipt_id=self.draw(names.CTI_BYTES),
            response_body=None,
            stream=None,
            sent_at=self.now,
            received_at=self.now + 1,
        )

    def _claims(
        self, head: Exchange, connection: Connection, salt: bytes, o: Options, request: Mapping[str, Any] | None
    ) -> ReceiptClaims:
        """Claims without the commitment to a whole body. `request` None: nothing was evaluated."""
        assert head.receipt_id is not None
        text = "".join(o.pieces[: o.fail_after]) if head.media_type == names.MEDIA_EVENT_STREAM else o.text
        claims = ReceiptClaims(
            iss="simulated appliance",
            iat=int(head.sent_at),
            cti=head.receipt_id,
            eat_nonce=head.nonce,
            chain=self.chain,
            sequence=self._sequence,
            previous=self._previous,
            mode=self.mode,
            attestation=connection.attestation,
            channel=connection.binder,
            config=self.config,
            device=DeviceFacts(kind="cpu", digest=seeded("device")),
            engine=EngineFacts(
                name="simulated", version="1", digest=seeded("engine"), arithmetic="attested-1", kernels="avx2"
            ),
            request=RequestFacts(
                method=head.method,
                route=head.route,
                length=len(head.request_body),
                complete=True,
                body=digests.commitment(salt, names.LABEL_REQUEST, head.request_body),
            ),
            response=ResponseFacts(
                status=o.status, http_status=o.http_status, media_type=head.media_type, length=None, body=None
            ),
        )
        if request is None:
            return claims
        output = OutputFacts(
            text=digests.commitment(salt, names.label_output_text(0), text.encode()),
            tokens=digests.commitment(salt, names.label_output_tokens(0), _tokens(text)),
            count=len(_tokens(text)) // 4,
            finish=o.finish if o.status == names.STATUS_COMPLETE else None,
        )
        return replace(
            claims,
            model=self.model,
            prompt=PromptFacts(
                text=digests.commitment(salt, names.LABEL_PROMPT_TEXT, o.prompt.encode()),
                tokens=digests.commitment(salt, names.LABEL_PROMPT_TOKENS, _tokens(o.prompt)),
                count=len(_tokens(o.prompt)) // 4,
            ),
            decoding=_decoding(request, salt),
            output=(output,),
            execution={"cached-prompt-tokens": 0, "batching": "none", "threads": 2},
        )

    def _whole_body(self, head: Exchange, o: Options) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": o.finish}
        if head.route == CHAT:
            choice["message"] = {"role": "assistant", "content": o.text}
        else:
            choice["text"] = o.text
        body = self._envelope(head, [choice])
        body["usage"] = _usage(o, o.text)
        return json.dumps(o.edit_body(body)).encode()

    def _frames(self, head: Exchange, o: Options) -> Sequence[bytes]:
        pieces = o.pieces[: o.fail_after]
        events = [self._envelope(head, [_delta(head.route, piece, None)]) for piece in pieces]
        if o.fail_after is not None:
            error = {"message": "the engine stopped", "type": "server_error", "param": None, "code": "engine_failed"}
            events.append({"error": error})
        else:
            events.append(self._envelope(head, [_delta(head.route, "", o.finish)]))
            events += [self._envelope(head, [])] * o.frames_after_finish
            if o.include_usage:
                events.append({**self._envelope(head, []), "usage": _usage(o, "".join(pieces))})
        return [b"data: " + json.dumps(o.edit_body(event)).encode() + b"\n\n" for event in events]

    def _envelope(self, head: Exchange, choices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        assert head.receipt_id is not None
        prefix = "chatcmpl-" if head.route == CHAT else "cmpl-"
        return {"id": prefix + head.receipt_id.hex(), "model": self.model.name, "choices": list(choices)}

    def _checkpoint(self, honest: Checkpoint, salt: bytes, o: Options) -> StreamBlock:
        signer = o.checkpoint_signer or self.receipt_key
        payload = o.edit_checkpoint(honest).encode()
        signed = signer.sign1(payload, typ=names.TYP_CHECKPOINT, salt=o.checkpoint_salt or salt)
        return StreamBlock(kind="checkpoint", raw=comment(names.COMMENT_CHECKPOINT, signed))


def chat_request(**fields: Any) -> dict[str, Any]:
    """A chat request in JSON terms; `fields` add parameters."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "What is two plus two?"}], **fields}


def completion_request(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Two plus two is", **fields}


def _delta(route: str, piece: str, finish: str | None) -> dict[str, Any]:
    if route == CHAT:
        return {"index": 0, "delta": {"content": piece}, "finish_reason": finish}
    return {"index": 0, "text": piece, "finish_reason": finish}


def _decoding(request: Mapping[str, Any], salt: bytes) -> dict[str, object]:
    request = {key: value for key, value in request.items() if value is not None}
    stop = request.get("stop") or None
    limit = request.get("max_completion_tokens", request.get("max_tokens"))
    biases = {int(token): float(bias) for token, bias in request.get("logit_bias", {}).items()}
    top = request.get("logprobs")

    def committed(label: str, content: object) -> bytes | None:
        return digests.commitment(salt, label, cbor.encode(content)) if content else None

    return {
        "temperature": float(request.get("temperature", 1.0)),
        "top_p": float(request.get("top_p", 1.0)),
        "top_k": request.get("top_k", 40),
        "min_p": float(request.get("min_p", 0.0)),
        "repeat_penalty": float(request.get("repeat_penalty", 1.0)),
        "presence_penalty": float(request.get("presence_penalty", 0.0)),
        "frequency_penalty": float(request.get("frequency_penalty", 0.0)),
        "logit_bias": committed(names.LABEL_LOGIT_BIAS, biases),
        "seed": request.get("seed", 42),
        "deterministic": request.get("deterministic", False),
        "max_tokens": 256 if limit is None else limit,
        "n": request.get("n", 1),
        "prompts": len(request["prompt"]) if isinstance(request.get("prompt"), list) else 1,
        "echo": request.get("echo", False),
        "logprobs": (request.get("top_logprobs", 0) if top else None) if isinstance(top, bool) else top,
        "stop": committed(names.LABEL_STOP, [stop] if isinstance(stop, str) else stop),
        "response_format": committed(
            names.LABEL_RESPONSE_FORMAT,
            None if request.get("response_format") == {"type": "text"} else request.get("response_format"),
        ),
        "tools": committed(names.LABEL_TOOLS, request.get("tools")),
        "tool_choice": request.get("tool_choice", "auto") if request.get("tools") else "none",
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
    }


def _tokens(text: str) -> bytes:
    """One "token" per character, u32 little-endian."""
    return b"".join(ord(character).to_bytes(4, "little") for character in text)


def _usage(o: Options, text: str) -> dict[str, int]:
    prompt, completion = len(_tokens(o.prompt)) // 4, len(_tokens(text)) // 4
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
