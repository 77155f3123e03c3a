"""The documents, the CDDL file and the code say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pycddl  # type: ignore[import-untyped]
import pytest

from client_sdk.wire import names
from client_sdk.wire.receipt import DECODING_FIELDS
from tests import cddl
from tests.vectors import honest as h

DOCS = Path(__file__).parents[4] / "docs"
RECEIPT_FORMAT = (DOCS / "receipt-format.md").read_text(encoding="utf-8")
ATTESTATION = (DOCS / "attestation.md").read_text(encoding="utf-8")
SCHEMA = cddl.WIRE_CDDL.read_text(encoding="utf-8")


def test_the_documents_contain_the_cddl_word_for_word() -> None:
    blocks = [block for text in (RECEIPT_FORMAT, ATTESTATION) for block in re.findall(r"```cddl\n(.*?)```", text, re.S)]
    assert "\n".join(blocks).split() == SCHEMA.split()
    assert len(blocks) == 2


def test_every_claim_key_is_in_the_table_and_in_the_cddl() -> None:
    keys = {value for name, value in vars(names).items() if name.startswith("CLAIM_")}
    table = {int(row) for row in re.findall(r"^\| (-?\d+) \|", RECEIPT_FORMAT, re.M)}
    schema = {int(key) for key in re.findall(r"(-?\d+) =>", rules("receipt-claims", "device = "))}
    assert keys == table == schema


def rules(start: str, end: str) -> str:
    return SCHEMA[SCHEMA.index(f"{start} = ") : SCHEMA.index(end)]


def test_every_parameter_status_type_and_profile_is_in_the_cddl() -> None:
    assert set(re.findall(r'"([a-z_]+)" =>', rules("decoding", "whole = "))) == set(DECODING_FIELDS)
    for name, value in vars(names).items():
        if isinstance(value, str) and re.match(r"TYP_|STATUS_|MODE_|.*_PROFILE$", name):
            assert f'"{value}"' in SCHEMA, name


@pytest.mark.parametrize("kind", cddl.KINDS)
def test_a_second_cddl_implementation_reads_the_schema(kind: str) -> None:
    pycddl.Schema(f"start = {kind}\n{SCHEMA}")


def test_a_second_cddl_implementation_accepts_the_honest_claims() -> None:
    """pycddl 0.6.4 leaves maps inside arrays open and trips over `.cbor` there, so it judges payloads only,
    and those only where it can follow the choice of position (it cannot for sequence 0 without a model)."""
    schema = pycddl.Schema(f"start = receipt-claims\n{SCHEMA}".replace('tstr .ne ""', "tstr"))
    for claims in (h.whole_answer(), h.streamed_answer(), h.engine_error()):
        schema.validate_cbor(claims.encode())
    attested = pycddl.Schema(f"start = channel-proof-payload\n{SCHEMA}")
    with pytest.raises(pycddl.ValidationError):
        attested.validate_cbor(b"\xa0")


def test_the_limits_are_in_the_documents() -> None:
    assert f"{names.LIMIT_RECEIPT_BYTES >> 10} KiB" in RECEIPT_FORMAT
    assert f"{names.LIMIT_ATTESTATION_REQUEST_BYTES} bytes" in ATTESTATION
    assert str(names.CHECKPOINT_MAX_FRAMES) in RECEIPT_FORMAT
    assert f"stops at {names.MAX_NESTING}" in RECEIPT_FORMAT
