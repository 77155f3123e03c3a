"""The DER reader: what it takes, and that whatever it does not take is a typed error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.tee import der
from client_sdk.wire.errors import WireError


def tlv(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


@given(st.integers(0, 0xFF).filter(lambda tag: tag & 0x1F != 0x1F), st.binary(max_size=300))
def test_reads_what_was_written(tag: int, content: bytes) -> None:
    data = tlv(tag, content)
    element = der.read_one(data)
    assert (element.tag, element.content, element.encoded) == (tag, content, data)
    with pytest.raises(WireError):
        der.read_one(data + b"\x00")
    for cut in range(len(data)):
        with pytest.raises(WireError):
            der.read_one(data[:cut])


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found = list(der.read_all(data))
    except WireError:
        return
    assert b"".join(element.encoded for element in found) == data


@pytest.mark.parametrize(
    "text",
    [
        "",
        "30",
        "1f0100",  # multi-byte tag
        "3080",  # indefinite length
        "308500000000000000000000",  # length of five bytes
        "3084ffffffff",  # giant length
        "30820003010101",  # length with a leading zero
        "3081030101ff",  # long form for a short length
        "300401",
    ],
)
def test_bad_lengths(text: str) -> None:
    with pytest.raises(WireError):
        der.read_one(bytes.fromhex(text))


def test_children() -> None:
    outer = der.read_one(tlv(0x30, tlv(2, b"\x01") * 3))
    assert len(outer.children()) == 3
    assert outer.first("x").content == b"\x01"
    with pytest.raises(WireError):
        outer.children(limit=2)
    with pytest.raises(WireError):
        der.read_one(b"\x30\x00").first("x")
    with pytest.raises(WireError):
        outer.expect(der.SET, "x")


def test_numbers_identifiers_and_bit_strings() -> None:
    assert der.integer(der.read_one(tlv(2, b"\xff")), "x") == -1
    for content in (b"", b"\x01" * 65):
        with pytest.raises(WireError):
            der.integer(der.read_one(tlv(2, content)), "x")
    assert der.oid(der.read_one(bytes.fromhex("0603550403")), "x") == "2.5.4.3"
    assert der.oid_text(bytes.fromhex("2b0601050507011f" + "")) == "1.3.6.1.5.5.7.1.31"
    assert der.oid_text(bytes.fromhex("06092a864886f84d8a3906")) == "0.6.9.42.840.113741.1337.6"
    assert der.oid_text(b"\x88\x37") == "2.999"
    for content in (b"", b"\x80\x01", b"\x2a\x80\x01", b"\x2a\x86", b"\x2a" * 65):
        with pytest.raises(WireError):
            der.oid_text(content)
    assert der.oid_text(b"\x2a\x81\x80\x00") == "1.2.16384"  # a zero group inside a number is no padding
    assert der.bit_string(der.read_one(b"\x03\x02\x00\x07"), "x") == b"\x07"
    for data in (b"\x03\x00", b"\x03\x02\x01\x06"):
        with pytest.raises(WireError):
            der.bit_string(der.read_one(data), "x")
    assert (der.context(3), der.context(2, constructed=False)) == (0xA3, 0x82)
