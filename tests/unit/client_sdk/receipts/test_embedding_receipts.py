"""Receipts over vectors: each rejection by exactly one fault, signed where a lie can be; honest twins pass."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from client_sdk.errors import MalformedError, PolicyFileError, Rejection, VerificationError
from client_sdk.policy.policy import Policy, UnsafeAcceptInsecure
from client_sdk.wire import cbor, digests, names
from client_sdk.wire.embedding import EmbeddingFacts
from client_sdk.wire.receipt import PromptFacts, ReceiptClaims
from tests.simulators.attested import Attested, attested
from tests.simulators.insecure_appliance import MODEL, Answer, Options, seeded

ROUTE = "/v1/embeddings"
R = Rejection
NATIVE = 4
Claims = Callable[[ReceiptClaims], ReceiptClaims]
Body = Callable[[dict[str, Any]], object]


def vector(seed: int, size: int) -> bytes:
    numbers = [math.sin(1 + seed + place) for place in range(size)]
    length = math.hypot(*numbers)
    return struct.pack(f"<{size}f", *(number / length for number in numbers))


def written(numbers: bytes, encoding: str) -> object:
    if encoding == "base64":
        return base64.b64encode(numbers).decode()
    return [float(f"{number:.9g}") for number in struct.unpack(f"<{len(numbers) // 4}f", numbers)]


def answer(
    client: Attested,
    request: dict[str, Any],
    *,
    body: Body | None = None,
    claims: Claims | None = None,
    vectors: list[bytes] | None = None,
    sent: dict[str, Any] | None = None,
) -> Answer:
    """What an appliance answers to `request`, changed before it is committed to (`body`) and signed (`claims`).

    `sent` is what the client really sent, where that is something else.
    """
    appliance, salt = client.appliance, client.appliance.draw(names.SALT_BYTES)
    given = request["input"]
    inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    texts = [item if isinstance(item, str) else "".join(map(chr, item)) for item in inputs]
    ids = [struct.pack(f"<{len(item)}I", *(map(ord, item) if isinstance(item, str) else item)) for item in inputs]
    size, encoding = request.get("dimensions") or NATIVE, request.get("encoding_format") or "float"
    numbers = vectors if vectors is not None else [vector(index, size) for index in range(len(inputs))]
    head = appliance._head(json.dumps(sent or request).encode(), ROUTE, None, Options(), names.MEDIA_JSON)
    assert head.receipt_id is not None
    count = sum(map(len, ids)) // 4
    document: dict[str, Any] = {
        "id": f"embd-{head.receipt_id.hex()}",
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": written(each, encoding)}
            for index, each in enumerate(numbers)
        ],
        "model": MODEL,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    if body is not None:
        body(document)
    raw = json.dumps(document).encode()

    def committed(label: str, content: bytes) -> bytes:
        return digests.commitment(salt, label, content)

    made = appliance._claims(head, client.connection, salt, Options(), None)
    made = replace(
        made,
        response=replace(made.response, length=len(raw), body=committed(names.LABEL_RESPONSE, raw)),
        model=appliance.model,
        prompt=PromptFacts(
            text=committed(names.LABEL_PROMPT_TEXT, texts[0].encode() if len(texts) == 1 else cbor.encode(texts)),
            tokens=committed(names.LABEL_PROMPT_TOKENS, ids[0] if len(ids) == 1 else cbor.encode(ids)),
            count=count,
        ),
        execution={"batching": "single", "exact": True},
        embedding=EmbeddingFacts(
            inputs=len(inputs),
            dimensions=size,
            native=NATIVE,
            pooling="mean",
            encoding=encoding,
            vectors=committed(names.LABEL_VECTORS, b"".join(numbers)),
        ),
    )
    made = made if claims is None else claims(made)
    return Answer(exchange=replace(head, response_body=raw), receipt=appliance.seal(made, salt), claims=made)


ASK: dict[str, Any] = {"model": MODEL, "input": ["one", "two"], "dimensions": 3, "encoding_format": "float"}


@pytest.mark.parametrize(
    "request_body",
    [
        ASK,
        {**ASK, "encoding_format": "base64", "user": "u"},
        {"model": MODEL, "input": "one"},
        {"model": MODEL, "input": "ümlaut \U0001f600", "dimensions": None, "encoding_format": None, "user": None},
        {"model": MODEL, "input": [70, 71]},
        {"model": MODEL, "input": [[70], [71, 72]], "dimensions": 1},
    ],
)
def test_honest_answers_verify(request_body: dict[str, Any]) -> None:
    client = attested()
    receipt = client.verify(answer(client, request_body))
    passed = {check.name for check in receipt.checks if check.status == "passed"}
    assert {
        "parameter dimensions",
        "parameter encoding_format",
        "inputs as sent",
        "vectors",
        "usage",
        "length of vectors",
    } <= passed
    assert {fact.name for fact in receipt.facts} >= {"vectors", "pooling", "prompt tokens"}


def embedding(**changes: Any) -> dict[str, Any]:
    def edit(claims: ReceiptClaims) -> ReceiptClaims:
        assert claims.embedding is not None
        return replace(claims, embedding=replace(claims.embedding, **changes))

    return {"claims": edit}


def prompt(**changes: Any) -> dict[str, Any]:
    def edit(claims: ReceiptClaims) -> ReceiptClaims:
        assert claims.prompt is not None
        return replace(claims, prompt=replace(claims.prompt, **changes))

    return {"claims": edit}


def swapped(document: dict[str, Any]) -> None:
    first, second = document["data"]
    first["embedding"], second["embedding"] = second["embedding"], first["embedding"]


def data(**changes: Any) -> dict[str, Any]:
    return {"body": lambda document: document["data"][0].update(changes)}


FAULTS: list[tuple[str, Rejection, dict[str, Any]]] = [
    ("a-number-changed", R.OUTPUT_MISMATCH, data(embedding=written(vector(9, 3), "float"))),
    ("vectors-swapped", R.OUTPUT_MISMATCH, {"body": swapped}),
    ("other-vectors-committed-to", R.OUTPUT_MISMATCH, embedding(vectors=seeded("other vectors"))),
    ("a-vector-left-out", R.OUTPUT_MISMATCH, {"body": lambda document: document["data"].pop()}),
    ("a-vector-too-many", R.OUTPUT_MISMATCH, {"body": lambda d: d["data"].append({**d["data"][0], "index": 2})}),
    ("order-of-indices", R.MALFORMED_RESPONSE, {"body": lambda document: document["data"].reverse()}),
    ("index-missing", R.MALFORMED_RESPONSE, {"body": lambda document: document["data"][0].pop("index")}),
    ("index-true", R.MALFORMED_RESPONSE, {"body": lambda document: document["data"][1].update(index=True)}),
    ("a-dimension-left-out", R.OUTPUT_MISMATCH, data(embedding=written(vector(0, 2), "float"))),
    ("two-forms", R.MALFORMED_RESPONSE, data(embedding=written(vector(0, 3), "base64"))),
    ("other-form", R.OUTPUT_MISMATCH, {"body": lambda d: [e.update(embedding="AACAPwAAAAAAAAAA") for e in d["data"]]}),
    ("not-base64", R.MALFORMED_RESPONSE, {"body": lambda d: [e.update(embedding="A CA") for e in d["data"]]}),
    ("half-a-number", R.MALFORMED_RESPONSE, {"body": lambda d: [e.update(embedding="AACA") for e in d["data"]]}),
    ("a-number-is-text", R.MALFORMED_RESPONSE, data(embedding=[0.1, "0.2", 0.3])),
    ("a-number-is-true", R.MALFORMED_RESPONSE, data(embedding=[0.1, True, 0.3])),
    ("a-number-is-huge", R.MALFORMED_RESPONSE, data(embedding=[0.1, 1e300, 0.3])),
    ("a-vector-is-empty", R.MALFORMED_RESPONSE, data(embedding=[])),
    ("no-data", R.MALFORMED_RESPONSE, {"body": lambda document: document.update(data=[])}),
    ("usage-prompt", R.OUTPUT_MISMATCH, {"body": lambda document: document["usage"].update(prompt_tokens=5)}),
    ("usage-total", R.OUTPUT_MISMATCH, {"body": lambda document: document["usage"].update(total_tokens=7)}),
    ("usage-missing", R.MALFORMED_RESPONSE, {"body": lambda document: document.pop("usage")}),
    ("usage-receipt", R.OUTPUT_MISMATCH, prompt(count=7)),
    ("answer-id", R.RECEIPT_ID_MISMATCH, {"body": lambda document: document.update(id="embd-" + "0" * 32)}),
    ("answer-model", R.MODEL_MISMATCH, {"body": lambda document: document.update(model="other")}),
    ("dimensions-effective", R.PARAMETER_MISMATCH, embedding(dimensions=2)),
    ("encoding-effective", R.PARAMETER_MISMATCH, embedding(encoding="base64")),
    ("inputs-counted", R.REQUEST_MISMATCH, embedding(inputs=3)),
    ("inputs-other-text", R.REQUEST_MISMATCH, prompt(text=seeded("other text"))),
    ("not-normalized", R.OUTPUT_MISMATCH, {"vectors": [struct.pack("<3f", 3, 4, 0), vector(1, 3)]}),
    ("no-direction", R.OUTPUT_MISMATCH, {"vectors": [bytes(12), vector(1, 3)]}),
    ("unknown-parameter", R.PARAMETER_MISMATCH, {"sent": {**ASK, "truncate": True}}),
    ("dimensions-sent", R.PARAMETER_MISMATCH, {"sent": {**ASK, "dimensions": 2}}),
    ("dimensions-not-sent", R.PARAMETER_MISMATCH, {"sent": {"model": MODEL, "input": ["one", "two"]}}),
    ("encoding-sent", R.PARAMETER_MISMATCH, {"sent": {**ASK, "encoding_format": "base64"}}),
    ("inputs-sent-in-other-order", R.REQUEST_MISMATCH, {"sent": {**ASK, "input": ["two", "one"]}}),
    ("inputs-of-no-kind", R.REQUEST_MISMATCH, {"sent": {**ASK, "input": [{"a": 1}, {}]}}),
    ("input-of-half-a-character", R.REQUEST_MISMATCH, {"sent": {**ASK, "input": ["one", "\ud800"]}}),
    ("model-asked-for", R.MODEL_MISMATCH, {"sent": {**ASK, "model": "other"}}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "fault"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_one_fault_is_one_rejection(code: Rejection, fault: dict[str, Any]) -> None:
    client = attested()
    client.verify(answer(client, ASK))
    with pytest.raises(VerificationError) as caught:
        client.verify(answer(client, ASK, **fault))
    assert caught.value.code == code
    assert caught.value.checks[-1].status == "failed"


def test_other_token_ids_than_were_sent() -> None:
    client = attested()
    ask = {"model": MODEL, "input": [[70], [71, 72]]}
    client.verify(answer(client, ask))
    for sent in ([[70], [71, 73]], [[70, 71], [72]], [[70], [71]]):
        with pytest.raises(VerificationError) as caught:
            client.verify(answer(client, ask, sent={**ask, "input": sent}))
        assert caught.value.code == R.REQUEST_MISMATCH


def test_one_input_of_half_a_character() -> None:
    client, ask = attested(), {"model": MODEL, "input": "one"}
    client.verify(answer(client, ask))
    with pytest.raises(VerificationError) as caught:
        client.verify(answer(client, ask, sent={**ask, "input": "\ud800"}))
    assert caught.value.code == R.REQUEST_MISMATCH


def test_a_byte_changed_on_the_way() -> None:
    client = attested()
    honest = answer(client, ASK)
    for old, new in ((b'"index": 0', b'"index": 1'), (b"0.", b"1."), (b'"prompt_tokens": 6', b'"prompt_tokens": 7')):
        changed = honest.body.replace(old, new, 1)
        assert changed != honest.body
        with pytest.raises(VerificationError) as caught:
            client.verify(replace(honest, exchange=replace(honest.exchange, response_body=changed)))
        assert caught.value.code == R.RESPONSE_MISMATCH


def test_text_in_place_of_vectors_and_vectors_in_place_of_text() -> None:
    """Both receipts are properly signed, for the route and the bytes of the request."""
    client = attested()
    generated = client.answer()
    asked = replace(generated.exchange, route=ROUTE)
    claims = replace(generated.claims, request=replace(generated.claims.request, route=ROUTE))
    salt = client.appliance.draw(names.SALT_BYTES)
    for made, exchange in ((claims, asked), (_as_chat(answer(client, ASK)))):
        request = replace(made.request, body=digests.commitment(salt, names.LABEL_REQUEST, exchange.request_body))
        body = digests.commitment(salt, names.LABEL_RESPONSE, exchange.response_body or b"")
        made = replace(made, request=request, response=replace(made.response, body=body))
        receipt = client.appliance.seal(made, salt)
        with pytest.raises(VerificationError) as caught:
            client.verify(Answer(exchange=exchange, receipt=receipt, claims=made))
        assert (caught.value.code, caught.value.checks[-1].name) == (R.PARAMETER_MISMATCH, "kind of answer")


def _as_chat(made: Answer) -> tuple[ReceiptClaims, Any]:
    route = "/v1/chat/completions"
    return replace(made.claims, request=replace(made.claims.request, route=route)), replace(made.exchange, route=route)


def test_a_redacted_receipt_says_what_it_cannot_say() -> None:
    from client_sdk.receipts.verify import verify_receipt
    from client_sdk.wire import cose

    client = attested()
    made = answer(client, ASK)
    redacted = cose.redacted(made.receipt, limit_bytes=names.LIMIT_RECEIPT_BYTES)
    receipt = verify_receipt(redacted, made.exchange, client.result, client.policy, accept_redacted=True)
    unread = {check.name for check in receipt.checks if check.status == "not checked"}
    assert {"vectors", "inputs as sent", "request body", "response body"} <= unread
    assert not receipt.opened


def test_an_answer_cut_short_states_its_inputs_and_no_vectors() -> None:
    client = attested()
    made = answer(client, ASK)
    assert made.claims.embedding is not None
    salt = client.appliance.draw(names.SALT_BYTES)

    def again(label: str, content: bytes) -> bytes:
        return digests.commitment(salt, label, content)

    error = b'{"error":{"message":"late","type":"timeout_error","param":null,"code":"deadline_exceeded"}}'
    request = json.dumps(ASK).encode()
    claims = replace(
        made.claims,
        request=replace(made.claims.request, body=again(names.LABEL_REQUEST, request)),
        response=replace(
            made.claims.response,
            status=names.STATUS_DEADLINE,
            http_status=408,
            length=len(error),
            body=again(names.LABEL_RESPONSE, error),
        ),
        prompt=PromptFacts(
            text=again(names.LABEL_PROMPT_TEXT, cbor.encode(["one", "two"])), tokens=seeded("ids"), count=6
        ),
        embedding=replace(made.claims.embedding, vectors=None),
    )
    late = Answer(
        exchange=replace(made.exchange, http_status=408, response_body=error),
        receipt=client.appliance.seal(claims, salt),
        claims=claims,
    )
    receipt = client.verify(late)
    assert ("vectors", "not checked") in {(check.name, check.status) for check in receipt.checks}


def test_a_policy_may_require_the_claim() -> None:
    required = frozenset({"embedding", "prompt", "execution.exact"})
    client = attested(required_claims=required)
    client.verify(answer(client, ASK))
    with pytest.raises(VerificationError) as caught:
        client.verify(client.answer())
    assert caught.value.code == R.REQUIRED_CLAIM_MISSING
    # What these say of text, `embedding` says of vectors.
    for_text = attested(required_claims=frozenset({"decoding", "output"}))
    for_text.verify(answer(for_text, ASK))
    with pytest.raises(PolicyFileError):
        Policy(
            models={MODEL: frozenset({seeded("id")})},
            insecure=UnsafeAcceptInsecure(),
            required_claims=frozenset({"vectors"}),
        )


def test_bytes_that_are_no_answer_never_raise_anything_else() -> None:
    from client_sdk.routes.embeddings import read_embeddings

    for raw in (
        b"",
        b"[]",
        b"null",
        b'{"data":{}}',
        b"\xff",
        b'{"data":[1]}',
        b"[" * 100_000,
        b'{"data":[],"data":[]}',
    ):
        with pytest.raises(MalformedError):
            read_embeddings(raw)
