"""docs/errors.md lists every rejection code, once, under the class that carries it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from client_sdk.checks import error_class
from client_sdk.errors import (
    AuthenticityError,
    FreshnessError,
    MalformedError,
    PolicyError,
    Rejection,
    VerificationError,
)

DOCUMENT = (Path(__file__).parents[3] / "docs" / "errors.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([A-Z0-9_]+)` \| (.+) \| (.+) \|$", re.MULTILINE)


def section(title: str) -> list[str]:
    body = DOCUMENT.split(f"\n## {title}")[1].split("\n## ")[0]
    return [row[0] for row in ROW.findall(body)]


def test_every_code_is_listed_once_in_the_order_of_the_enumeration() -> None:
    assert [row[0] for row in ROW.findall(DOCUMENT)] == [code.value for code in Rejection]


def test_every_row_has_a_cause_and_a_next_step() -> None:
    for code, cause, next_step in ROW.findall(DOCUMENT):
        assert cause.endswith("."), code
        assert next_step.endswith("."), code


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("Malformed", MalformedError),
        ("Authenticity", AuthenticityError),
        ("Freshness", FreshnessError),
        ("Policy", PolicyError),
        ("Streams", AuthenticityError),
    ],
)
def test_sections_are_the_classes(title: str, kind: type[VerificationError]) -> None:
    codes = section(title)
    assert codes
    assert {error_class(Rejection(code)) for code in codes} == {kind}


def test_the_receipt_section_names_its_exceptions() -> None:
    classes = {code: error_class(Rejection(code)) for code in section("Receipts")}
    other = {code: kind for code, kind in classes.items() if kind is not AuthenticityError}
    assert other == {
        "RECEIPT_NONCE_MISMATCH": FreshnessError,
        "RECEIPT_TIME": FreshnessError,
        "RECEIPT_CHAIN_GAP": PolicyError,
    }
