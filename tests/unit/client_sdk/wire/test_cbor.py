"""Deterministic CBOR: one encoding per value, and nothing else is read."""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.wire import cbor
from client_sdk.wire.errors import WireError

LIMIT = 1 << 20

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.binary(max_size=300)
    | st.text(max_size=80)
)
keys = st.integers(-(1 << 64), (1 << 64) - 1) | st.text(max_size=40)
values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(keys, inner, max_size=6), max_leaves=25
)


def refused(data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        cbor.decode(data, limit_bytes=LIMIT)
    assert caught.value.code == "MALFORMED_CBOR"
    return caught.value.detail


def same(left: Any, right: Any) -> bool:
    """Equal with exact types: 1, 1.0 and True are three values here, and so are 0.0 and -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, dict):
        pairs = sorted(left.items(), key=lambda item: cbor.encode(item[0]))
        others = sorted(right.items(), key=lambda item: cbor.encode(item[0]))
        return same([list(pair) for pair in pairs], [list(pair) for pair in others])
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(values)
def test_round_trip(value: Any) -> None:
    encoded = cbor.encode(value)
    assert same(cbor.decode(encoded, limit_bytes=LIMIT), value)


@given(values)
def test_a_foreign_reader_reads_the_same_value(value: Any) -> None:
    assert same(cbor2.loads(cbor.encode(value)), value)


@given(scalars)
def test_scalars_are_encoded_as_by_a_foreign_canonical_writer(value: Any) -> None:
    assert cbor.encode(value) == cbor2.dumps(value, canonical=True)


@given(values)
def test_one_encoding_per_value(value: Any) -> None:
    """What a foreign, non-canonical writer makes of a value is refused unless it is the one encoding."""
    foreign = cbor2.dumps(value)
    ours = cbor.encode(value)
    if foreign == ours:
        return
    assert refused(foreign)


@given(st.dictionaries(keys, st.just(0), max_size=12))
def test_keys_are_sorted_bytewise_by_their_encoding(value: dict[int | str, int]) -> None:
    """RFC 8949 section 4.2.1, not the length-first order of RFC 7049."""
    encoded = sorted(cbor2.dumps(key) for key in value)
    assert cbor.encode(value)[1:] == b"".join(key + b"\x00" for key in encoded)


def test_bytewise_order_differs_from_length_first_where_it_should() -> None:
    value = {"aa": 0, 1000: 0}
    assert cbor.encode(value) == bytes.fromhex("a21903e80062616100")
    assert cbor2.dumps({-1: 0, 1000: 0}, canonical=True) != cbor.encode({-1: 0, 1000: 0})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_take_the_shortest_form_that_keeps_them(value: float) -> None:
    encoded = cbor.encode(value)
    assert len(encoded) in (3, 5, 9)
    assert cbor2.loads(encoded) == value
    for fmt, head in ((">e", 0xF9), (">f", 0xFA), (">d", 0xFB)):
        try:
            raw = struct.pack(fmt, value)
        except OverflowError:
            continue
        longer = bytes((head,)) + raw
        if struct.unpack(fmt, raw)[0] == value and len(longer) > len(encoded):
            assert "shortest" in refused(longer)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_a_number_is_our_bug_when_written(value: float) -> None:
    with pytest.raises(ValueError):
        cbor.encode(value)


@pytest.mark.parametrize(
    "data", ["f97e00", "f97c00", "f9fc00", "fa7fc00000", "fb7ff8000000000000", "fb7ff0000000000000"]
)
def test_not_a_number_is_refused(data: str) -> None:
    refused(bytes.fromhex(data))


@pytest.mark.parametrize(
    "value", [{True: 1}, {1.0: 1}, {None: 1}, {b"a": 1}, {1, 2}, object(), 1 << 64, -(1 << 64) - 1]
)
def test_values_outside_the_format_are_our_bug(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        cbor.encode(value)


@pytest.mark.parametrize("opening", [b"\x81", b"\xa1\x00", b"\xc1", b"\xd8\x1c"])
def test_nesting_bombs_are_refused_early_B064(opening: bytes) -> None:
    refused(opening * 100_000 + b"\x00")


def test_nesting_is_allowed_up_to_sixteen_B064() -> None:
    assert cbor.decode(b"\x81" * 16 + b"\x00", limit_bytes=LIMIT)
    assert "nesting" in refused(b"\x81" * 17 + b"\x00")
    assert "nesting" in refused(b"\xa1\x00" * 17 + b"\x00")
    deep: Any = 0
    for _ in range(17):
        deep = [deep]
    with pytest.raises(ValueError):
        cbor.encode(deep)


@pytest.mark.parametrize(
    "data",
    ["a201000100", "a1187ba2616100616100", "81a2200020f6", "a261610061620061"],
    ids=["top", "nested", "negative", "truncated"],
)
def test_repeated_keys_are_refused_at_every_level_B065(data: str) -> None:
    refused(bytes.fromhex(data))


@pytest.mark.parametrize("data", ["d81c8100", "d81d00", "d8190100", "d9010080", "c0613a", "d2", "d9d9f700", "c24101"])
def test_tags_are_refused_B066(data: str) -> None:
    """Shared values and string references (28, 29, 25, 256) among them: no message can point into another."""
    refused(bytes.fromhex(data))
    refused(b"\x81" + bytes.fromhex(data))


def test_two_messages_in_a_row_know_nothing_of_each_other_B066() -> None:
    refused(bytes.fromhex("d81c8101"))
    refused(bytes.fromhex("d81d00"))
    assert cbor.decode(b"\x81\x01", limit_bytes=LIMIT) == [1]


@pytest.mark.parametrize("major", range(2, 6))
@pytest.mark.parametrize("length", [1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_giant_lengths_cost_nothing_B067(major: int, length: int) -> None:
    data = bytes((major << 5 | 27,)) + length.to_bytes(8, "big")
    tracemalloc.start()
    try:
        refused(data)
        refused(b"\x81" + data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_a_count_is_compared_with_what_is_there_B067() -> None:
    assert "count" in refused(b"\x9a\x00\x01\x00\x00" + bytes(65535))
    assert "count" in refused(b"\xba\x00\x01\x00\x00" + bytes(65535 * 2))


@pytest.mark.parametrize(
    "data", ["1800", "1817", "1900ff", "1a0000ffff", "1b00000000ffffffff", "3800", "580100", "7801 61", "9800", "b800"]
)
def test_integers_and_lengths_take_their_shortest_form(data: str) -> None:
    assert "shortest" in refused(bytes.fromhex(data))


@pytest.mark.parametrize("data", ["5fff", "7fff", "9fff", "bfff", "5f4100ff", "1c", "1f", "3e", "fc", "ff"])
def test_indefinite_lengths_and_reserved_forms_are_refused(data: str) -> None:
    refused(bytes.fromhex(data))


@pytest.mark.parametrize("data", ["f7", "e0", "f3", "f800", "f818", "f8ff"])
def test_other_simple_values_are_refused(data: str) -> None:
    refused(bytes.fromhex(data))


def test_keys_out_of_order_are_refused() -> None:
    assert "order" in refused(bytes.fromhex("a202000100"))
    assert "order" in refused(bytes.fromhex("a2616100" + "0100"))


@pytest.mark.parametrize("key", ["f5", "f4", "f6", "f93c00", "4101", "80", "a0"])
def test_keys_are_integers_or_text_and_nothing_that_equals_them(key: str) -> None:
    """In Python True == 1 == 1.0: a map with both would silently lose one."""
    assert "key" in refused(bytes.fromhex("a1" + key + "00"))


def test_trailing_bytes_are_refused() -> None:
    assert "trailing" in refused(b"\x00\x00")
    refused(b"")


def test_the_limit_comes_first() -> None:
    assert cbor.decode(b"\x41\x00", limit_bytes=2) == b"\x00"
    with pytest.raises(WireError, match="exceed"):
        cbor.decode(b"\x42\x00\x00", limit_bytes=2)


@given(values, st.data())
def test_every_truncation_is_refused(value: Any, data: st.DataObject) -> None:
    encoded = cbor.encode(value)
    refused(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
