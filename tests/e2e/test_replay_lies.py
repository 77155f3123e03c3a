"""The one lie that attestation cannot exclude: answers that were changed, or never computed, and signed all the same.

The appliance here is the real one with a dishonest engine between its service and its worker, so that every commitment,
chain value and signature is as it should be. The client accepts all of it; the replay finds it.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.engine.base import Engine
from appliance.engine.embedding.jobs import Vector
from appliance.engine.types import ChatMessage, Delta, EngineEvent, Finished, GenerationJob, PromptReady
from appliance.inference.service import ServedModel
from appliance.replay.verdict import Difference, Outcome, Reason, Verdict
from client_sdk import Appliance, Policy, verify_saved
from client_sdk.wire import cose, names
from tests import minilm
from tests.e2e.glass import GlassAppliance
from tests.e2e.programs import MODEL, make_policy, run_program
from tests.e2e.replays import ask, replay_one, wanted

pytestmark = pytest.mark.model
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BASE: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
PLACE = 4
Edit = Callable[[int, EngineEvent], EngineEvent | None]


class Liar:
    """Stands before an engine: changes its jobs on their way in and its events on their way out."""

    def __init__(self, engine: Any, *, job: Callable[[Any], Any] = lambda job: job, event: Edit | None = None) -> None:
        self._engine = engine
        self._job = job
        self._event = event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        return self._changed(self._engine.generate(self._job(job)))

    def embed(self, job: Any) -> AsyncGenerator[Any, None]:
        return self._changed(self._engine.embed(job))

    async def _changed(self, events: Any) -> AsyncGenerator[Any, None]:
        """`_event` gets each event with the number of tokens before it."""
        count = 0
        async for event in events:
            made = event if self._event is None else self._event(count, event)
            count += len(event.token_ids) // 4 if isinstance(event, Delta) else 0
            if made is not None:
                yield made


@pytest.fixture
def lying(glass: GlassAppliance) -> Iterator[Callable[..., None]]:
    """Makes the appliance lie until the test ends."""
    models: dict[str, ServedModel] = glass.appliance.service.models  # type: ignore[assignment]
    honest = dict(models)

    def lie(**how: Any) -> None:
        engine: Engine = Liar(honest[MODEL].engine, **how)  # type: ignore[assignment]
        models[MODEL] = replace(honest[MODEL], engine=engine)

    yield lie
    models.update(honest)


@pytest.fixture(scope="module")
def spelled(glass: GlassAppliance, policy: Policy) -> dict[str, int]:
    """Tokens of their own."""
    with Appliance(glass.url, policy=policy) as appliance:
        found = {text: appliance.tokenize(text, model=MODEL).tokens for text in (" London", " not", " a")}
    assert all(len(tokens) == 1 for tokens in found.values())
    return {text: tokens[0] for text, tokens in found.items()}


def audited(glass: GlassAppliance, policy: Policy, directory: Path, route: str, body: Any) -> Verdict:
    """Ask the liar, have the client accept it twice, and replay what it saved."""
    asked = ask(glass.url, policy, directory, route, body)
    assert asked.status == 200, asked.body
    assert verify_saved(directory, policy).receipt.claims.response.status == "complete"
    return replay_one(directory, wanted(MODEL))


def found(verdict: Verdict) -> Difference:
    assert verdict.outcome is Outcome.DIFFERS, verdict
    assert verdict.exit_status == 10
    assert verdict.difference is not None
    return verdict.difference


def exchanged(text: str, token: int) -> Edit:
    def edit(count: int, event: EngineEvent) -> EngineEvent:
        if isinstance(event, Delta) and count == PLACE:
            return replace(event, text=text, token_ids=struct.pack("<I", token) + event.token_ids[4:])
        return event

    return edit


@pytest.mark.parametrize("streamed", [False, True])
def test_a_token_that_was_exchanged(
    glass: GlassAppliance,
    policy: Policy,
    lying: Callable[..., None],
    spelled: dict[str, int],
    tmp_path: Path,
    streamed: bool,
) -> None:
    body = {**BASE, "stream": streamed}
    honest = audited(glass, policy, tmp_path / "honest", CHAT, body)
    assert honest.outcome is Outcome.REPRODUCED, honest
    lying(event=exchanged(" London", spelled[" London"]))
    difference = found(audited(glass, policy, tmp_path / "lie", CHAT, body))
    assert (difference.what, difference.place) == ("token", {"choice": 0, "token": PLACE})
    assert difference.answer == {"token_id": spelled[" London"], "text": " London"}
    assert isinstance(difference.replay, dict)
    assert difference.replay["text"] in (tmp_path / "honest" / "response").read_text()
    assert difference.replay["token_id"] != spelled[" London"]
    printed = run_program("appliance", "replay", str(tmp_path / "lie"), "--model", MODEL)
    assert printed.returncode == 10
    assert " London" in printed.stdout
    assert "London" not in printed.stderr


def test_another_seed_than_the_one_that_was_drawn(
    glass: GlassAppliance, policy: Policy, lying: Callable[..., None], tmp_path: Path
) -> None:
    lying(job=lambda job: replace(job, sampling=replace(job.sampling, seed=job.sampling.seed ^ 1)))
    body = {**BASE, "temperature": 1.2, "max_tokens": 32, "n": 2, "stream": True}
    difference = found(audited(glass, policy, tmp_path / "seed", CHAT, body))
    assert difference.what == "token"
    assert difference.answer != difference.replay


def test_a_system_prompt_that_nobody_sent(
    glass: GlassAppliance, policy: Policy, lying: Callable[..., None], tmp_path: Path
) -> None:
    """Told of in the receipt it is another prompt; hidden, it shows in the tokens."""

    def order(job: GenerationJob) -> GenerationJob:
        assert isinstance(job.prompt, tuple)
        return replace(job, prompt=(ChatMessage(role="system", content="Answer in Latin, at length."), *job.prompt))

    body = {**BASE, "max_tokens": 32}
    lying(job=order)
    stated = found(audited(glass, policy, tmp_path / "stated", CHAT, body))
    assert (stated.what, stated.place) == ("prompt", {"fact": "text"})
    ready: list[PromptReady] = []

    def hide(_: int, event: EngineEvent) -> EngineEvent:
        return ready[0] if isinstance(event, PromptReady) else event

    async def true_prompt() -> None:
        engine = glass.appliance.service.models[MODEL].engine
        job = GenerationJob(
            job_id=bytes(16),
            prompt=(ChatMessage(role="user", content=QUESTION[0]["content"]),),
            sampling=made_of["sampling"],
            template_date=made_of["date"],
        )
        async for event in engine._engine.generate(job):  # type: ignore[attr-defined]
            if isinstance(event, PromptReady):
                ready.append(event)
                break

    made_of: dict[str, Any] = {}

    def note(job: GenerationJob) -> GenerationJob:
        made_of.update(sampling=job.sampling, date=job.template_date)
        return order(job)

    lying(job=note)
    ask(glass.url, policy, tmp_path / "noted", CHAT, body)
    asyncio.run_coroutine_threadsafe(true_prompt(), glass._loop).result(30)
    lying(job=order, event=hide)
    hidden = found(audited(glass, policy, tmp_path / "hidden", CHAT, body))
    assert hidden.what == "token"


def test_an_answer_that_was_cut(
    glass: GlassAppliance, policy: Policy, lying: Callable[..., None], tmp_path: Path
) -> None:
    ended: list[int] = []

    def cut(count: int, event: EngineEvent) -> EngineEvent | None:
        if isinstance(event, Delta) and count >= PLACE:
            ended.append(count)
            return None
        return replace(event, reason="stop") if isinstance(event, Finished) else event

    lying(event=cut)
    difference = found(audited(glass, policy, tmp_path / "cut", CHAT, BASE))
    assert ended
    assert (difference.what, difference.place, difference.answer) == ("token", {"choice": 0, "token": PLACE}, None)


def test_words_behind_the_end(
    glass: GlassAppliance, policy: Policy, lying: Callable[..., None], spelled: dict[str, int], tmp_path: Path
) -> None:
    """The model ends its answer at once; what was signed says something in place of the end token."""

    def more(count: int, event: EngineEvent) -> EngineEvent:
        if isinstance(event, Delta) and not event.text:
            return replace(event, text=" not", token_ids=struct.pack("<I", spelled[" not"]))
        return event

    lying(event=more)
    difference = found(audited(glass, policy, tmp_path / "more", CHAT, {**BASE, "logit_bias": {"2": 100}}))
    assert (difference.what, difference.place) == ("token", {"choice": 0, "token": 0})
    assert difference.replay == {"token_id": 2, "text": ""}
    assert difference.answer == {"token_id": spelled[" not"], "text": " not"}


def test_a_probability_that_was_embellished(
    glass: GlassAppliance, policy: Policy, lying: Callable[..., None], tmp_path: Path
) -> None:
    """By the least that a number can change, in one of several choices of a stream."""

    def embellish(count: int, event: EngineEvent) -> EngineEvent:
        if isinstance(event, Delta) and count == PLACE and event.logprobs:
            entry = event.logprobs[0]
            assert entry.logprob is not None
            better = math.nextafter(entry.logprob, 0.0)
            return replace(event, logprobs=(replace(entry, logprob=better), *event.logprobs[1:]))
        return event

    lying(event=embellish)
    body = {**BASE, "logprobs": True, "temperature": 1.0, "n": 2, "stream": True}
    difference = found(audited(glass, policy, tmp_path / "probability", CHAT, body))
    assert difference.what == "log probability"
    assert (difference.place["choice"], difference.place["token"]) == (0, PLACE)
    assert isinstance(difference.answer, float)
    assert isinstance(difference.replay, float)
    assert difference.answer > difference.replay


def test_a_refusal_of_what_is_no_fault(glass: GlassAppliance, policy: Policy, tmp_path: Path) -> None:
    """A model that the attested claims list cannot be unknown."""
    models: dict[str, ServedModel] = glass.appliance.service.models  # type: ignore[assignment]
    honest = dict(models)
    models["other"] = models.pop(MODEL)
    try:
        asked = ask(glass.url, policy, tmp_path / "unknown", CHAT, BASE)
    finally:
        models.clear()
        models.update(honest)
    assert asked.status == 404
    difference = found(replay_one(tmp_path / "unknown", wanted(MODEL)))
    assert (difference.what, difference.answer) == ("refusal", "model_not_found")


@pytest.fixture(scope="module")
def vectors(minilm_gguf: Path) -> Iterator[GlassAppliance]:
    with GlassAppliance(minilm.NAME) as appliance:
        yield appliance


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_a_number_of_a_vector(vectors: GlassAppliance, tmp_path: Path, encoding: str) -> None:
    models: dict[str, ServedModel] = vectors.appliance.service.models  # type: ignore[assignment]

    def bend(_: int, event: Any) -> Any:
        if not isinstance(event, Vector) or event.index != 1:
            return event
        numbers = bytearray(event.numbers)
        numbers[4 * 7] ^= 1
        return replace(event, numbers=bytes(numbers))

    policy = Policy.load(make_policy(tmp_path / "policy", ("--model", minilm.NAME, "--attester", "insecure")))
    honest = models[minilm.NAME]
    models[minilm.NAME] = replace(honest, embedder=Liar(honest.embedder, event=bend))  # type: ignore[arg-type]
    try:
        body = {"model": minilm.NAME, "input": ["one", "two"], "encoding_format": encoding}
        ask(vectors.url, policy, tmp_path / "vector", "/v1/embeddings", body)
    finally:
        models[minilm.NAME] = honest
    verify_saved(tmp_path / "vector", policy)
    difference = found(replay_one(tmp_path / "vector", wanted(minilm.NAME)))
    assert (difference.what, difference.place) == ("vector", {"input": 1, "dimension": 7})
    assert difference.answer != difference.replay


# -- receipts that say themselves that nothing can be said -------------------------------------------------------------

STATED: dict[str, tuple[int, dict[str, object], Reason]] = {
    "not exact": (names.CLAIM_EXECUTION, {"exact": False}, Reason.NOT_EXACT),
    "another arithmetic": (names.CLAIM_ENGINE, {"arithmetic": "attested-999"}, Reason.OTHER_ARITHMETIC),
    "bits of its own": (names.CLAIM_ENGINE, {"arithmetic": "llama.cpp", "digest": bytes(32)}, Reason.OTHER_ARITHMETIC),
    "another device": (names.CLAIM_DEVICE, {"kind": "gpu"}, Reason.UNSUPPORTED),
    "another reading": (names.CLAIM_EXECUTION, {"chat-format": bytes(32)}, Reason.CONFIGURATION_UNKNOWN),
    "another route": (names.CLAIM_REQUEST, {"route": "/v1/other"}, Reason.DAMAGED),
}


@pytest.mark.parametrize("name", STATED)
def test_what_a_receipt_states_against_it(glass: GlassAppliance, policy: Policy, tmp_path: Path, name: str) -> None:
    """Properly signed. Some of it the client would refuse; here the saved receipt is exchanged afterwards."""
    claim, facts, reason = STATED[name]
    directory = tmp_path / "answer"
    ask(glass.url, policy, directory, CHAT, BASE)
    changed = glass.resigned((directory / "receipt").read_bytes(), lambda claims: claims[claim].update(facts))
    (directory / "receipt").write_bytes(changed)
    verdict = replay_one(directory, wanted(MODEL))
    assert (verdict.outcome, verdict.reason) == (Outcome.CANNOT, reason), verdict


@pytest.mark.parametrize(
    ("claim", "facts", "what"),
    [
        (names.CLAIM_PROMPT, {"tokens": bytes(32)}, "prompt"),
        (names.CLAIM_DECODING, {"temperature": 0.5}, "decoding"),
        (names.CLAIM_DECODING, {"max_tokens": 13}, "decoding"),
        (names.CLAIM_EXECUTION, {"template-date": "2001-01-01"}, "execution"),
    ],
)
def test_a_claim_that_is_not_so(
    glass: GlassAppliance, policy: Policy, tmp_path: Path, claim: int, facts: dict[str, object], what: str
) -> None:
    directory = tmp_path / "answer"
    ask(glass.url, policy, directory, CHAT, BASE)
    changed = glass.resigned((directory / "receipt").read_bytes(), lambda claims: claims[claim].update(facts))
    (directory / "receipt").write_bytes(changed)
    difference = found(replay_one(directory, wanted(MODEL)))
    assert (difference.what, difference.place) == (what, {"fact": next(iter(facts))})


def test_a_redacted_receipt(glass: GlassAppliance, policy: Policy, tmp_path: Path) -> None:
    directory = tmp_path / "answer"
    ask(glass.url, policy, directory, CHAT, BASE)
    receipt = (directory / "receipt").read_bytes()
    (directory / "receipt").write_bytes(cose.redacted(receipt, limit_bytes=1 << 16))
    verdict = replay_one(directory, wanted(MODEL))
    assert (verdict.outcome, verdict.reason) == (Outcome.CANNOT, Reason.REDACTED)
