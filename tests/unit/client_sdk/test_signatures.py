"""Ed25519 under exactly one key, in exactly one form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from client_sdk import signatures
from client_sdk.errors import Rejection, VerificationError
from client_sdk.wire import cose, names
from tests.simulators.insecure_appliance import SigningKey

KEY = SigningKey("a key")
ORDER = 2**252 + 27742317777372353535851937790883648493
SMALL_ORDER = b"\x01" + bytes(31)


def signed(payload: bytes = b"payload") -> cose.Sign1:
    data = KEY.sign1(payload, typ=names.TYP_RECEIPT)
    return cose.parse_sign1(data, typ=names.TYP_RECEIPT, salted=False, limit_bytes=4096)


def malleable(sign1: cose.Sign1) -> cose.Sign1:
    """S + L: the same equation holds, the bytes are others."""
    scalar = int.from_bytes(sign1.signature[32:], "little") + ORDER
    return replace(sign1, signature=sign1.signature[:32] + scalar.to_bytes(32, "little"))


FAULTS: list[tuple[str, Rejection, Callable[[cose.Sign1], cose.Sign1]]] = [
    ("algorithm-es256", Rejection.BAD_ALGORITHM, lambda s: replace(s, alg=-7)),
    ("algorithm-none", Rejection.BAD_ALGORITHM, lambda s: replace(s, alg=0)),
    ("kid", Rejection.WRONG_KEY, lambda s: replace(s, kid=SigningKey("other").kid)),
    ("payload", Rejection.BAD_SIGNATURE, lambda s: replace(s, payload=b"other")),
    ("protected", Rejection.BAD_SIGNATURE, lambda s: replace(s, protected=s.protected + b"\x00")),
    ("scalar-plus-order", Rejection.BAD_SIGNATURE, malleable),
    ("small-order-r", Rejection.BAD_SIGNATURE, lambda s: replace(s, signature=SMALL_ORDER + s.signature[32:])),
    ("zeros", Rejection.BAD_SIGNATURE, lambda s: replace(s, signature=bytes(64))),
]


@pytest.mark.parametrize(("code", "fault"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_one_fault(code: Rejection, fault: Callable[[cose.Sign1], cose.Sign1]) -> None:
    signatures.authenticate(signed(), KEY.public)
    with pytest.raises(VerificationError) as caught:
        signatures.authenticate(fault(signed()), KEY.public)
    assert caught.value.code == code


def test_small_order_key_verifies_nothing() -> None:
    kid = cose.key_id(cose.okp_key(SMALL_ORDER, curve=names.CURVE_ED25519))
    forged = replace(signed(), kid=kid, signature=SMALL_ORDER + bytes(32))
    with pytest.raises(VerificationError) as caught:
        signatures.authenticate(forged, SMALL_ORDER)
    assert caught.value.code == Rejection.BAD_KEY
