"""Vectors of a real embedding model against its original weights, and what the engine does with hostile inputs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from appliance.engine.embedding.jobs import (
    EmbeddingJob,
    InputsReady,
    TextInput,
    Vector,
)
from appliance.engine.embedding.scheduler import normalized
from appliance.engine.embedding.supervisor import SupervisedEmbedder
from appliance.engine.llama_cpp.embedding import EmbeddingOptions, EmbeddingRuntime
from appliance.engine.settings import EngineSettings, RestartPolicy
from appliance.engine.types import Finished, GenerationJob, SamplingParams, TokenPrompt
from appliance.errors import ApplianceError, BadRequest, BootError, EngineFailed
from tests import minilm

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

TEXTS = (
    "hello",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "Confidential computing protects data in use by performing computation in a hardware-based environment.",
    "What is the capital of France?",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "1234567890 -17.5e3 0x7f",
    "!!! ??? ... ;;; ,,,",
    "Straße, Äpfel und Öl",
    "El niño comió piñas en São Paulo",
    "Ελληνικά γράμματα",
    "Быстрая лиса",
    "日本語の文章です",
    "你好,世界",
    "한국어 문장",
    "שלום עולם",
    "مرحبا بالعالم",
    "naïve café résumé déjà vu",
    "zero\u200bwidth and non\u00a0breaking",
    "smile \U0001f600 and rocket \U0001f680",
    "UPPER lower MiXeD CamelCase snake_case kebab-case",
    "tabs\tand\nnew lines\r\n  and   many    blanks",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "The receipt binds every number of every vector. " * 20,
    "word " * 400,
)


def settings(path: Path, pooling: str = "auto", context_length: int | None = None) -> EngineSettings:
    data = path.read_bytes()
    return EngineSettings(
        model_paths=(path,),
        sha256=hashlib.sha256(data).digest(),
        size_bytes=len(data),
        worker_python=sys.executable,
        context_length=context_length,
        threads=1,
        pooling=pooling,
        restart=RestartPolicy(initial_s=0.05, stall_s=60.0),
    )


@pytest.fixture(scope="module")
def reference(minilm_originals: Path) -> minilm.Reference:
    return minilm.Reference(minilm_originals)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(minilm_gguf: Path) -> AsyncIterator[SupervisedEmbedder]:
    embedder = SupervisedEmbedder(settings(minilm_gguf))
    await embedder.start(lambda *_: None)
    yield embedder
    await embedder.stop(2.0)


async def embed(
    engine: SupervisedEmbedder, *inputs: TextInput, dimensions: int | None = None
) -> tuple[InputsReady, list[np.ndarray]]:
    ready: InputsReady | None = None
    vectors: dict[int, np.ndarray] = {}
    async for event in engine.embed(EmbeddingJob(job_id=os.urandom(16), inputs=inputs, dimensions=dimensions)):
        if isinstance(event, InputsReady):
            ready = event
        elif isinstance(event, Vector):
            vectors[event.index] = np.frombuffer(event.numbers, dtype="<f4")
        else:
            assert isinstance(event, Finished)
    assert ready is not None
    return ready, [vectors[index] for index in range(len(inputs))]


def ids(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


async def test_vectors_are_those_of_the_original_weights(
    engine: SupervisedEmbedder, reference: minilm.Reference
) -> None:
    ready, vectors = await embed(engine, *TEXTS)
    assert (ready.native, ready.dimensions, ready.pooling) == (384, 384, "mean")
    assert ready.texts == TEXTS
    for text, packed, vector in zip(TEXTS, ready.token_ids, vectors, strict=True):
        assert ids(packed) == reference.tokens(text), text[:40]
        assert float(vector @ reference.vector(text)) >= 0.999, text[:40]
        assert abs(float(np.linalg.norm(vector.astype(np.float64))) - 1.0) < 1e-6


async def test_what_else_is_asked_for_changes_no_bit(engine: SupervisedEmbedder) -> None:
    alone = [(await embed(engine, text))[1][0] for text in TEXTS[:6]]
    _, together = await embed(engine, *TEXTS[:6])
    runs = await asyncio.gather(*(embed(engine, text, "something else") for text in TEXTS[:6]))
    for solo, batched, (_, beside) in zip(alone, together, runs, strict=True):
        assert solo.tobytes() == batched.tobytes() == beside[0].tobytes()


async def test_token_ids_are_evaluated_as_they_are(engine: SupervisedEmbedder, reference: minilm.Reference) -> None:
    tokens = tuple(reference.tokens(TEXTS[2]))
    ready, (vector,) = await embed(engine, TokenPrompt(tokens=tokens))
    assert ids(ready.token_ids[0]) == list(tokens)
    assert vector.tobytes() == (await embed(engine, TEXTS[2]))[1][0].tobytes()
    _, (bare,) = await embed(engine, TokenPrompt(tokens=tokens[1:-1]))
    assert bare.tobytes() != vector.tobytes()


async def test_fewer_dimensions_are_the_first_ones_at_length_one(engine: SupervisedEmbedder) -> None:
    _, (whole,) = await embed(engine, TEXTS[3])
    ready, (cut,) = await embed(engine, TEXTS[3], dimensions=64)
    assert (ready.native, ready.dimensions, len(cut)) == (384, 64, 64)
    expected = whole[:64].astype(np.float64) / np.linalg.norm(whole[:64].astype(np.float64))
    assert np.abs(cut - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("inputs", "dimensions", "code", "param", "numbers"),
    [
        (("fits", "word " * 511), None, "context_length_exceeded", "input[1]", ("513", "512")),
        (("x",), 385, "invalid_dimensions", "dimensions", ("384", "385")),
        ((TokenPrompt(tokens=(101, 40000, 102)),), None, "invalid_token", "input", ()),
        (("word " * 500,) * 600, None, "too_many_tokens", "input", ("300000",)),
    ],
)
async def test_refusals_name_the_input_and_their_numbers(
    engine: SupervisedEmbedder,
    inputs: tuple[TextInput, ...],
    dimensions: int | None,
    code: str,
    param: str,
    numbers: tuple[str, ...],
) -> None:
    with pytest.raises(BadRequest) as caught:
        await embed(engine, *inputs, dimensions=dimensions)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert all(number in caught.value.message for number in numbers)
    assert "word" not in caught.value.message
    await embed(engine, "still there")


async def test_b151_every_length_up_to_the_context_works_and_none_beyond_is_cut(
    engine: SupervisedEmbedder, reference: minilm.Reference
) -> None:
    for words in (62, 63, 126, 509, 510):
        text = "word " * words
        ready, (vector,) = await embed(engine, text)
        assert len(ready.token_ids[0]) // 4 == words + 2
        assert float(vector @ reference.vector(text)) >= 0.999
    with pytest.raises(BadRequest, match="513 tokens"):
        await embed(engine, "word " * 511)


async def test_control_texts_stay_text(engine: SupervisedEmbedder) -> None:
    ready, _ = await embed(engine, "a [SEP] b [CLS]")
    inner = ids(ready.token_ids[0])[1:-1]
    assert not {100, 101, 102, 103, 0} & set(inner)


async def test_one_long_list_does_not_hold_up_a_short_one(engine: SupervisedEmbedder) -> None:
    order: list[str] = []

    async def run(name: str, *inputs: str) -> None:
        await embed(engine, *inputs)
        order.append(name)

    long = asyncio.create_task(run("long", *["word " * 100] * 30))
    await asyncio.sleep(0.2)
    await run("short", "hello")
    await long
    assert order == ["short", "long"]


async def test_leaving_ends_the_work(engine: SupervisedEmbedder) -> None:
    job = EmbeddingJob(job_id=os.urandom(16), inputs=("word " * 500,) * 200)
    async with aclosing(engine.embed(job)) as events:
        async for event in events:
            if isinstance(event, Vector):
                break
    assert (engine.active, engine.queued) == (0, 0)
    async with asyncio.timeout(20):
        await embed(engine, "the next one")


async def test_a_lost_worker_fails_its_jobs_and_comes_back_with_the_same_bits(engine: SupervisedEmbedder) -> None:
    restarts = engine.restarts
    _, (before,) = await embed(engine, TEXTS[4])
    job = EmbeddingJob(job_id=os.urandom(16), inputs=("word " * 500,) * 50)

    async def run() -> None:
        async for event in engine.embed(job):
            if isinstance(event, Vector) and engine.worker_pid is not None:
                os.kill(engine.worker_pid, signal.SIGSEGV)

    with pytest.raises(EngineFailed):
        await run()
    _, (after,) = await embed(engine, TEXTS[4])
    assert before.tobytes() == after.tobytes()
    assert engine.restarts > restarts


async def test_an_embedding_model_generates_nothing(engine: SupervisedEmbedder) -> None:
    job = GenerationJob(
        job_id=os.urandom(16),
        prompt="Once",
        sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=1, max_tokens=4),
        template_date="2026-01-01",
    )
    with pytest.raises(BadRequest) as caught:
        engine.generate(job)
    assert (caught.value.code, caught.value.param) == ("model_does_not_generate", "model")


async def test_a_model_of_text_makes_vectors_where_the_operator_says_how(smollm2: Path) -> None:
    decoder = SupervisedEmbedder(settings(smollm2, "last", context_length=64))
    await decoder.start(lambda *_: None)
    try:
        ready, vectors = await embed(decoder, "one", "two")
        assert (ready.pooling, ready.native) == ("last", 576)
        assert vectors[0].tobytes() != vectors[1].tobytes()
    finally:
        await decoder.stop(2.0)


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
async def test_a_causal_model_reads_an_input_in_parts_and_at_once_alike(smollm2: Path, pooling: str) -> None:
    """But for the rounding of its quantized products, which depends on the number of rows."""
    tokens = [1000 + 7 * index for index in range(150)]
    vectors = []
    for rows in (160, 64):
        with smollm2.open("rb") as file:
            options = EmbeddingOptions(
                fd=file.fileno(), context_length=160, rows=rows, inputs=1, pooling=pooling, threads=1
            )
            runtime = EmbeddingRuntime(options, progress=lambda _: None)
        assert runtime.causal
        vectors.append(np.frombuffer(normalized(runtime.embed([tokens])[0], 576) or b"", dtype="<f4"))
    whole, parts = vectors
    assert float(whole @ parts) > 0.999


async def test_an_input_longer_than_one_evaluation(smollm2: Path) -> None:
    engine = SupervisedEmbedder(settings(smollm2, "mean", context_length=530))
    await engine.start(lambda *_: None)
    try:
        ready, _ = await embed(engine, TokenPrompt(tokens=tuple(1000 + 7 * index for index in range(520))))
        assert (ready.execution["n-batch"], len(ready.token_ids[0]) // 4) == (512, 520)
    finally:
        await engine.stop(2.0)


async def test_a_model_that_nothing_says_how_to_pool_is_refused(minilm_originals: Path, tmp_path: Path) -> None:
    path = tmp_path / "unpooled.gguf"
    minilm.write_gguf(minilm_originals, path, pooling=None)
    with pytest.raises(BootError, match=r"set models\.pooling"):
        await SupervisedEmbedder(settings(path)).start(lambda *_: None)
    engine = SupervisedEmbedder(settings(path, "cls"))
    await engine.start(lambda *_: None)
    try:
        ready, _ = await embed(engine, "hello")
        assert ready.pooling == "cls"
    finally:
        await engine.stop(2.0)


async def test_what_does_not_fit_into_memory_is_refused_with_its_numbers(
    minilm_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.engine.host.supervisor.available_bytes", lambda _read: 100 << 20)
    with pytest.raises(BootError, match=r"not enough memory: .* MiB, and 100 MiB are available"):
        await SupervisedEmbedder(settings(minilm_gguf)).start(lambda *_: None)


async def test_errors_have_no_input_in_them(engine: SupervisedEmbedder) -> None:
    with pytest.raises(ApplianceError) as caught:
        await embed(engine, "canary-7f3a " * 400)
    assert "canary" not in str(caught.value)
