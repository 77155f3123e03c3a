"""Vectors from one real appliance that serves a real embedding model beside a real model of text."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from appliance.config.settings import ModelConfig
from client_sdk import Appliance as Client
from client_sdk import ApplianceError, AsyncAppliance, Policy, Rejection, VerificationError, verify_saved
from client_sdk.errors import RequestError
from client_sdk.wire import names
from tests import minilm
from tests.e2e.glass import GlassAppliance, Sent
from tests.e2e.programs import MODEL, make_policy, outcome, run_client

pytestmark = pytest.mark.model
R = Rejection
TEXTS = ["The receipt binds every number.", "日本語の文章です", "smile \U0001f600"]
OTHER = bytes(range(32))


@pytest.fixture(scope="module")
def both(smollm2: Path, minilm_gguf: Path) -> Iterator[GlassAppliance]:
    """Serves both models; the embedding model is the second, so that nothing rests on its place."""
    assert smollm2.exists()
    assert minilm_gguf.exists()
    appliance = GlassAppliance(MODEL)
    models = (ModelConfig(name=MODEL), ModelConfig(name=minilm.NAME))
    appliance.config = replace(appliance.config, models=models)
    with appliance:
        yield appliance


@pytest.fixture(scope="module")
def policy_path(both: GlassAppliance, tmp_path_factory: pytest.TempPathFactory) -> Path:
    arguments = ("--model", MODEL, "--model", minilm.NAME, "--attester", "insecure")
    return make_policy(tmp_path_factory.mktemp("both"), arguments)


@pytest.fixture(scope="module")
def pinned(policy_path: Path) -> Policy:
    return Policy.load(policy_path)


@pytest.fixture(scope="module")
def reference(minilm_originals: Path) -> minilm.Reference:
    return minilm.Reference(minilm_originals)


@pytest.fixture
def client(both: GlassAppliance, pinned: Policy, tmp_path: Path) -> Iterator[Client]:
    with Client(both.url, policy=pinned, save=tmp_path / "saved") as appliance:
        yield appliance
    both.tamper = None


def test_vectors_are_the_models_own_and_every_token_is_counted(client: Client, reference: minilm.Reference) -> None:
    made = client.embed(TEXTS, model=minilm.NAME)
    for text, vector in zip(TEXTS, made.vectors, strict=True):
        assert float(np.array(vector) @ reference.vector(text)) >= 0.999
    assert made.prompt_tokens == sum(len(reference.tokens(text)) for text in TEXTS)
    claims = made.receipt.claims
    assert claims.embedding is not None
    assert (claims.embedding.native, claims.embedding.pooling) == (384, "mean")
    assert claims.request.route == "/v1/embeddings"
    assert claims.execution is not None
    assert claims.execution["exact"] is True
    assert client.receipt_for(made.response_id).raw == made.receipt.raw


def test_the_same_input_has_the_same_bits_in_every_form(client: Client, reference: minilm.Reference) -> None:
    one = client.embed(TEXTS[0], model=minilm.NAME)
    as_numbers = client.embed([TEXTS[0]], model=minilm.NAME, encoding_format="float")
    as_tokens = client.embed(reference.tokens(TEXTS[0]), model=minilm.NAME)
    lists = client.embed([reference.tokens(text) for text in TEXTS], model=minilm.NAME)
    assert one.vectors == as_numbers.vectors == as_tokens.vectors == lists.vectors[:1]
    assert one.prompt_tokens == as_tokens.prompt_tokens


async def test_on_asyncio(both: GlassAppliance, pinned: Policy) -> None:
    async with AsyncAppliance(both.url, policy=pinned) as appliance:
        made = await appliance.embed(TEXTS, model=minilm.NAME, dimensions=32)
        assert [len(vector) for vector in made.vectors] == [32, 32, 32]
        with pytest.raises(ApplianceError) as caught:
            await appliance.embed("word " * 600, model=minilm.NAME)
        assert (caught.value.code, caught.value.verified) == ("context_length_exceeded", True)


def test_the_stock_openai_client(client: Client) -> None:
    """It asks for base64 when nobody says anything, and decodes it."""
    stock = client.openai()
    made = stock.embeddings.create(model=minilm.NAME, input=TEXTS)
    wanted = client.embed(TEXTS, model=minilm.NAME)
    assert [tuple(item.embedding) for item in made.data] == list(wanted.vectors)
    assert made.usage.prompt_tokens == made.usage.total_tokens == wanted.prompt_tokens
    plain = stock.embeddings.create(model=minilm.NAME, input=TEXTS[0], encoding_format="float", dimensions=8)
    assert len(plain.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError) as caught:
        stock.embeddings.create(model=minilm.NAME, input="x", dimensions=385)
    assert (caught.value.code, caught.value.param) == ("invalid_dimensions", "dimensions")
    assert [model.id for model in stock.models.list()] == [MODEL, minilm.NAME]


async def test_the_stock_asynchronous_client(both: GlassAppliance, pinned: Policy) -> None:
    async with AsyncAppliance(both.url, policy=pinned) as appliance:
        made = await appliance.openai().embeddings.create(model=minilm.NAME, input="x")
        assert len(made.data[0].embedding) == 384


def test_each_model_refuses_what_it_is_not_for(client: Client) -> None:
    with pytest.raises(ApplianceError) as caught:
        client.chat("hello", model=minilm.NAME)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "model_does_not_generate", "model")
    assert caught.value.verified
    with pytest.raises(ApplianceError) as caught:
        client.embed("hello", model=MODEL)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "model_does_not_embed", "model")
    assert caught.value.verified
    assert client.chat("Hello", model=MODEL, max_tokens=2).receipt.claims.embedding is None


def test_a_saved_answer_verifies_offline(client: Client, policy_path: Path, pinned: Policy, tmp_path: Path) -> None:
    made = client.embed(TEXTS, model=minilm.NAME)
    folder = tmp_path / "saved" / made.receipt.claims.cti.hex()
    assert verify_saved(folder, pinned).receipt.raw == made.receipt.raw
    assert run_client("verify", str(folder), "--policy", str(policy_path)).returncode == 0
    shown = run_client("show", str(folder))
    assert shown.returncode == 0, shown.stderr
    for path in folder.iterdir():
        content = path.read_bytes()
        if b'"prompt_tokens"' in content:
            path.write_bytes(content.replace(b'"index":0', b'"index":1'))
    assert run_client("verify", str(folder), "--policy", str(policy_path)).returncode == 10


def test_the_command_line(both: GlassAppliance, policy_path: Path, tmp_path: Path) -> None:
    options = ["--policy", str(policy_path), "--model", minilm.NAME]
    result = run_client("embed", both.url, "one", "-", *options, "--dimensions", "4", stdin="two")
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(line) for line in lines] == [4, 4]
    as_json = run_client("embed", both.url, "one", *options, "--json", "--save", str(tmp_path / "kept"))
    document = outcome(as_json)
    assert (document["result"], len(document["vectors"][0])) == ("accept", 384)
    assert run_client("verify", str(tmp_path / "kept"), "--policy", str(policy_path)).returncode == 0
    refused = run_client("embed", both.url, "word " * 600, *options)
    assert refused.returncode == 20
    assert "context_length_exceeded" in refused.stderr


def test_what_has_no_form_in_json_is_not_sent(client: Client, both: GlassAppliance) -> None:
    seen = len(both.seen)
    with pytest.raises(RequestError) as caught:
        client.embed(["fine", "canary \ud800"], model=minilm.NAME)
    assert "canary" not in str(caught.value)
    assert len(both.seen) == seen


def edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[Sent], Sent]:
    def tamper(sent: Sent) -> Sent:
        document = json.loads(sent.body)
        edit(document)
        return replace(sent, body=json.dumps(document, separators=(",", ":")).encode())

    return tamper


def swapped(document: dict[str, Any]) -> None:
    first, second = document["data"][:2]
    first["embedding"], second["embedding"] = second["embedding"], first["embedding"]


def nudged(document: dict[str, Any]) -> None:
    numbers = np.frombuffer(base64.b64decode(document["data"][0]["embedding"]), dtype="<f4").copy()
    numbers[0] = np.nextafter(numbers[0], np.float32(2))
    document["data"][0]["embedding"] = base64.b64encode(numbers.tobytes()).decode()


@pytest.mark.parametrize(
    "edit",
    [
        nudged,
        swapped,
        lambda document: document["usage"].update(prompt_tokens=3, total_tokens=3),
        lambda document: document["data"].pop(),
        lambda document: document.update(model=MODEL),
    ],
    ids=["one-bit-of-a-number", "order", "usage", "left-out", "model"],
)
def test_a_changed_answer_is_rejected(
    client: Client, both: GlassAppliance, edit: Callable[[dict[str, Any]], object]
) -> None:
    client.embed(TEXTS, model=minilm.NAME)
    both.tamper = edited(edit)
    for ask in (
        lambda: client.embed(TEXTS, model=minilm.NAME),
        lambda: client.openai().embeddings.create(model=minilm.NAME, input=TEXTS),
    ):
        with pytest.raises((VerificationError, openai.APIConnectionError)) as caught:
            ask()
        error = caught.value if isinstance(caught.value, VerificationError) else caught.value.__cause__
        assert isinstance(error, VerificationError)
        assert error.code == R.RESPONSE_MISMATCH


# (path inside the claim, the value signed in its place, the code)
LIES: list[tuple[int, str, Any, Rejection]] = [
    (names.CLAIM_EMBEDDING, "vectors", OTHER, R.OUTPUT_MISMATCH),
    (names.CLAIM_EMBEDDING, "dimensions", 383, R.PARAMETER_MISMATCH),
    (names.CLAIM_EMBEDDING, "native", 385, R.PARAMETER_MISMATCH),
    (names.CLAIM_EMBEDDING, "encoding", "float", R.PARAMETER_MISMATCH),
    (names.CLAIM_EMBEDDING, "inputs", 2, R.REQUEST_MISMATCH),
    (names.CLAIM_EMBEDDING, "normalization", "none", R.MALFORMED_RECEIPT_CLAIMS),
    (names.CLAIM_PROMPT, "count", 1, R.OUTPUT_MISMATCH),
    (names.CLAIM_PROMPT, "text", OTHER, R.REQUEST_MISMATCH),
    (names.CLAIM_MODEL, "identity", OTHER, R.MODEL_MISMATCH),
    (names.CLAIM_REQUEST, "route", "/v1/completions", R.REQUEST_MISMATCH),
]


@pytest.mark.parametrize(("claim", "field", "value", "code"), LIES, ids=[f"{lie[0]}-{lie[1]}" for lie in LIES])
def test_a_signed_lie_is_rejected(
    client: Client, both: GlassAppliance, claim: int, field: str, value: object, code: Rejection
) -> None:
    def tamper(sent: Sent) -> Sent:
        return sent.with_receipt(both.resigned(sent.receipt, lambda claims: claims[claim].update({field: value})))

    both.tamper = tamper
    with pytest.raises(VerificationError) as caught:
        client.embed(TEXTS, model=minilm.NAME)
    assert caught.value.code == code


def test_a_pooled_text_model_is_another_configuration(pinned: Policy, smollm2: Path) -> None:
    """Vectors of a model of text only where the operator says so, which the policy's caller sees."""
    assert smollm2.exists()
    appliance = GlassAppliance(MODEL, overrides={"engine": {"threads": 1}})
    pooled = ModelConfig(name=MODEL, pooling="mean", context_length=128)
    plain = appliance.config.digest()
    appliance.config = replace(appliance.config, models=(pooled,))
    assert appliance.config.digest() != plain
    with appliance, Client(appliance.url, policy=replace(pinned, configs=None)) as client:
        made = client.embed(["one", "another"], model=MODEL)
        assert made.receipt.claims.embedding is not None
        assert made.receipt.claims.embedding.native == 576
        with pytest.raises(ApplianceError, match="model_does_not_generate"):
            client.chat("hello", model=MODEL)
