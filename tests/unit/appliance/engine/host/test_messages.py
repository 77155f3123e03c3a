"""Events on their way from the worker come out as they went in."""

from __future__ import annotations

import pytest

from appliance.engine.host.channel import ChannelError, decode_body, encode_frame
from appliance.engine.host.messages import pack_event, take, unpack_event
from appliance.engine.types import Begun, Delta, EngineEvent, Finished, PromptReady, TokenLogprob
from appliance.errors import ApplianceError, BadRequest, EngineFailed, NotFound, Unavailable

JOB = bytes(16)


def through(event: EngineEvent | ApplianceError) -> EngineEvent | ApplianceError:
    message = decode_body(encode_frame(pack_event(JOB, event))[4:])
    assert take(message, "id", bytes) == JOB
    return unpack_event(message)


@pytest.mark.parametrize(
    "event",
    [
        PromptReady(
            prompt_text="Hi", token_ids=b"\1\0\0\0", max_tokens=3, execution={"threads": 1, "draft-model": b"d"}
        ),
        Begun(execution={"cached-prompt-tokens": 17}),
        Delta(text="a", token_ids=b"\2\0\0\0"),
        Delta(text="", token_ids=b"", logprobs=(TokenLogprob(token=b"a", logprob=-0.5, top=((b"b", -1.5),)),)),
        Finished(reason="length", execution={"exact": True}),
    ],
)
def test_events(event: EngineEvent) -> None:
    assert through(event) == event


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("invalid_sampling", "top_k is odd", param="top_k"),
        Unavailable("insufficient_memory", "1 MiB are available", retry_after_s=5),
        EngineFailed("engine_failed", "it failed"),
    ],
)
def test_errors_keep_their_kind_their_parameter_and_when_to_come_again(error: ApplianceError) -> None:
    back = through(error)
    assert type(back) is type(error)
    assert isinstance(back, ApplianceError)
    assert (back.code, back.message, back.param, back.retry_after_s) == (
        error.code,
        error.message,
        error.param,
        error.retry_after_s,
    )


def test_an_error_that_no_engine_may_report_is_a_failure_of_the_engine() -> None:
    assert type(through(NotFound("model_not_found", "none"))) is EngineFailed


def test_an_unknown_event_ends_the_channel() -> None:
    with pytest.raises(ChannelError, match="unknown kind"):
        unpack_event({"t": "else", "id": JOB})
