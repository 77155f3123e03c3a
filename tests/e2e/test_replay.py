"""Answers that one server made on two threads, in company and by the way of guesses, with the best kernels there are;
replayed alone, on one thread, with the kernels of every processor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.replay.verdict import Outcome, Reason, Verdict
from client_sdk import Appliance, Policy
from client_sdk.offline.saved import save_answer
from tests import minilm
from tests.e2e.programs import MODEL, Served, make_policy, run_program
from tests.e2e.replays import Asked, ask_together, replay_one, replay_together, wanted

pytestmark = pytest.mark.model
CHAT, TEXT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
FLAT_TOOLS = [{"type": "function", "name": "get_weather", "parameters": CITY}]
STORY = [{"role": "user", "content": "Tell a short story about a lighthouse, an owl and 灯台 🦉."}]
REPEAT = [{"role": "user", "content": "Repeat after me, again and again: one two three four one two three four."}]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": STORY, "max_tokens": 24, **fields}


def text(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": MODEL, "prompt": prompt, "max_tokens": 12, **fields}


def response(**fields: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"model": MODEL, "input": "Name three colours.", "max_output_tokens": 16, **fields}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
ANSWERS: dict[str, tuple[str, Any]] = {
    "sampled": chat(max_tokens=128),
    "greedy": chat(temperature=0),
    "streamed": chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": True}),
    "guessed ahead": chat(messages=REPEAT, temperature=0, max_tokens=48),
    "seeded": chat(seed=4_294_967_290, temperature=1.4, n=3),
    "n": chat(n=3),
    "n streamed": chat(n=3, stream=True),
    "parameters": chat(
        top_p=0.9, top_k=40, min_p=0.02, repeat_penalty=1.2, presence_penalty=0.4, logit_bias={"17": -5}
    ),
    "deterministic": chat(deterministic=True),
    "stop": chat(temperature=0, stop=["e", "the"], max_tokens=64),
    "stop streamed": chat(stop=[" a", "lighthouse is"], max_tokens=64, stream=True),
    "logprobs": chat(logprobs=True, top_logprobs=5, n=2),
    "logprobs streamed": chat(logprobs=True, top_logprobs=2, stream=True),
    "tool": chat(tools=TOOLS, tool_choice="required", max_tokens=64),
    "tool streamed": chat(tools=TOOLS, tool_choice="required", max_tokens=64, stream=True),
    "tool cut short": chat(tools=TOOLS, tool_choice="required", max_tokens=9),
    "tool allowed": chat(tools=TOOLS),
    "schema": chat(response_format=SCHEMA, max_tokens=64),
    "schema streamed": chat(response_format=SCHEMA, max_tokens=64, stream=True),
    "json": chat(response_format={"type": "json_object"}, max_tokens=32),
    "text": text("The lighthouse", temperature=0),
    "texts": text(["One day", "The owl", "Über den"], n=2, echo=True, logprobs=3),
    "texts streamed": text(["One day", "The owl"], stream=True, echo=True, logprobs=1),
    "tokens": text([504, 1020, 253], seed=7),
    "response": response(),
    "response streamed": response(stream=True, stream_options={"include_obfuscation": True}),
    "response with a tool": response(tools=FLAT_TOOLS, tool_choice="required", max_output_tokens=64),
    "tokenized": ("/v1/tokenize", {"model": MODEL, "messages": STORY}),
    "detokenized": ("/v1/detokenize", {"model": MODEL, "tokens": [504, 1020, 253]}),
}
REFUSED: dict[str, tuple[str, Any]] = {
    "context": text("word " * 9000),
    "no room": text("word", max_tokens=4096),
    "unknown token": text([10_000_000]),
    "vectors": (EMBEDDINGS, {"model": MODEL, "input": "text"}),
    "unknown field": chat(what=1),
    "unusable schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}
    ),
    "no JSON": (CHAT, b'{"model":'),
    "unknown model": (CHAT, {"model": "nobody", "messages": STORY}),
}


TWO_THREADS = {"APPLIANCE_ENGINE_THREADS": "2"}


@pytest.fixture(scope="module")
def crowded(workspace: Path) -> Iterator[Served]:
    """A server with other threads than replays have."""
    with Served(workspace / "crowded", environ=TWO_THREADS) as served:
        yield served


@pytest.fixture(scope="module")
def pinned(workspace: Path) -> Policy:
    return Policy.load(make_policy(workspace / "crowded-policy", environ=TWO_THREADS))


@pytest.fixture(scope="module")
def answers(crowded: Served, pinned: Policy, workspace: Path) -> dict[str, Asked]:
    return ask_together(crowded.url, pinned, workspace / "answers", {**ANSWERS, **REFUSED})


@pytest.fixture(scope="module")
def verdicts(answers: dict[str, Asked]) -> dict[str, Verdict]:
    """One engine for all that have a model, and none for the others, which `replay_one` finds out.

    With the kernels that every processor has: the server took the largest that this one has.
    """
    given = wanted(MODEL, threads=1, kernels="avx2")
    without = ("unknown field", "unusable schema", "no JSON", "unknown model")
    directories = {name: asked.directory for name, asked in answers.items() if name not in without}
    found = replay_together(directories, given)
    return {**found, **{name: replay_one(answers[name].directory, given) for name in without}}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_reproduced(answers: dict[str, Asked], verdicts: dict[str, Verdict], name: str) -> None:
    assert answers[name].status == 200, answers[name].body
    verdict = verdicts[name]
    assert verdict.outcome is Outcome.REPRODUCED, verdict
    assert verdict.compared == ("status", "prompt", "decoding", "output", "execution", "body")


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_reproduced(answers: dict[str, Asked], verdicts: dict[str, Verdict], name: str) -> None:
    assert 400 <= answers[name].status < 500
    verdict = verdicts[name]
    assert verdict.outcome is Outcome.REPRODUCED, verdict
    assert verdict.compared == ("status", "body")


def test_the_command_says_it(answers: dict[str, Asked]) -> None:
    directory = str(answers["sampled"].directory)
    printed = run_program("appliance", "replay", directory, "--model", MODEL, "--json")
    assert printed.returncode == 0, printed.stdout + printed.stderr
    said = json.loads(printed.stdout)
    assert (said["version"], said["verdict"], said["exit"], said["reason"], said["difference"]) == (
        1,
        "reproduced",
        0,
        None,
        None,
    )
    assert said["receipt"]["model"] == MODEL
    assert said["receipt"]["tokens"] == json.loads(answers["sampled"].body)["usage"]["completion_tokens"]
    assert said["engine"]["threads"] >= 1
    asked = STORY[0]["content"][:20]
    assert asked not in printed.stdout + printed.stderr


def test_the_command_in_words(answers: dict[str, Asked], smollm2: Path) -> None:
    directory = str(answers["response streamed"].directory)
    printed = run_program("appliance", "replay", directory, "--model", str(smollm2), "--kernels", "plain")
    assert printed.returncode == 0, printed.stdout + printed.stderr
    assert printed.stdout.startswith("reproduced\n")


# -- reasoning, and a template of the operator's -----------------------------------------------------------------------

TEMPLATE = Path(__file__).parents[1] / "templates" / "fenced.jinja"
CONFIG = f"""
[attestation]
attester = "insecure"

