"""One parser of typed digests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.models.digests import parse_sha256
from appliance.models.errors import InvalidDigest

HEX = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.parametrize(
    "text", [HEX, HEX.upper(), f"  {HEX}\n", f"sha256:{HEX}", f"SHA256:{HEX.upper()}", f"sha256: {HEX}"]
)
def test_spellings_of_one_digest(text: str) -> None:
    assert parse_sha256(text) == bytes.fromhex(HEX)


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEX[:-1],
        HEX[:12],
        HEX + "0",
        "sha512:" + HEX,
        "sha256:sha256:" + HEX,
        "0x" + HEX,
        HEX[:-1] + "g",
        HEX[:-1] + "\uff11",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidDigest, match="64 hex"):
        parse_sha256(text)


@given(st.binary(min_size=32, max_size=32))
def test_every_digest_comes_back(digest: bytes) -> None:
    assert parse_sha256(digest.hex()) == digest


@given(st.text(max_size=80))
def test_any_text_is_a_digest_or_an_error(text: str) -> None:
    try:
        assert len(parse_sha256(text)) == 32
    except InvalidDigest:
        pass
