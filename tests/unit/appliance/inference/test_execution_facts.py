"""What an engine states about the path of an answer always fits its receipt, whatever differs between the choices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.api.schema import MAX_CHOICES
from appliance.errors import EngineFailed
from appliance.inference import sampling
from client_sdk.wire import cbor, cose, names, tools
from client_sdk.wire.receipt import MAX_EXECUTION_FACTS, ReceiptClaims
from tests import cddl
from tests.vectors import honest

PLAIN = [7, 0.5, True, "text", b"\x00" * 32, None]


def facts(choice: int, count: int, text: str = "") -> dict[str, object]:
    """`count` facts of which each differs between any two choices."""
    return {f"{'a-rather-long-name':.<40}{number}": f"{text}{choice}" for number in range(count)}


def test_what_is_shared_is_there_once_and_what_differs_once_for_each_choice() -> None:
    merged = sampling.execution([{"threads": 2, "exact": True, "passes": 1}, {"threads": 2, "exact": 1, "passes": 1}])
    assert merged == {"threads": 2, "exact/0": True, "exact/1": 1, "passes": 1}
    assert sampling.execution([{"a": 1}, {}]) == {"a/0": 1, "a/1": None}


def test_the_most_that_the_most_choices_can_state_fits_a_receipt() -> None:
    """Every fact of every choice differs, all of them are as long as they may be together, and so are those of the
    answer as a whole: how it spells calls and what stands around the reasoning of each choice."""
    assert MAX_CHOICES * sampling.FACTS_PER_CHOICE + sampling.FACTS_PER_ANSWER <= MAX_EXECUTION_FACTS
    worst = [facts(choice, sampling.FACTS_PER_CHOICE, "x" * 52) for choice in range(MAX_CHOICES)]
    stated = sampling.execution(worst)
    assert len(stated) == MAX_CHOICES * sampling.FACTS_PER_CHOICE
    assert 23 << 10 < len(cbor.encode(stated)) <= 24 << 10
    long = "\U0001f600" * tools._MAX_MARK_CHARS
    syntax = tools.CallSyntax(start=long, before=long, middle=long, after=long, between=long, end=long)
    whole: dict[str, object] = {
        tools.FACT_FORMAT: tools.FORMAT_TEMPLATE,
        tools.FACT_SYNTAX: syntax.encode(),
        tools.FACT_MARKS: tools.marks_text([(long, long)] * MAX_CHOICES),
        tools.FACT_REASONING_TOKENS: 1 << 40,
    }
    assert tools.syntax_of(whole) == syntax
    assert tools.marks_of(whole, MAX_CHOICES) == [(long, long)] * MAX_CHOICES
    merged = {**stated, **whole}
    claims = honest.whole_answer()
    assert claims.output is not None
    full = replace(claims, execution=merged, output=claims.output[:1] * MAX_CHOICES)
    assert ReceiptClaims.parse(full.encode()) == full
    header = cose.protected_header(kid=bytes(32), typ=names.TYP_RECEIPT)
    receipt = cose.sign1(protected=header, salt=bytes(32), payload=full.encode(), sign=lambda _: bytes(64))
    cddl.validate("receipt", receipt)
    assert len(receipt) <= names.LIMIT_RECEIPT_BYTES


def test_more_than_that_fails_the_answer_instead_of_its_receipt() -> None:
    for too_much in (
        [facts(0, sampling.FACTS_PER_CHOICE + 1)],
        [{}, facts(1, sampling.FACTS_PER_CHOICE + 1)],
        [facts(0, 1, "x" * 33_000)],
        [facts(choice, sampling.FACTS_PER_CHOICE, "x" * 150) for choice in range(MAX_CHOICES)],
    ):
        with pytest.raises(EngineFailed):
            sampling.execution(too_much)


@pytest.mark.parametrize("value", PLAIN)
def test_every_plain_value_may_be_a_fact(value: object) -> None:
    claims = replace(honest.whole_answer(), execution=sampling.execution([{"fact": value}]))
    assert ReceiptClaims.parse(claims.encode()) == claims
