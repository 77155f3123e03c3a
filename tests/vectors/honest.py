"""Honest material for the vectors: fixed keys, fixed contents, everything derived from names, nothing from a clock."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from client_sdk.wire import attestation, cbor, cose, digests, names, receipt, stream
from client_sdk.wire.embedding import EmbeddingFacts


def seed(name: str) -> bytes:
    return hashlib.sha256(b"attested-inference test vector " + name.encode()).digest()


@dataclass(frozen=True, slots=True)
class Signer:
    """An Ed25519 key that everybody can recompute: worthless outside tests."""

    name: str

    def key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(seed(self.name))

    def sign(self, message: bytes) -> bytes:
        return self.key().sign(message)

    def cose_key(self) -> bytes:
        return cose.okp_key(self.key().public_key().public_bytes_raw(), curve=names.CURVE_ED25519)

    def seal(self, typ: str, payload: bytes, salt: bytes | None = None) -> bytes:
        protected = cose.protected_header(kid=cose.key_id(self.cose_key()), typ=typ)
        return cose.sign1(protected=protected, salt=salt, payload=payload, sign=self.sign)


RECEIPT = Signer("receipt key")
CHANNEL = Signer("channel key")
QUOTE = Signer("insecure evidence key")
STRANGER = Signer("somebody else's key")

SALT = seed("salt")
NONCE = seed("attestation nonce")
EXPORTED = seed("exporter output")
CTI = seed("cti")[:16]
STOP = ["\n\n", "###"]
IAT = 1_767_225_600
PROMPT_TEXT = "<|im_start|>user\nWhich year?<|im_end|>\n<|im_start|>assistant\n"
PROMPT_TOKENS = [1, 4093, 198, 12345, 2]
OUTPUT_TEXT = "It is 2026."
OUTPUT_TOKENS = [1589, 314, 216, 34, 32, 34, 38, 30, 2]
INPUTS = ["Which year?", "2026"]
INPUT_TOKENS = [[101, 2029, 2095, 1029, 102], [101, 16798, 2575, 102]]
VECTORS = [[0.6000000238418579, -0.800000011920929], [1.0, 0.0]]  # numbers that are float32
EMBEDDING_REQUEST = b'{"dimensions":2,"encoding_format":"float","input":["Which year?","2026"],"model":"tiny"}'
EMBEDDING_RESPONSE = (
    b'{"id":"embd-","object":"list","data":[{"object":"embedding","index":0,"embedding":[0.6,-0.8]},'
    b'{"object":"embedding","index":1,"embedding":[1.0,0.0]}],"model":"tiny","usage":{"prompt_tokens":9,"total_tokens":9}}'
)
REQUEST_BODY = (
    b'{"messages":[{"content":"Which year?","role":"user"}],"model":"tiny","stop":["\\n\\n","###"],"temperature":1}'
)
RESPONSE_BODY = (
    b'{"choices":[{"finish_reason":"stop","index":0,"message":{"content":"It is 2026.","role":"assistant"}}]}'
)
ERROR_BODY = (
    b'{"error":{"code":"model_not_found","message":"no such model","param":"model","type":"invalid_request_error"}}'
)
FRAMES = [
    b'data: {"choices":[{"delta":{"content":"It is"},"finish_reason":null,"index":0}]}\n\n',
    b'data: {"choices":[{"delta":{"content":" 2026"},"finish_reason":null,"index":0}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"."},"finish_reason":null,"index":0}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"stop","index":0}]}\n\n',
]


def spki() -> bytes:
    scalar = int.from_bytes(seed("tls key"), "big") >> 1
    public = ec.derive_private_key(scalar, ec.SECP256R1()).public_key()
    return public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


BINDER = digests.channel_binder(spki(), EXPORTED)
WEIGHTS = ((98_362_432, seed("weights file")),)
MODEL_IDENTITY = digests.model_identity(
    format_name="gguf", weights=WEIGHTS, tokenizer=seed("tokenizer"), chat_template=seed("chat template")
)
CONFIG = digests.config_digest({"threads": "auto", "listeners": ["tls"]})


def attestation_claims() -> attestation.AttestationClaims:
    sealing = X25519PrivateKey.from_private_bytes(seed("sealing key")).public_key().public_bytes_raw()
    return attestation.AttestationClaims(
        nonce=NONCE,
        binder=BINDER,
        tls_key=digests.sha256(spki()),
        receipt_key=RECEIPT.cose_key(),
        channel_key=CHANNEL.cose_key(),
        sealing_key=cose.okp_key(sealing, curve=names.CURVE_X25519),
        config=CONFIG,
        models={"tiny": MODEL_IDENTITY},
        mode=names.MODE_INSECURE,
        instance=seed("instance")[:16],
        issued_at=IAT,
    )


def channel_proof(claims: bytes, nonce: bytes = NONCE, binder: bytes = BINDER, signer: Signer = CHANNEL) -> bytes:
    payload = attestation.ChannelProof(nonce=nonce, binder=binder, claims=digests.sha256(claims)).encode()
    return signer.seal(names.TYP_CHANNEL_PROOF, payload)


def insecure_item(claims: bytes) -> attestation.EvidenceItem:
    statement = QUOTE.seal(names.TYP_INSECURE_EVIDENCE, digests.report_data(claims))
    content = cbor.encode({"key": QUOTE.cose_key(), "evidence": statement})
    return attestation.EvidenceItem(kind="insecure", content=content)


def bundle(claims: bytes, evidence_over: bytes | None = None, proof: bytes | None = None) -> bytes:
    item = insecure_item(claims if evidence_over is None else evidence_over)
    proof = channel_proof(claims) if proof is None else proof
    return attestation.AttestationBundle(channel_proof=proof, claims=claims, evidence=(item,)).encode()


def attested() -> bytes:
    return digests.sha256(attestation_claims().encode())


def u32(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def committed(label: str, data: bytes) -> bytes:
    return digests.commitment(SALT, label, data)


def whole_answer() -> receipt.ReceiptClaims:
    """Claims of a complete chat answer that came in one piece, third of its chain."""
    return receipt.ReceiptClaims(
        iss="attested-inference",
        iat=IAT,
        cti=CTI,
        eat_nonce=seed("inference nonce"),
        chain=seed("chain")[:16],
        sequence=2,
        previous=seed("previous receipt"),
        mode=names.MODE_INSECURE,
        attestation=attested(),
        channel=BINDER,
        config=CONFIG,
        device=receipt.DeviceFacts(kind="cpu", digest=digests.device_digest({"machine": "x86_64"})),
        engine=receipt.EngineFacts(
            name="llama.cpp",
            version="0.3.36",
            digest=digests.engine_digest([("libllama.so", seed("libllama.so"))]),
            arithmetic="attested-1",
            kernels="avx512-vnni",
        ),
        request=receipt.RequestFacts(
            method="POST",
            route="/v1/chat/completions",
            length=len(REQUEST_BODY),
            complete=True,
            body=committed(names.LABEL_REQUEST, REQUEST_BODY),
        ),
        response=whole_response(names.STATUS_COMPLETE, 200, RESPONSE_BODY),
        model=receipt.ModelFacts(
            name="tiny",
            identity=MODEL_IDENTITY,
            weights=WEIGHTS,
            tokenizer=seed("tokenizer"),
            chat_template=seed("chat template"),
            format="gguf",
        ),
        prompt=receipt.PromptFacts(
            text=committed(names.LABEL_PROMPT_TEXT, PROMPT_TEXT.encode()),
            tokens=committed(names.LABEL_PROMPT_TOKENS, u32(PROMPT_TOKENS)),
            count=len(PROMPT_TOKENS),
        ),
        decoding={
            "temperature": 1.0,
            "top_p": 0.95,
            "top_k": 40,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": None,
            "seed": 1234567,
            "deterministic": False,
            "max_tokens": 64,
            "n": 1,
            "prompts": 1,
            "echo": False,
            "logprobs": None,
            "stop": committed(names.LABEL_STOP, cbor.encode(STOP)),
            "response_format": None,
            "tools": None,
            "tool_choice": "none",
            "parallel_tool_calls": True,
        },
        output=(
            receipt.OutputFacts(
                text=committed(names.label_output_text(0), OUTPUT_TEXT.encode()),
                tokens=committed(names.label_output_tokens(0), u32(OUTPUT_TOKENS)),
                count=len(OUTPUT_TOKENS),
                finish="stop",
            ),
        ),
        execution={"cached-prompt-tokens": 0, "template-date": "2026-01-01", "threads": 2},
    )


def whole_response(status: str, http_status: int, body: bytes) -> receipt.ResponseFacts:
    return receipt.ResponseFacts(
        status=status,
        http_status=http_status,
        media_type=names.MEDIA_JSON,
        length=len(body),
        body=committed(names.LABEL_RESPONSE, body),
    )


def refusal() -> receipt.ReceiptClaims:
    return dataclasses.replace(
        whole_answer(),
        response=whole_response(names.STATUS_REFUSED, 404, ERROR_BODY),
        sequence=0,
        previous=None,
        eat_nonce=None,
        model=None,
        prompt=None,
        decoding=None,
        output=None,
        execution=None,
    )


def engine_error() -> receipt.ReceiptClaims:
    """The engine died after some tokens: evaluated, no finish reason."""
    claims = whole_answer()
    assert claims.output is not None
    return dataclasses.replace(
        claims,
        response=whole_response(names.STATUS_ERROR, 500, ERROR_BODY),
        output=(dataclasses.replace(claims.output[0], finish=None),),
    )


def embedding() -> receipt.ReceiptClaims:
    """Claims of two vectors for two texts, cut to two dimensions."""
    packed = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in VECTORS)
    return dataclasses.replace(
        whole_answer(),
        request=receipt.RequestFacts(
            method="POST",
            route="/v1/embeddings",
            length=len(EMBEDDING_REQUEST),
            complete=True,
            body=committed(names.LABEL_REQUEST, EMBEDDING_REQUEST),
        ),
        response=whole_response(names.STATUS_COMPLETE, 200, EMBEDDING_RESPONSE),
        prompt=receipt.PromptFacts(
            text=committed(names.LABEL_PROMPT_TEXT, cbor.encode(INPUTS)),
            tokens=committed(names.LABEL_PROMPT_TOKENS, cbor.encode([u32(each) for each in INPUT_TOKENS])),
            count=sum(map(len, INPUT_TOKENS)),
        ),
        decoding=None,
        output=None,
        execution={"batching": "single", "exact": True, "threads": 2},
        embedding=EmbeddingFacts(
            inputs=2,
            dimensions=2,
            native=4,
            pooling="mean",
            encoding="float",
            vectors=committed(names.LABEL_VECTORS, packed),
        ),
    )


def interrupted_embedding() -> receipt.ReceiptClaims:
    """The deadline passed after the inputs were taken: no vectors."""
    claims = embedding()
    assert claims.embedding is not None
    return dataclasses.replace(
        claims,
        response=whole_response(names.STATUS_DEADLINE, 408, ERROR_BODY),
        embedding=dataclasses.replace(claims.embedding, vectors=None),
    )


def context() -> stream.StreamContext:
    return stream.StreamContext(
        cti=CTI,
        eat_nonce=seed("inference nonce"),
        attestation=attested(),
        channel=BINDER,
        request=committed(names.LABEL_REQUEST, REQUEST_BODY),
    )


def chain_value(count: int) -> bytes:
    value = context().initial_chain(SALT)
    for index in range(1, count + 1):
        value = stream.next_chain(value, index, FRAMES[index - 1])
    return value


def checkpoint(index: int, chain: bytes | None = None, salt: bytes = SALT, cti: bytes = CTI) -> bytes:
    claims = stream.Checkpoint(
        context=dataclasses.replace(context(), cti=cti),
        index=index,
        chain=chain_value(index) if chain is None else chain,
    )
    return RECEIPT.seal(names.TYP_CHECKPOINT, claims.encode(), salt)


def streamed_answer() -> receipt.ReceiptClaims:
    return dataclasses.replace(
        whole_answer(),
        response=receipt.ResponseFacts(
            status=names.STATUS_COMPLETE,
            http_status=200,
            media_type=names.MEDIA_EVENT_STREAM,
            length=None,
            body=None,
        ),
        stream=receipt.StreamFacts(frames=len(FRAMES), chain=chain_value(len(FRAMES)), checkpoint=(3, chain_value(3))),
    )


def sealed(claims: receipt.ReceiptClaims, salt: bytes | None = SALT) -> bytes:
    return RECEIPT.seal(names.TYP_RECEIPT, claims.encode(), salt)


def event_stream() -> list[bytes]:
    """The blocks of a whole stream: frames, comments, the receipt, the end."""
    return [
        FRAMES[0],
        stream.comment(names.COMMENT_CHECKPOINT, checkpoint(1)),
        stream.comment(names.COMMENT_PADDING, seed("padding")[:9]),
        FRAMES[1],
        FRAMES[2],
        stream.comment(names.COMMENT_CHECKPOINT, checkpoint(3)),
        FRAMES[3],
        stream.comment(names.COMMENT_RECEIPT, sealed(streamed_answer())),
        names.DONE_BLOCK,
    ]
