"""Errors have one shape; metrics have no content and no identity."""

from __future__ import annotations

import json

import pytest

from appliance import errors
from appliance.errors import ApplianceError, InternalError
from appliance.metrics import Metrics

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ApplianceError)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not InternalError])
def test_every_error_has_openai_shape(kind: type[ApplianceError]) -> None:
    error = kind("some_code", "Prose with \n and é.", param="a.b")
    body = error.body()
    assert b"\n" not in body
    assert json.loads(body) == {
        "error": {"message": "Prose with \n and é.", "type": kind.kind, "param": "a.b", "code": "some_code"}
    }
    assert 400 <= kind.status <= 599


def test_an_internal_error_is_always_the_same_bytes() -> None:
    assert InternalError().body() == InternalError().body()
    assert json.loads(InternalError().body())["error"]["code"] == "internal_error"


def test_counters_and_levels() -> None:
    metrics = Metrics()
    metrics.count_answer("complete", prompt_tokens=3, output_tokens=4)
    metrics.count_answer("complete", prompt_tokens=1, output_tokens=0)
    value = 5.0
    metrics.level("ready", "text", lambda: value)
    text = metrics.render().decode()
    assert 'appliance_answers_total{status="complete"} 2.0' in text
    assert "appliance_prompt_tokens_total 4.0" in text
    assert "appliance_ready 5.0" in text
    value = 6.0
    assert "appliance_ready 6.0" in metrics.render().decode()


def test_two_appliances_in_one_process_do_not_share_counters() -> None:
    one, other = Metrics(), Metrics()
    one.refused_busy.inc()
    assert "appliance_refused_busy_total 0.0" in other.render().decode()
