"""What NVIDIA's device certificates say: which product, which device, which firmware (TCG DICE extensions)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from client_sdk.errors import UndecidedError
from client_sdk.tee import der
from client_sdk.tee.nvidia.abi import DIGEST_BYTES
from client_sdk.tee.x509 import Certificate
from client_sdk.wire.errors import WireError

_CODE = "MALFORMED_CERTIFICATE"
_OID_COMPOSITE_DEVICE_ID = "2.23.133.5.4.1"
_OID_TCB_INFO = "2.23.133.5.4.1.1"
_OID_SHA384 = "2.16.840.1.101.3.4.2.2"
_OID_SERIAL_NUMBER = "2.5.4.5"
_TCB_INFO_FWIDS = der.context(6)
_NAME = re.compile(r"([A-Z]{2}_?[0-9]{2,3}[A-Z]?) ")

Kind = Literal["gpu", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`chip` as in "GH100", `architecture` one of the policy's names."""

    chip: str
    architecture: str
    kind: Kind


_ARCHITECTURES: tuple[tuple[str, str, Kind], ...] = (
    ("GH1", "hopper", "gpu"),
    ("GB1", "blackwell", "gpu"),
    ("GB2", "blackwell", "gpu"),
    ("LS10", "ls10", "switch"),
)


def of(device: Certificate) -> Product:
    """The product a verified device certificate is of. Raises UndecidedError for one this code does not know."""
    name = device.common_name()
    found = _NAME.match(name)
    chip = found[1].replace("_", "") if found else ""
    for prefix, architecture, kind in _ARCHITECTURES:
        if chip.startswith(prefix):
            return Product(chip=chip, architecture=architecture, kind=kind)
    raise UndecidedError("UNSUPPORTED_VERSION", f"unsupported version of NVIDIA device: {name[:64]!r}")


def serial_number(device: Certificate) -> str:
    """The serial number in the certificate's subject, as text; "" where there is none."""
    for rdn in der.read_one(device.subject).children():
        for attribute in rdn.children():
            kind, *value = attribute.children()
            if der.oid(kind, "attribute type") == _OID_SERIAL_NUMBER and value:
                return value[0].content.decode("ascii", "replace")[:64]
    return ""


def firmware_id(leaf: Certificate) -> bytes | None:
    """The 48-byte FWID of the firmware that holds the leaf's key, None where the certificate has none.

    Blackwell has it first among the fwids of DiceTcbInfo, Hopper and the switches as the FWID of a CompositeDeviceID
    (version, key, FWID), their last 48 bytes. Raises WireError.
    """
    tcb_info = leaf.extension(_OID_TCB_INFO)
    if tcb_info is not None:
        fields = der.read_one(tcb_info).expect(der.SEQUENCE, "DiceTcbInfo").children()
        lists = [field for field in fields if field.tag == _TCB_INFO_FWIDS]
        return _digest(lists[0].children() if lists else ())
    composite = leaf.extension(_OID_COMPOSITE_DEVICE_ID)
    if composite is not None:
        return _digest(der.read_one(composite).expect(der.SEQUENCE, "CompositeDeviceID").children()[-1:])
    return None


def _digest(fwids: Sequence[der.Element]) -> bytes:
    """The digest of the first FWID ::= SEQUENCE { hashAlg OBJECT IDENTIFIER, digest OCTET STRING }."""
    parts = fwids[0].expect(der.SEQUENCE, "FWID").children() if fwids else ()
    if len(parts) != 2 or der.oid(parts[0], "FWID algorithm") != _OID_SHA384:
        raise WireError(_CODE, "a firmware id that is not SHA-384")
    digest = parts[1].expect(der.OCTET_STRING, "FWID").content
    if len(digest) != DIGEST_BYTES:
        raise WireError(_CODE, f"a firmware id of {len(digest)} bytes")
    return digest
