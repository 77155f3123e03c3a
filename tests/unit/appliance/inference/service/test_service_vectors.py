"""/v1/embeddings through the service: whatever happens to a request for vectors, its receipt says so."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import pytest

from appliance.api.embeddings import EmbeddingDialect
from appliance.engine.embedding.fake import DIMENSIONS, EmbeddingScript, FakeEmbedder, vector_of
from appliance.engine.generation.fake import FakeEngine
from appliance.inference.service import ServedModel
from client_sdk.wire import cbor, digests
from tests.unit.appliance.inference.service import rig as rigs
from tests.unit.appliance.inference.service.rig import CHAT, Rig, Wire

ROUTE = "/v1/embeddings"
rigs.DIALECTS[ROUTE] = EmbeddingDialect


def vectors_rig(script: EmbeddingScript | None = None, **options: Any) -> Rig:
    engine = FakeEmbedder(script)
    engine.ready = True
    rig = Rig(engine, **options)
    only = rig.service.models["fake"]
    rig.service.models = {
        "fake": ServedModel(name="fake", engine=engine, served=only.served, created=1, embedder=engine)
    }
    return rig


def body(given: object, **fields: Any) -> bytes:
    return json.dumps({"model": "fake", "input": given, **fields}).encode()


async def ask(rig: Rig, request: bytes) -> Wire:
    return await rig.ask(request, route=ROUTE)


def tokens(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def framed(text: str) -> bytes:
    return tokens(1, *(byte + 3 for byte in text.encode()), 2)


def committed(rig: Rig, label: str, content: bytes) -> bytes:
    from tests import reference_decoder as reference

    _, salt = reference.read_receipt(rig.receipts[-1], rig.cose_key)
    assert salt is not None
    return digests.commitment(salt, label, content)


@pytest.mark.parametrize(
    ("given", "texts", "ids"),
    [
        ("hi", ["hi"], [framed("hi")]),
        (["hi", "ümlaut"], ["hi", "ümlaut"], [framed("hi"), framed("ümlaut")]),
        ([107, 108], ["hi"], [tokens(107, 108)]),
        ([[107], [108, 2]], ["h", "i"], [tokens(107), tokens(108, 2)]),
    ],
)
async def test_every_form_of_input(given: object, texts: list[str], ids: list[bytes]) -> None:
    rig = vectors_rig()
    wire = await ask(rig, body(given))
    claims = rig.claims(rig.receipts[-1])
    count = sum(map(len, ids)) // 4
    document = wire.document
    assert wire.status == 200
    assert list(document) == ["id", "object", "data", "model", "usage"]
    assert document["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert document["id"] == f"embd-{claims[7].hex()}"
    wanted = [vector_of(each, DIMENSIONS) for each in ids]
    for index, (item, numbers) in enumerate(zip(document["data"], wanted, strict=True)):
        assert (item["object"], item["index"]) == ("embedding", index)
        assert struct.pack(f"<{DIMENSIONS}f", *item["embedding"]) == numbers
    assert claims[-70017] == {
        "inputs": len(ids),
        "dimensions": DIMENSIONS,
        "native": DIMENSIONS,
        "pooling": "mean",
        "normalization": "l2",
        "encoding": "float",
        "vectors": committed(rig, "vectors", b"".join(wanted)),
    }
    assert not claims.keys() & {-70012, -70014, -70015}
    whole, packed = (texts[0].encode(), ids[0]) if len(ids) == 1 else (cbor.encode(texts), cbor.encode(ids))
    assert claims[-70011] == {
        "text": committed(rig, "prompt-text", whole),
        "tokens": committed(rig, "prompt-tokens", packed),
        "count": count,
    }
    assert claims[-70013]["body"] == committed(rig, "response", wire.body)


async def test_base64_carries_the_same_bits() -> None:
    rig = vectors_rig()
    wire = await ask(rig, body(["a", "b"], encoding_format="base64", dimensions=3, user="u"))
    wanted = [vector_of(framed(text), 3) for text in ("a", "b")]
    assert [base64.b64decode(item["embedding"]) for item in wire.document["data"]] == wanted
    made = rig.claims(rig.receipts[-1])[-70017]
    assert (made["encoding"], made["dimensions"], made["native"]) == ("base64", 3, DIMENSIONS)


@pytest.mark.parametrize(
    ("request_body", "error"),
    [
        (body(""), (400, "invalid_field", "input")),
        (body([]), (400, "invalid_field", "input")),
        (body(["a", ""]), (400, "invalid_field", "input[1]")),
        (body([[]]), (400, "invalid_field", "input[0]")),
        (body([[1], "a"]), (400, "invalid_field", "input")),
        (body(["a", 1]), (400, "invalid_field", "input[1]")),
        (body([1.5]), (400, "invalid_field", "input")),
        (body([-1]), (400, "invalid_field", "input[0]")),
        (body([True]), (400, "invalid_field", "input[0]")),
        (body({"a": 1}), (400, "invalid_field", "input")),
        (body(None), (400, "invalid_field", "input")),
        (body(["a"] * 2049), (400, "invalid_field", "input")),
        (b'{"model":"fake"}', (400, "missing_field", "input")),
        (b'{"input":"a"}', (400, "missing_field", "model")),
        (body("a", encoding_format="hex"), (400, "invalid_field", "encoding_format")),
        (body("a", dimensions=0), (400, "invalid_field", "dimensions")),
        (body("a", dimensions="3"), (400, "invalid_field", "dimensions")),
        (body("a", dimensions=9), (400, "invalid_dimensions", "dimensions")),
        (body("a", temperature=1), (400, "unknown_field", "temperature")),
        (body("a", stream=True), (400, "unknown_field", "stream")),
        (body("a", prompt_cache_key="k"), (400, "unknown_field", "prompt_cache_key")),
        (body("a", user=1), (400, "invalid_field", "user")),
        (body(["a", "b" * 63]), (400, "context_length_exceeded", "input[1]")),
        (body("a", model="other"), (404, "model_not_found", "model")),
        (b'{"model":"fake","input":"\\ud800"}', (400, "invalid_json", None)),
        (b'{"model":"fake","input":"a","input":"b"}', (400, "invalid_json", None)),
    ],
)
async def test_h49_what_cannot_be_honoured_is_refused_by_name_with_a_receipt(
    request_body: bytes, error: tuple[int, str, str | None]
) -> None:
    rig = vectors_rig(max_body_bytes=1 << 20)
    wire = await ask(rig, request_body)
    assert wire.error[:2] == error[:2]
    assert wire.error[2] is None if error[2] is None else str(wire.error[2]).startswith(error[2])
    claims = rig.claims(rig.receipts[-1])
    assert claims[-70013]["status"] == "refused"
    assert not claims.keys() & {-70011, -70012, -70014, -70016, -70017}
    assert claims[-70013]["body"] == committed(rig, "response", wire.body)
    assert len(rig.receipts) == 1


async def test_nulls_ask_for_the_default() -> None:
    rig = vectors_rig()
    wire = await ask(rig, body("a", encoding_format=None, dimensions=None, user=None))
    assert wire.status == 200


async def test_each_kind_of_model_refuses_the_other_kind_of_request() -> None:
    rig = vectors_rig()
    wire = await rig.ask(rigs.chat(), route=CHAT)
    assert wire.error == (400, "model_does_not_generate", "model")
    assert rig.claims(rig.receipts[-1])[-70006]["name"] == "fake"
    engine = FakeEngine()
    engine.ready = True
    generating = Rig(engine)
    wire = await ask(generating, body("a"))
    assert wire.error == (400, "model_does_not_embed", "model")
    assert generating.claims(generating.receipts[-1])[-70013]["status"] == "refused"


async def test_an_engine_that_fails_leaves_a_receipt_of_the_inputs_without_vectors() -> None:
    rig = vectors_rig(EmbeddingScript(fail_at=1))
    wire = await ask(rig, body(["a", "b"]))
    assert wire.error == (500, "engine_failed", None)
    claims = rig.claims(rig.receipts[-1])
    assert (claims[-70013]["status"], claims[-70017]["vectors"]) == ("error", None)
    assert claims[-70011]["count"] == 6


async def test_a_vector_left_out_is_no_answer() -> None:
    rig = vectors_rig(EmbeddingScript(drop=0))
    wire = await ask(rig, body(["a", "b"]))
    assert wire.error == (500, "engine_failed", None)
    assert rig.claims(rig.receipts[-1])[-70017]["vectors"] is None


async def test_the_deadline_counts_and_ends_the_work() -> None:
    rig = vectors_rig(EmbeddingScript(delay_s=5.0), max_request_s=0.1)
    wire = await ask(rig, body(["a", "b"]))
    assert wire.error == (408, "deadline_exceeded", None)
    claims = rig.claims(rig.receipts[-1])
    assert (claims[-70013]["status"], claims[-70017]["vectors"]) == ("deadline", None)
    assert isinstance(rig.engine, FakeEmbedder)
    assert rig.engine.cancelled == 1


async def test_who_leaves_is_not_computed_for() -> None:
    rig = vectors_rig(EmbeddingScript(delay_s=5.0))
    wire = rig.post(body(["a", "b"]), route=ROUTE)
    await asyncio.sleep(0.05)
    wire.leave()
    await wire.done()
    assert rig.claims(rig.receipts[-1])[-70013]["status"] == "cancelled"
    assert isinstance(rig.engine, FakeEmbedder)
    assert rig.engine.cancelled == 1
    assert rig.service.active == 0


async def test_places_are_those_of_every_request() -> None:
    rig = vectors_rig(EmbeddingScript(delay_s=0.3), max_active=1)
    first = rig.post(body("a"), route=ROUTE)
    await asyncio.sleep(0.05)
    with pytest.raises(Exception, match="places"):
        await rig.ask(body("b"), route=ROUTE)
    assert (await first.done()).status == 200


async def test_a_stopping_appliance_ends_it_with_a_receipt() -> None:
    rig = vectors_rig(EmbeddingScript(delay_s=5.0))
    wire = rig.post(body("a"), route=ROUTE)
    await asyncio.sleep(0.05)
    rig.service.begin_shutdown()
    await wire.done()
    assert wire.error == (503, "shutting_down", None)
    assert rig.claims(rig.receipts[-1])[-70013]["status"] == "error"


async def test_thousands_of_vectors_are_written_beside_the_event_loop() -> None:
    """The loop goes on turning while they are written out."""
    rig = vectors_rig(max_body_bytes=1 << 20)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    wire = await ask(rig, body(["a"] * 2048))
    turning.cancel()
    assert len(wire.document["data"]) == 2048
    assert turns > 20
