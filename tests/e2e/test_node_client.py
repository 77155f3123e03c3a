"""The official Node client makes its common calls, and gets what the Python client gets.

It knows nothing of attestation, so it talks to the listener without TLS, as a program beside the appliance would.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import minilm
from tests.e2e.programs import MODEL, Served, environment, free_port

HERE = Path(__file__).parent / "node"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
WANTED = ("node", "npm")
MISSING = [program for program in WANTED if shutil.which(program) is None]
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The client as the lock file pins it, installed once for each lock file into the user's cache."""
    lock = (HERE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "attested-inference-tests" / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, place)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        installed = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240, check=False)
        assert installed.returncode == 0, installed.stderr
        (place / "complete").touch()
    return place / "node_modules"


@pytest.fixture(scope="module")
def base_url(workspace: Path, minilm_gguf: Path) -> Iterator[str]:
    """An appliance of two models, with a listener without TLS beside the attested one."""
    assert minilm_gguf.exists()
    address = f"127.0.0.1:{free_port()}"
    arguments = ("--model", MODEL, "--model", minilm.NAME, "--attester", "insecure")
    environ = {"APPLIANCE_SERVER_UNSAFE_PLAIN_HTTP_LISTEN": address}
    with Served(workspace / "plain", arguments=arguments, environ=environ):
        yield f"http://{address}/v1"


@pytest.fixture(scope="module")
def result(base_url: str, node_modules: Path) -> dict[str, Any]:
    """What `check.mjs` printed."""
    ran = subprocess.run(
        ["node", str(HERE / "check.mjs"), base_url, MODEL, minilm.NAME],
        env=environment({"NODE_MODULES_AT": str(node_modules.parent)}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    value: dict[str, Any] = json.loads(ran.stdout)
    return value


@pytest.fixture(scope="module")
def python(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="no-key-configured", max_retries=0) as client:
        yield client


def test_models_chat_and_stream(result: dict[str, Any], python: openai.OpenAI) -> None:
    expected = python.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY)
    assert result["models"] == [MODEL, minilm.NAME]
    assert result["chat"] == result["chatStream"] == expected.choices[0].message.content
    assert expected.usage is not None
    for usage in (result["usage"], result["streamUsage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            expected.usage.prompt_tokens,
            expected.usage.completion_tokens,
            expected.usage.total_tokens,
        )


def test_tools_and_shaped_answers(result: dict[str, Any]) -> None:
    call = result["toolCall"]
    assert (call["finish"], call["name"], set(call["arguments"])) == ("tool_calls", "get_weather", {"city"})
    assert call["arguments"]["city"] in ("Paris", "Rome")
    assert result["toolStream"] == call["arguments"]
    assert result["afterTool"] in ("stop", "length")
    assert result["schema"]["n"] in range(1, 10)


def test_completions(result: dict[str, Any], python: openai.OpenAI) -> None:
    expected = python.completions.create(prompt="One, two, three,", max_tokens=6, **GREEDY)
    assert result["completion"] == result["completionStream"] == expected.choices[0].text


def test_responses(result: dict[str, Any], python: openai.OpenAI) -> None:
    expected = python.responses.create(input="What is the capital of France?", max_output_tokens=12, **GREEDY)
    assert result["response"] == result["responseStream"] == expected.output_text
    assert result["responseStatus"] == ["incomplete", "max_output_tokens", False]
    assert result["responseEvents"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert result["responseCall"]["name"] == "get_weather"
    assert result["responseFollowed"] == "message"


def test_embeddings(result: dict[str, Any], python: openai.OpenAI) -> None:
    expected = python.embeddings.create(model=minilm.NAME, input=["one", "two"])
    assert result["embeddings"] == [vector.embedding for vector in expected.data]


def test_refusals_name_the_field(result: dict[str, Any]) -> None:
    assert result["refusal"] == {
        "status": 400,
        "code": "invalid_field",
        "param": "temperature",
        "name": "BadRequestError",
    }
    assert result["responseRefusal"] == {"status": 400, "code": "invalid_field", "param": "previous_response_id"}
