"""Layout of the `insecure` evidence item: dCBOR {"key": COSE_Key, "evidence": COSE_Sign1}. Pure bytes, no keys.

The COSE_Sign1 has the insecure-evidence type, an empty unprotected map and, as payload, the 64 bytes of report data.
The key comes along because nothing vouches for it: it is made at boot and means nothing beyond this one item.
"""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk.wire import cbor, cose
from client_sdk.wire.errors import WireError
from client_sdk.wire.fields import MapReader
from client_sdk.wire.names import CURVE_ED25519, TYP_INSECURE_EVIDENCE

KIND = "insecure"
LIMIT_ITEM_BYTES = 2048
REPORT_DATA_BYTES = 64
_CODE = "MALFORMED_EVIDENCE"


@dataclass(frozen=True, slots=True, kw_only=True)
class InsecureItem:
    """`public` is the raw 32-byte Ed25519 key, `report_data` the 64 signed bytes."""

    public: bytes
    sign1: cose.Sign1
    report_data: bytes


def encode_item(cose_key: bytes, evidence: bytes) -> bytes:
    """Content of the evidence item. `cose_key` is an encoded COSE_Key, `evidence` a tagged COSE_Sign1."""
    return cbor.encode({"key": cose_key, "evidence": evidence})


def parse_item(content: bytes) -> InsecureItem:
    """Parse the content of an `insecure` item. Raises WireError."""
    reader = MapReader(cbor.decode(content, limit_bytes=LIMIT_ITEM_BYTES), "insecure evidence", _CODE)
    public = cose.parse_okp_key(reader.take("key", bytes), curve=CURVE_ED25519)
    evidence = reader.take("evidence", bytes)
    reader.finish()
    sign1 = cose.parse_sign1(evidence, typ=TYP_INSECURE_EVIDENCE, salted=False, limit_bytes=LIMIT_ITEM_BYTES)
    if len(sign1.payload) != REPORT_DATA_BYTES:
        raise WireError(_CODE, f"report data has {len(sign1.payload)} bytes instead of {REPORT_DATA_BYTES}")
    return InsecureItem(public=public, sign1=sign1, report_data=sign1.payload)
