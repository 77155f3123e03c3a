"""An embedding model as the service sees it: the supervised worker of every engine, asked for vectors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

from appliance.engine.embedding.jobs import (
    EmbeddingEvent,
    EmbeddingJob,
    pack_job,
    unpack_embedding_event,
)
from appliance.engine.embedding.pooling import resolve_pooling
from appliance.engine.host.channel import Message
from appliance.engine.host.supervisor import SupervisedEngine
from appliance.engine.settings import most_threads
from appliance.engine.types import EngineEvent, GenerationJob
from appliance.engine.weights.gguf import ModelFacts
from appliance.engine.weights.memory import need
from appliance.errors import ApplianceError, BadRequest, BootError

CAUSAL_ROWS = 512
"""Of one evaluation. A causal model reads a longer input part by part."""

_COPIES = 2  # of every row's logits: llama.cpp computes them for models that have an output layer, wanted or not


class SupervisedEmbedder(SupervisedEngine):
    """`embedding.Embedder`, and `base.Engine` for everything but generation."""

    worker_module = "appliance.engine.embedding.worker"

    def embed(self, job: EmbeddingJob) -> AsyncGenerator[EmbeddingEvent, None]:
        """See `embedding.Embedder.embed`. Closing the generator cancels the job in the worker."""
        return cast(AsyncGenerator[EmbeddingEvent, None], self._events(job.job_id, pack_job(job)))

    def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        """Raises BadRequest."""
        raise BadRequest("model_does_not_generate", "This model makes vectors, no text.", param="model")

    def _read_event(self, message: Message) -> EmbeddingEvent | ApplianceError:
        return unpack_embedding_event(message)

    @property
    def _pooling(self) -> str:
        assert self._facts is not None
        pooling = resolve_pooling(self._settings.pooling, self._facts)
        assert pooling is not None
        return pooling

    @property
    def _rows(self) -> int:
        assert self._facts is not None
        context_length = self._context_length()
        return min(CAUSAL_ROWS, context_length) if self._facts.causal else context_length

    def _check_purpose(self, facts: ModelFacts) -> None:
        if resolve_pooling(self._settings.pooling, facts) is None:
            raise BootError("the model's metadata ask for no vectors: its file has changed since it was looked at")

    def _check_lengths(self, facts: ModelFacts) -> None:
        wanted, threads = self._context_length(), self._settings.threads
        if not 1 < wanted <= facts.training_context_length:
            raise BootError(
                f"context_length {wanted} is outside 2..{facts.training_context_length}, the length of training"
            )
        if threads != "auto" and threads < 1:
            raise BootError("the engine's thread count must be at least 1")

    def _check_memory(self, facts: ModelFacts) -> None:
        wanted = need(
            bytes_per_cell=facts.cell_bytes,
            kv_tokens=self._context_length(),
            n_batch=self._rows,
            vocabulary_size=_COPIES * facts.vocabulary_size,
            cache_bytes=0,
            threads=most_threads(self._settings.threads, self._cores),
        )
        self._check_fits(wanted)

    def _start_message(self) -> Message:
        threads, reason = self._known_threads()
        facts: Message = {
            "flash-attention": True,
            "n-batch": self._rows,
            "context-length": self._context_length(),
        }
        return {
            "t": "load",
            "context_length": self._context_length(),
            "n_batch": self._rows,
            "pooling": self._pooling,
            "threads": threads,
            "threads_reason": reason,
            "cores": self._cores,
            "facts": facts | self._kernels.facts(),
            **self._start_limits(),
        }
