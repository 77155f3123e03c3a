"""B170: everything that decides how a model behaves is in its identity, and in what receipts say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from appliance.boot.identities import model_facts
from appliance.engine.generation.fake import FakeEngine
from appliance.engine.types import LoadedModel
from appliance.engine.weights.gguf import facts_of, parse_metadata
from client_sdk.wire import digests
from tests.unit.appliance.engine.weights.test_gguf import MINIMAL, gguf

PARTS: dict[str, Any] = {
    "format_name": "gguf",
    "weights": [(10, bytes([1] * 32)), (20, bytes([2] * 32))],
    "tokenizer": bytes([3] * 32),
    "chat_template": bytes([4] * 32),
    "files": [(30, bytes([5] * 32))],
    "adapters": [(40, bytes([6] * 32)), (50, bytes([7] * 32))],
}
CHANGES: list[tuple[str, Any]] = [
    ("format_name", "safetensors"),
    ("weights", [(10, bytes([1] * 32)), (20, bytes([9] * 32))]),
    ("weights", [(11, bytes([1] * 32)), (20, bytes([2] * 32))]),
    ("weights", [(10, bytes([1] * 32))]),
    ("tokenizer", bytes([9] * 32)),
    ("chat_template", bytes([9] * 32)),
    ("chat_template", None),
    ("files", []),
    ("files", [(30, bytes([9] * 32))]),
    ("adapters", []),
    ("adapters", [(40, bytes([9] * 32)), (50, bytes([7] * 32))]),
    ("adapters", list(reversed(PARTS["adapters"]))),
]


@pytest.mark.parametrize(("part", "changed"), CHANGES)
def test_b170_each_part_alone_changes_the_identity(part: str, changed: Any) -> None:
    assert digests.model_identity(**{**PARTS, part: changed}) != digests.model_identity(**PARTS)


def loaded(pairs: dict[str, object], *, chat_template: str | None = None) -> LoadedModel:
    facts = facts_of(parse_metadata(gguf(pairs)), chat_template=chat_template)
    model = FakeEngine().model
    return replace(model, tokenizer_digest=facts.tokenizer_digest, chat_template_digest=facts.chat_template_digest)


SWAPS: dict[str, Callable[[], LoadedModel]] = {
    "tokens": lambda: loaded({**MINIMAL, "tokenizer.ggml.tokens": ["b", "a", "<|end|>"]}),
    "scores": lambda: loaded({**MINIMAL, "tokenizer.ggml.scores": [0.5, -1.5, 0.0]}),
    "first token": lambda: loaded({**MINIMAL, "tokenizer.ggml.add_bos_token": False}),
    "a tokenizer's key more": lambda: loaded({**MINIMAL, "tokenizer.ggml.eos_token_id": 2}),
    "template": lambda: loaded({**MINIMAL, "tokenizer.chat_template": "{{ messages[1].content }}"}),
    "template of the configuration": lambda: loaded(MINIMAL, chat_template="{{ messages[1].content }}"),
    "no template": lambda: loaded({k: v for k, v in MINIMAL.items() if k != "tokenizer.chat_template"}),
    "weights": lambda: replace(loaded(MINIMAL), weights=((1, bytes([9] * 32)),)),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_b170_what_is_swapped_shows_in_the_identity_and_in_the_facts_of_a_receipt(swap: str) -> None:
    """With the same weights under the same name: the name is not the identity (B086), and the weights alone are not."""
    honest, other = model_facts("same name", loaded(MINIMAL)), model_facts("same name", SWAPS[swap]())
    assert other.identity != honest.identity
    assert (other.weights, other.tokenizer, other.chat_template) != (
        honest.weights,
        honest.tokenizer,
        honest.chat_template,
    )
