"""COSE_Sign1 and Ed25519 rules, with the curve computed here from its equation."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.signatures import authenticate
from client_sdk.wire import cbor, cose, names
from client_sdk.wire.errors import WireError
from tests.reference_decoder import CURVE_D, L, P, Point, add, decompress, order_divides_eight

SEED = bytes(range(32))


def small_torsion() -> list[Point]:
    """All eight points whose order divides 8, from the curve equation: multiples of one point of order 8."""
    for y in range(2, 1000):
        point = decompress(y.to_bytes(32, "little"))
        if point is None:
            continue
        multiple = times(point, L)  # kills the large subgroup and keeps the torsion
        if times(multiple, 4) != (0, 1):
            return [times(multiple, k) for k in range(8)]
    raise AssertionError("no point of order 8 found")


def times(point: Point, scalar: int) -> Point:
    result, power = (0, 1), point
    while scalar:
        if scalar & 1:
            result = add(result, power)
        power = add(power, power)
        scalar >>= 1
    return result


def encodings(point: Point) -> list[bytes]:
    """Canonical and non-canonical encodings, both sign bits: y, and y + p where it fits into 255 bits."""
    ys = [point[1]] + ([point[1] + P] if point[1] + P < 1 << 255 else [])
    return [(y | sign << 255).to_bytes(32, "little") for y in ys for sign in (0, 1)]


TORSION = small_torsion()


def test_the_torsion_is_what_it_should_be() -> None:
    assert len(set(TORSION)) == 8
    for x, y in TORSION:
        assert (-x * x + y * y - 1 - CURVE_D * x * x * y * y) % P == 0
        assert times((x, y), 8) == (0, 1)


@pytest.mark.parametrize("encoded", sorted({e for point in TORSION for e in encodings(point)}), ids=bytes.hex)
def test_every_encoding_of_a_small_order_point_is_known(encoded: bytes) -> None:
    assert cose.has_small_order(encoded)


@given(st.binary(min_size=32, max_size=32))
def test_no_other_point_is_called_small(encoded: bytes) -> None:
    assert cose.has_small_order(encoded) == order_divides_eight(encoded)


def test_honest_keys_and_signatures_pass() -> None:
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    assert not cose.has_small_order(key.public_key().public_bytes_raw())
    signature = key.sign(b"x")
    assert not cose.has_small_order(signature[:32])
    assert cose.scalar_in_range(signature)


@pytest.mark.parametrize(
    ("scalar", "good"), [(0, True), (L - 1, True), (L, False), (L + 1, False), ((1 << 256) - 1, False)]
)
def test_the_scalar_must_be_below_the_group_order(scalar: int, good: bool) -> None:
    assert cose.scalar_in_range(bytes(32) + scalar.to_bytes(32, "little")) is good


def forged(public: bytes) -> bytes:
    """With the identity as key, R = S * B verifies for every message: here S = 1 and R = B."""
    base = (4 * pow(5, -1, P) % P).to_bytes(32, "little")
    key = cose.okp_key(public, curve=names.CURVE_ED25519)
    return cose.sign1(
        protected=cose.protected_header(kid=cose.key_id(key), typ=names.TYP_RECEIPT),
        salt=None,
        payload=b"anything at all",
        sign=lambda _: base + (1).to_bytes(32, "little"),
    )


def test_a_key_of_small_order_signs_nothing() -> None:
    public = (1).to_bytes(32, "little")
    parsed = cose.parse_sign1(forged(public), typ=names.TYP_RECEIPT, salted=True, limit_bytes=4096)
    with pytest.raises(AuthenticityError) as caught:
        authenticate(parsed, public)
    assert caught.value.code == Rejection.BAD_KEY


def test_the_signature_covers_the_bytes_as_received_B079() -> None:
    """The protected header goes into the signature input as it came, never re-encoded."""
    odd = b"\xa1\x18\x01\x27"
    assert cose.signature_input(odd, b"p") == cbor.encode(["Signature1", odd, b"", b"p"])
    sign1 = cose.Sign1(protected=odd, alg=-8, kid=bytes(32), typ="t", salt=None, payload=b"p", signature=bytes(64))
    assert sign1.signed_bytes() == cose.signature_input(odd, b"p")


def test_cose_key_has_exactly_its_fields() -> None:
    public = bytes(range(32))
    encoded = cose.okp_key(public, curve=names.CURVE_ED25519)
    assert cose.parse_okp_key(encoded, curve=names.CURVE_ED25519) == public
    for bad in (
        cbor.encode({1: 1, -1: 6, -2: public, 3: -8}),
        cbor.encode({1: 1, -1: 4, -2: public}),
        cbor.encode({1: 2, -1: 6, -2: public}),
        cbor.encode({1: 1, -1: 6, -2: public[:31]}),
        cbor.encode({1: 1, -1: 6}),
        cbor.encode({1: 1, -1: 6, -2: public, -4: bytes(32)}),
    ):
        with pytest.raises(WireError):
            cose.parse_okp_key(bad, curve=names.CURVE_ED25519)
    for size in (31, 33):
        with pytest.raises(ValueError):
            cose.okp_key(bytes(size), curve=names.CURVE_ED25519)


@given(st.binary(max_size=200))
def test_random_bytes_raise_wire_errors_only(data: bytes) -> None:
    for candidate in (data, b"\xd2" + data, b"\xd2\x84" + data):
        with pytest.raises(WireError):
            cose.parse_sign1(candidate, typ=names.TYP_RECEIPT, salted=True, limit_bytes=4096)
    with pytest.raises(WireError):
        cose.redacted(b"\xd2" + data, limit_bytes=4096)
    with pytest.raises(WireError):
        cose.parse_okp_key(data, curve=names.CURVE_ED25519)
