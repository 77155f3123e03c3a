"""Prometheus metrics: counts and levels, never content, never an identity."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    """All series of one appliance, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"appliance_{name}", text, labels, registry=self._registry)

        self._answers = counter("answers", "Answers by terminal status", ("status",))
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens evaluated")
        self._output_tokens = counter("output_tokens", "Tokens generated")
        self.refused_busy = counter("refused_busy", "Requests refused because all places were taken")
        self.unauthorized = counter("unauthorized", "Requests without a valid API key")
        self.attestations = counter("attestations", "Attestation answers", ("form",))

    def count_answer(self, status: str, *, prompt_tokens: int, output_tokens: int) -> None:
        self._answers.labels(status).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(output_tokens)

    def level(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read when the metrics are."""
        Gauge(f"appliance_{name}", text, registry=self._registry).set_function(read)

    def render(self) -> bytes:
        """The exposition text (Prometheus text format 0.0.4)."""
        return generate_latest(self._registry)
