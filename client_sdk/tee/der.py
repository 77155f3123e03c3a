"""A small DER reader (X.690) for certificates that genuine devices carry and stricter libraries refuse.

It reads structure, never repairs it: definite lengths in at most four bytes, nothing beyond the data, nesting only as
deep as the caller walks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from client_sdk.wire.errors import WireError

CODE = "MALFORMED_CERTIFICATE"

BOOLEAN, INTEGER, BIT_STRING, OCTET_STRING, NULL, OID = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06
UTF8_STRING, SEQUENCE, SET, PRINTABLE_STRING, IA5_STRING, UTC_TIME, GENERALIZED_TIME = (
    0x0C,
    0x30,
    0x31,
    0x13,
    0x16,
    0x17,
    0x18,
)


def context(number: int, *, constructed: bool = True) -> int:
    """The tag byte of a context-specific [number]."""
    return (0xA0 if constructed else 0x80) | number


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One TLV. `encoded` is the whole of it, `content` its value bytes."""

    tag: int
    content: bytes
    encoded: bytes

    def expect(self, tag: int, what: str) -> Element:
        if self.tag != tag:
            raise WireError(CODE, f"{what} has tag {self.tag:#04x} instead of {tag:#04x}")
        return self

    def first(self, what: str) -> Element:
        """The first element inside; the others are not looked at. Raises WireError."""
        if not self.content:
            raise WireError(CODE, f"{what} is empty")
        return read(self.content)[0]

    def children(self, limit: int = 4096) -> tuple[Element, ...]:
        """The elements inside a constructed one. Raises WireError."""
        found = []
        for element in read_all(self.content):
            found.append(element)
            if len(found) > limit:
                raise WireError(CODE, f"more than {limit} elements")
        return tuple(found)


def read(data: bytes, offset: int = 0) -> tuple[Element, int]:
    """The element at `offset` and where it ends. Raises WireError."""
    tag, at, end = span(data, offset)
    return Element(tag=tag, content=data[at:end], encoded=data[offset:end]), end


def span(data: bytes, offset: int) -> tuple[int, int, int]:
    """Tag, where the content begins and where it ends, of the element at `offset`. Raises WireError."""
    if offset + 2 > len(data):
        raise WireError(CODE, f"truncated at offset {offset}")
    tag, length, at = data[offset], data[offset + 1], offset + 2
    if tag & 0x1F == 0x1F:
        raise WireError(CODE, f"multi-byte tag at offset {offset}")
    if length & 0x80:
        size = length & 0x7F
        if not 1 <= size <= 4 or at + size > len(data):
            raise WireError(CODE, f"bad length at offset {offset}")
        length, at = int.from_bytes(data[at : at + size], "big"), at + size
        if length < 0x80 or length.bit_length() <= 8 * (size - 1):
            raise WireError(CODE, f"length not in its shortest form at offset {offset}")
    end = at + length
    if end > len(data):
        raise WireError(CODE, f"declared length exceeds the data at offset {offset}")
    return tag, at, end


def read_one(data: bytes) -> Element:
    """The one element that fills `data`. Raises WireError."""
    element, end = read(data)
    if end != len(data):
        raise WireError(CODE, f"{len(data) - end} trailing bytes")
    return element


def read_all(data: bytes) -> Iterator[Element]:
    offset = 0
    while offset < len(data):
        element, offset = read(data, offset)
        yield element


def integer(element: Element, what: str) -> int:
    content = element.expect(INTEGER, what).content
    if not content or len(content) > 64:
        raise WireError(CODE, f"{what} is empty or too large")
    return int.from_bytes(content, "big", signed=True)


def oid(element: Element, what: str) -> str:
    return oid_text(element.expect(OID, what).content)


def oid_text(content: bytes) -> str:
    """Dotted form of an OBJECT IDENTIFIER's content. Raises WireError."""
    if not content or len(content) > 64 or content[-1] & 0x80:
        raise WireError(CODE, "malformed object identifier")
    arcs, value = [], 0
    for index, byte in enumerate(content):
        if byte == 0x80 and (index == 0 or not content[index - 1] & 0x80):
            raise WireError(CODE, "object identifier not in its shortest form")
        value = value << 7 | byte & 0x7F
        if not byte & 0x80:
            arcs.append(value)
            value = 0
    first = min(arcs[0] // 40, 2)
    return ".".join(str(arc) for arc in (first, arcs[0] - 40 * first, *arcs[1:]))


def bit_string(element: Element, what: str) -> bytes:
    """The bytes of a BIT STRING without unused bits."""
    content = element.expect(BIT_STRING, what).content
    if not content or content[0] != 0:
        raise WireError(CODE, f"{what} has unused bits")
    return content[1:]
