"""DCAP quote collateral (version 3): TCB info, QE identity, revocation lists and the chains that sign them.

One JSON object of nine texts, as dcap-qvl and PCCS clients write it; the two signatures and the two CRLs are hex.
Nothing in it is believed before `verify.check_collateral`. The layouts of TCB info and QE identity are those of
Intel's Provisioning Certification Service, API version 4.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from client_sdk.errors import AuthenticityError, Rejection
from client_sdk.tee import der, json_text, x509
from client_sdk.wire.errors import WireError

CODE = "MALFORMED_ENDORSEMENT"
LIMIT_COLLATERAL_BYTES = 1 << 20
OID_SGX_EXTENSIONS = "1.2.840.113741.1.13.1"
_OID_PCE_ID = "1.2.840.113741.1.13.1.3"
_OID_FMSPC = "1.2.840.113741.1.13.1.4"
_SIGNATURE_BYTES = 64
_ID = re.compile(r"[A-Z0-9_]{1,16}")
_TCB_SIGNER = "TCB Signing"
_TEXTS = ("pck_crl_issuer_chain", "tcb_info_issuer_chain", "tcb_info", "qe_identity_issuer_chain", "qe_identity")
_BYTES = ("root_ca_crl", "pck_crl", "tcb_info_signature", "qe_identity_signature")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """One document that Intel signs. `text` is what the 64-byte signature r || s is over; times are Unix seconds."""

    name: str
    text: str
    signature: bytes
    chain: tuple[x509.Certificate, ...]
    id: str
    issued: float
    next_update: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collateral:
    """Parsed collateral, nothing verified. `fmspc` (6 bytes) and `pce_id` (2) say which platforms it is for.

    `pck_crl_chain` ends in (or leads to) the root; `parts` are the arguments of dcap-qvl's QuoteCollateralV3.
    """

    fmspc: bytes
    pce_id: bytes
    tcb_info: Signed
    qe_identity: Signed
    pck_crl_chain: tuple[x509.Certificate, ...]
    root_crl: x509.Crl
    pck_crl: x509.Crl
    parts: tuple[tuple[str, str | bytes], ...]

    def covers(self, now: float) -> bool:
        """All of it is in its window at `now`."""
        documents = all(part.issued <= now <= part.next_update for part in (self.tcb_info, self.qe_identity))
        lists = all(
            crl.this_update <= now and (crl.next_update is None or now < crl.next_update)
            for crl in (self.root_crl, self.pck_crl)
        )
        return documents and lists


@functools.lru_cache(maxsize=16)
def parse_collateral(text: str) -> Collateral:
    """Parse one collateral. Raises WireError MALFORMED_ENDORSEMENT or MALFORMED_CERTIFICATE."""
    if len(text) > LIMIT_COLLATERAL_BYTES:
        raise WireError(CODE, f"collateral larger than {LIMIT_COLLATERAL_BYTES} bytes")
    document = _json_object(text, "collateral")
    texts = {name: _text(document, name, "collateral") for name in _TEXTS}
    blobs = {name: _hex(_text(document, name, "collateral"), name) for name in _BYTES}
    tcb_info = _json_object(texts["tcb_info"], "TCB info")
    qe_identity = _json_object(texts["qe_identity"], "QE identity")
    return Collateral(
        fmspc=_sized_hex(tcb_info, "fmspc", 6),
        pce_id=_sized_hex(tcb_info, "pceId", 2),
        tcb_info=_signed("TCB info", "tcb_info", tcb_info, texts, blobs),
        qe_identity=_signed("QE identity", "qe_identity", qe_identity, texts, blobs),
        pck_crl_chain=_chain(texts["pck_crl_issuer_chain"]),
        root_crl=x509.parse_crl(blobs["root_ca_crl"]),
        pck_crl=x509.parse_crl(blobs["pck_crl"]),
        parts=(*texts.items(), *blobs.items()),
    )


def platform_of(pck: x509.Certificate) -> tuple[bytes, bytes]:
    """(FMSPC, PCE id) from the SGX extensions of a PCK certificate. Raises WireError MALFORMED_CERTIFICATE."""
    value = pck.extension(OID_SGX_EXTENSIONS)
    if value is None:
        raise WireError(der.CODE, "the PCK certificate has no SGX extensions")
    found: dict[str, bytes] = {}
    for entry in der.read_one(value).expect(der.SEQUENCE, "SGX extensions").children(limit=64):
        parts = entry.expect(der.SEQUENCE, "SGX extension").children(limit=64)
        if len(parts) == 2 and parts[1].tag == der.OCTET_STRING:
            found[der.oid(parts[0], "SGX extension id")] = parts[1].content
    fmspc, pce_id = found.get(_OID_FMSPC, b""), found.get(_OID_PCE_ID, b"")
    if len(fmspc) != 6 or len(pce_id) != 2:
        raise WireError(der.CODE, "the PCK certificate does not say which platform it is for")
    return fmspc, pce_id


def choose(candidates: Iterable[Collateral], fmspc: bytes, tcb_id: str, now: float) -> Collateral | None:
    """The first collateral for this platform and kind of TEE that is in its window, else the first for it at all."""
    fitting = [one for one in candidates if one.fmspc == fmspc and one.tcb_info.id == tcb_id]
    return next((one for one in fitting if one.covers(now)), fitting[0] if fitting else None)


def check_signed(document: Signed, root: x509.Certificate, now: float) -> x509.Certificate:
    """Chain to `root`, signature, window. Gives the signing certificate. Raises AuthenticityError, WireError."""
    signer, *pool = document.chain
    if _TCB_SIGNER not in signer.common_name():
        raise AuthenticityError(
            Rejection.CHAIN_NOT_TRUSTED, f"the {document.name} is signed by {signer.common_name()!r}, no TCB signer"
        )
    chain = x509.order_chain(signer, pool, root)
    x509.check_chain(chain, root, now)
    verify_p256(signer.public_key(), document.signature, document.text.encode(), f"the {document.name}")
    if not document.issued <= now <= document.next_update:
        raise AuthenticityError(
            Rejection.CERTIFICATE_NOT_VALID_NOW,
            f"the {document.name} is not valid at this time",
            expected=f"{document.issued:.0f} to {document.next_update:.0f}",
            actual=f"{now:.0f}",
        )
    return signer


def verify_p256(key: x509.PublicKey, signature: bytes, data: bytes, what: str) -> None:
    """A raw r || s signature over SHA-256 of `data`. Raises AuthenticityError BAD_KEY or BAD_SIGNATURE."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AuthenticityError(Rejection.BAD_KEY, f"{what} is signed with a key that is not P-256")
    half = _SIGNATURE_BYTES // 2
    encoded = encode_dss_signature(int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big"))
    try:
        key.verify(encoded, data, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise AuthenticityError(Rejection.BAD_SIGNATURE, f"the signature over {what} does not verify") from None


def _signed(name: str, key: str, body: dict[str, object], texts: dict[str, str], blobs: dict[str, bytes]) -> Signed:
    signature = blobs[f"{key}_signature"]
    if len(signature) != _SIGNATURE_BYTES:
        raise WireError(CODE, f"the signature of the {name} has {len(signature)} bytes instead of {_SIGNATURE_BYTES}")
    return Signed(
        name=name,
        text=texts[key],
        signature=signature,
        chain=_chain(texts[f"{key}_issuer_chain"]),
        id=_id(body, name),
        issued=_time(body, "issueDate", name),
        next_update=_time(body, "nextUpdate", name),
    )


def _id(body: dict[str, object], name: str) -> str:
    value = _text(body, "id", name)
    if _ID.fullmatch(value) is None:
        raise WireError(CODE, f"the {name} has a malformed id")
    return value


def _chain(pem: str) -> tuple[x509.Certificate, ...]:
    return x509.parse_certificates(pem.encode())


def _json_object(text: str, what: str) -> dict[str, object]:
    document = json_text.read(text, CODE, what)
    if type(document) is not dict:
        raise WireError(CODE, f"the {what} is not a JSON object")
    return document


def _text(document: dict[str, object], key: str, what: str) -> str:
    value = document.get(key)
    if type(value) is not str:
        raise WireError(CODE, f"the {what} has no text {key!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WireError(CODE, f"the {what} has a {key!r} that is not Unicode") from None
    return value


def _hex(text: str, what: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise WireError(CODE, f"{what} is not hex") from None


def _sized_hex(document: dict[str, object], key: str, size: int) -> bytes:
    value = _hex(_text(document, key, "TCB info"), key)
    if len(value) != size:
        raise WireError(CODE, f"{key} has {len(value)} bytes instead of {size}")
    return value


def _time(document: dict[str, object], key: str, what: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(_text(document, key, what))
    except ValueError:
        raise WireError(CODE, f"the {what} has a malformed {key}") from None
    if moment.tzinfo is None:
        raise WireError(CODE, f"the {what} has a {key} without a time zone")
    return moment.timestamp()