[[models]]
name = "{MODEL}"
context_length = 1024
chat_template_file = "{TEMPLATE}"
reasoning_tags = ["<think>", "."]
"""
THOUGHTFUL: dict[str, tuple[str, Any]] = {
    "reasoning": chat(max_tokens=60, seed=3, logprobs=True),
    "reasoning streamed": chat(max_tokens=60, stream=True, n=2),
    "reasoning and a tool": chat(max_tokens=120, tools=TOOLS, tool_choice="required", seed=5),
    "reasoning and a tool streamed": chat(max_tokens=120, tools=TOOLS, tool_choice="required", seed=5, stream=True),
    "reasoning and a schema": chat(max_tokens=120, response_format=SCHEMA),
    "response with reasoning": response(max_output_tokens=60),
    "text without": text("The lighthouse"),
    "refused": text("word", max_tokens=1024),
    "too long": text("word " * 1500),
}


@pytest.fixture(scope="module")
def configured(workspace: Path) -> Path:
    file = workspace / "thoughtful.toml"
    file.write_text(CONFIG)
    return file


@pytest.fixture(scope="module")
def thoughtful(workspace: Path, configured: Path) -> Iterator[dict[str, Asked]]:
    arguments = ("--config", str(configured))
    policy = Policy.load(make_policy(workspace / "thoughtful-policy", arguments))
    with Served(workspace / "thoughtful", arguments=arguments) as served:
        yield ask_together(served.url, policy, workspace / "thoughts", THOUGHTFUL)


def test_reasoning_is_reproduced_by_what_the_receipt_says(thoughtful: dict[str, Asked]) -> None:
    directories = {name: asked.directory for name, asked in thoughtful.items()}
    found = replay_together(directories, wanted(MODEL, chat_template=TEMPLATE))
    assert {name: str(v) for name, v in found.items() if v.outcome is not Outcome.REPRODUCED} == {}
    said = json.loads(thoughtful["reasoning"].body)["choices"][0]["message"]
    assert said["reasoning_content"], "else this tests nothing"


def test_the_configuration_stands_for_what_it_says(thoughtful: dict[str, Asked], configured: Path) -> None:
    directory = str(thoughtful["reasoning and a tool"].directory)
    arguments = ("appliance", "replay", directory, "--model", MODEL, "--json")
    assert run_program(*arguments, "--config", str(configured)).returncode == 0
    without = run_program(*arguments)
    assert without.returncode == 20
    assert json.loads(without.stdout)["reason"] == "other-chat-template"
    other = configured.with_name("other.toml")
    other.write_text(CONFIG.replace("1024", "512"))
    refused = run_program(*arguments, "--config", str(other))
    assert (refused.returncode, json.loads(refused.stdout)["reason"]) == (20, "other-configuration")
    other.write_text("[nonsense]\n")
    assert run_program(*arguments, "--config", str(other)).returncode == 2


# -- vectors -----------------------------------------------------------------------------------------------------------

VECTORS: dict[str, tuple[str, Any]] = {
    "one": (EMBEDDINGS, {"model": minilm.NAME, "input": "The receipt binds every number."}),
    "many": (EMBEDDINGS, {"model": minilm.NAME, "input": ["one", "日本語の文章です", "smile 😀"], "dimensions": 32}),
    "base64": (EMBEDDINGS, {"model": minilm.NAME, "input": [[101, 2023, 102]], "encoding_format": "base64"}),
    "dimensions": (EMBEDDINGS, {"model": minilm.NAME, "input": "x", "dimensions": 385}),
    "long": (EMBEDDINGS, {"model": minilm.NAME, "input": "word " * 600}),
    "generation": (TEXT, {"model": minilm.NAME, "prompt": "x", "max_tokens": 1}),
}


def test_vectors_are_reproduced_to_the_last_bit(workspace: Path, minilm_gguf: Path) -> None:
    arguments = ("--model", minilm.NAME, "--attester", "insecure")
    policy = Policy.load(make_policy(workspace / "vectors-policy", arguments, TWO_THREADS))
    with Served(workspace / "vectors", arguments=arguments, environ=TWO_THREADS) as served:
        asked = ask_together(served.url, policy, workspace / "vectors-saved", VECTORS)
    assert [asked[name].status for name in VECTORS] == [200, 200, 200, 400, 400, 400]
    directories = {name: each.directory for name, each in asked.items()}
    found = replay_together(directories, wanted(str(minilm_gguf), threads=1))
    assert {name: str(v) for name, v in found.items() if v.outcome is not Outcome.REPRODUCED} == {}
    assert found["many"].compared == ("status", "prompt", "embedding", "execution", "body")
    other = replay_one(asked["one"].directory, wanted(MODEL))
    assert (other.outcome, other.reason) == (Outcome.CANNOT, Reason.OTHER_WEIGHTS)


# -- what cannot be reproduced -----------------------------------------------------------------------------------------


def test_other_and_missing_weights(answers: dict[str, Asked], smollm2: Path, tmp_path: Path) -> None:
    directory = answers["greedy"].directory
    short, changed = tmp_path / "short.gguf", tmp_path / "changed.gguf"
    weights = smollm2.read_bytes()
    short.write_bytes(weights[:-1])
    changed.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    for model, reason in (
        ("nothing-of-this-name", Reason.WEIGHTS_MISSING),
        (str(tmp_path / "nothing.gguf"), Reason.WEIGHTS_MISSING),
        (str(tmp_path), Reason.WEIGHTS_MISSING),
        (str(short), Reason.OTHER_WEIGHTS),
        (str(changed), Reason.OTHER_WEIGHTS),
    ):
        verdict = replay_one(directory, wanted(model))
        assert (verdict.outcome, verdict.reason) == (Outcome.CANNOT, reason), verdict
    template = replay_one(directory, wanted(MODEL, chat_template=TEMPLATE))
    assert template.reason is Reason.OTHER_CHAT_TEMPLATE


def test_a_deadline_cannot_be_reproduced(crowded: Served, pinned: Policy, tmp_path: Path) -> None:
    kept: list[Any] = []
    with Appliance(crowded.url, policy=pinned, save=kept.append) as appliance:
        route, body = chat(max_tokens=2000)
        headers = {"x-request-timeout": "0.4"}
        assert appliance.http.post(route, json=body, headers=headers).status_code == 408
    save_answer(tmp_path / "late", kept[-1], policy_digest=pinned.digest)
    verdict = replay_one(tmp_path / "late", wanted(MODEL))
    assert (verdict.outcome, verdict.reason) == (Outcome.CANNOT, Reason.INTERRUPTED)


DAMAGES: dict[str, tuple[Callable[[Path], object], Reason]] = {
    "no manifest": (lambda d: (d / "answer.json").unlink(), Reason.DAMAGED),
    "no request": (lambda d: (d / "request").unlink(), Reason.DAMAGED),
    "no response": (lambda d: (d / "response").unlink(), Reason.DAMAGED),
    "no receipt": (lambda d: (d / "receipt").unlink(), Reason.DAMAGED),
    "no attestation": (lambda d: (d / "attestation").unlink(), Reason.DAMAGED),
    "a manifest of lists": (lambda d: (d / "answer.json").write_bytes(b"[" * 60000), Reason.DAMAGED),
    "an empty manifest": (lambda d: (d / "answer.json").write_text('{"version": 1}'), Reason.DAMAGED),
    "another version": (lambda d: (d / "answer.json").write_text('{"version": 2}'), Reason.DAMAGED),
    "a giant manifest": (lambda d: (d / "answer.json").write_bytes(b" " * (1 << 20)), Reason.DAMAGED),
    "a giant receipt": (lambda d: (d / "receipt").write_bytes(bytes(1 << 20)), Reason.DAMAGED),
    "half a receipt": (lambda d: cut(d / "receipt"), Reason.DAMAGED),
    "a receipt of nested arrays": (lambda d: (d / "receipt").write_bytes(b"\xd2" + b"\x81" * 9000), Reason.DAMAGED),
    "half an attestation": (lambda d: cut(d / "attestation"), Reason.DAMAGED),
    "a giant attestation": (lambda d: (d / "attestation").write_bytes(bytes(2 << 20)), Reason.DAMAGED),
    "half a request": (lambda d: cut(d / "request"), Reason.DAMAGED),
    "half a response": (lambda d: cut(d / "response"), Reason.DAMAGED),
    "a changed response": (lambda d: change(d / "response"), Reason.DAMAGED),
    "a changed request": (lambda d: change(d / "request"), Reason.DAMAGED),
    "a changed receipt": (lambda d: change(d / "receipt"), Reason.NOT_AUTHENTIC),
    "a directory for a file": (lambda d: [(d / "request").unlink(), (d / "request").mkdir()], Reason.DAMAGED),
    "a sparse giant": (lambda d: sparse(d / "response"), Reason.DAMAGED),
    "a pipe": (lambda d: pipe(d / "receipt"), Reason.DAMAGED),
}


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(8 << 30)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_directory_has_a_reason(answers: dict[str, Asked], tmp_path: Path, name: str, streamed: bool) -> None:
    directory = tmp_path / "answer"
    shutil.copytree(answers["streamed" if streamed else "greedy"].directory, directory)
    damage, reason = DAMAGES[name]
    damage(directory)
    verdict = replay_one(directory, wanted(MODEL))
    assert (verdict.outcome, verdict.reason) == (Outcome.CANNOT, reason), verdict
    assert verdict.message


def test_wrong_usage_has_a_status_of_its_own(tmp_path: Path) -> None:
    assert run_program("appliance", "replay", str(tmp_path / "nothing"), "--model", MODEL).returncode == 2
    assert run_program("appliance", "replay", str(tmp_path)).returncode == 2
    empty = run_program("appliance", "replay", str(tmp_path), "--model", MODEL, "--json")
    assert (empty.returncode, json.loads(empty.stdout)["reason"]) == (20, "damaged")
