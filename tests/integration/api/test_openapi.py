"""The OpenAPI description is true: every route is in it, and what schemathesis makes of it is answered as it says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, settings
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from appliance.api import openapi
from tests.integration.api.conftest import Running, StartApi

DOCS = Path(__file__).parents[3] / "docs" / "openapi.json"
EXAMPLES = 25
CHECKS = [
    checks.not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]


def with_the_model_served() -> dict[str, Any]:
    """The description with the one name of a model that is served here, so that requests get further than that."""
    document = copy.deepcopy(openapi.document())
    for schema in document["components"]["schemas"].values():
        if schema.get("additionalProperties") is False and "model" in schema["properties"]:
            schema["properties"]["model"] = {"const": "fake"}
    return document


@schemathesis.serializer("application/cbor")
def as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


SCHEMA = schemathesis.openapi.from_dict(with_the_model_served())
# Others are answered with 501 before they are a request (RFC 9110, 15.6.2): test_http_framing.
SCHEMA.config.phases.coverage.unexpected_methods = {"get", "head", "post", "put", "patch", "delete", "options"}
SCHEMA.config.checks.negative_data_rejection.expected_statuses = ["400", "404", "405", "408", "413", "415"]


@pytest.fixture(scope="module")
def url(shared: Running) -> str:
    return f"http://127.0.0.1:{shared.plain_port}"


@SCHEMA.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_described(case: Any, url: str) -> None:
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=20)


def test_every_route_is_described_and_every_description_is_a_route(shared: Running) -> None:
    described = {
        (method.upper(), path) for path, operations in openapi.document()["paths"].items() for method in operations
    }
    assert described == served(shared)


def served(running: Running) -> set[tuple[str, str]]:
    return {
        (method, route.path) for route in running.app.routes if isinstance(route, APIRoute) for method in route.methods
    }


def test_the_document_in_docs_is_the_one_served(shared: Running) -> None:
    with shared.connect() as client:
        reply = client.ask("GET", "/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == DOCS.read_bytes(), "run: python -m scripts.write_openapi"


def test_it_is_the_same_whatever_is_configured_and_needs_no_key(api: StartApi) -> None:
    running = api(keys=True)
    with running.connect() as client:
        assert client.ask("GET", "/openapi.json").body == DOCS.read_bytes()


def test_a_refused_method_names_those_that_are_taken(shared: Running) -> None:
    with shared.connect() as client:
        reply = client.ask("GET", "/v1/responses")
        assert (reply.error, reply.headers["allow"]) == ((405, "method_not_allowed", None), "POST")
