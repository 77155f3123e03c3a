"""What every DCAP quote has: header, signature section and the quoting enclave's report; and where Intel keeps the
collateral for it. Pure bytes.

Source: Intel, "TDX DCAP Quoting Library API", appendix A.3 (versions 4, 5), and "SGX ECDSA Quote Library API", appendix
A.4 (version 3). All integers are little-endian; sizes below are bytes. A quote may be followed by padding, which
nothing signs: `trim` is what to hash and to send.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from client_sdk.wire.errors import WireError

CODE = "MALFORMED_EVIDENCE"
LIMIT_QUOTE_BYTES = 64 << 10

TEE_SGX, TEE_TDX = 0x00, 0x81
KEY_ECDSA_P256 = 2
INTEL_QE_VENDOR = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
CERT_PCK_CHAIN, CERT_QE_REPORT = 5, 6

HEADER_BYTES = 48
REPORT_BYTES = 384
REPORT_DATA_BYTES = 64
_SIGNATURE_BYTES = 64
_KEY_BYTES = 64

INTEL_PCS = "https://api.trustedservices.intel.com"
"""Intel's Provisioning Certification Service, API version 4. A PCCS has the same paths."""
INTEL_ROOT_CRL = "https://certificates.trustedservices.intel.com/IntelSGXRootCA.der"
_ENDORSEMENT_CODE = "MALFORMED_ENDORSEMENT"
_TCB_CHAIN = "tcb-info-issuer-chain"
_QE_CHAIN = "sgx-enclave-identity-issuer-chain"
_CRL_CHAIN = "sgx-pck-crl-issuer-chain"
COLLATERAL_HEADERS = (_TCB_CHAIN, _QE_CHAIN, _CRL_CHAIN)
"""Headers that belong to Intel's answers."""
_LIMIT_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first 48 bytes. `user_data` (20) begins with the platform's id where the quoting enclave gives one."""

    version: int
    key_type: int
    tee_type: int
    qe_vendor: bytes
    user_data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EnclaveReport:
    """An SGX REPORT body (384 bytes). `attributes` is flags u64 and XFRM u64, as they stand."""

    cpu_svn: bytes
    attributes: bytes
    mr_enclave: bytes
    mr_signer: bytes
    isv_prod_id: int
    isv_svn: int
    report_data: bytes

    @property
    def debug(self) -> bool:
        """ATTRIBUTES.DEBUG: whoever holds the host can read and write the enclave's memory."""
        return bool(self.attributes[0] & 0x02)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureSection:
    """Everything behind the signed part. `cert_data` is what `cert_type` says; 5 is a PEM chain, PCK first.

    `attestation_key` is x || y of a P-256 key, signatures are r || s.
    """

    signature: bytes
    attestation_key: bytes
    qe_report_bytes: bytes
    qe_report: EnclaveReport
    qe_report_signature: bytes
    qe_auth_data: bytes
    cert_type: int
    cert_data: bytes


class Reader:
    """Takes fields off the front of `data`. Raises WireError where they exceed it."""

    __slots__ = ("_at", "_data", "_what")

    def __init__(self, data: bytes, what: str) -> None:
        self._data, self._at, self._what = data, 0, what

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise WireError(CODE, f"{self._what} needs {end} bytes and has {len(self._data)}")
        taken, self._at = self._data[self._at : end], end
        return taken

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")


def parse_header(data: bytes) -> Header:
    """The header at the start of `data`, whatever its version. Raises WireError."""
    if len(data) > LIMIT_QUOTE_BYTES:
        raise WireError(CODE, f"a quote of {len(data)} bytes; {LIMIT_QUOTE_BYTES} are the limit")
    reader = Reader(data, "quote header")
    version, key_type, tee_type, _svns, vendor, user_data = struct.unpack("<HHI4s16s20s", reader.take(HEADER_BYTES))
    return Header(version=version, key_type=key_type, tee_type=tee_type, qe_vendor=vendor, user_data=user_data)


def is_from_a_later_version(header: Header, last_known: int) -> bool:
    """A header that Intel's quoting enclave could have made, of a version this code does not know yet."""
    return header.version > last_known and header.qe_vendor == INTEL_QE_VENDOR


def check_header(header: Header, versions: tuple[int, ...], tee_type: int) -> None:
    """Version, TEE type, key type and vendor are those expected. Raises WireError naming the one that is not."""
    if header.version not in versions:
        raise WireError(CODE, f"quote version {header.version} instead of {' or '.join(map(str, versions))}")
    if header.tee_type != tee_type:
        raise WireError(CODE, f"TEE type {header.tee_type:#x} instead of {tee_type:#x}")
    if header.key_type != KEY_ECDSA_P256:
        raise WireError(CODE, f"attestation key type {header.key_type} instead of ECDSA P-256")
    if header.qe_vendor != INTEL_QE_VENDOR:
        raise WireError(CODE, "the quoting enclave is not Intel's")


def parse_enclave_report(data: bytes) -> EnclaveReport:
    """The 384 bytes of a REPORT body. Raises WireError."""
    if len(data) != REPORT_BYTES:
        raise WireError(CODE, f"an enclave report has {len(data)} bytes instead of {REPORT_BYTES}")
    return EnclaveReport(
        cpu_svn=data[0:16],
        attributes=data[48:64],
        mr_enclave=data[64:96],
        mr_signer=data[128:160],
        isv_prod_id=int.from_bytes(data[256:258], "little"),
        isv_svn=int.from_bytes(data[258:260], "little"),
        report_data=data[320:384],
    )


def parse_signature_section(data: bytes, *, nested: bool) -> SignatureSection:
    """The signature section. `nested` ones (version 4 and 5) wrap the QE's part in certification data of type 6.

    Raises WireError. Bytes after the last field are left alone, as Intel's own library leaves them.
    """
    reader = Reader(data, "signature section")
    signature, key = reader.take(_SIGNATURE_BYTES), reader.take(_KEY_BYTES)
    if nested:
        kind = reader.integer(2)
        if kind != CERT_QE_REPORT:
            raise WireError(CODE, f"certification data of type {kind} instead of {CERT_QE_REPORT}")
        reader = Reader(reader.take(reader.integer(4)), "certification data")
    report = reader.take(REPORT_BYTES)
    report_signature = reader.take(_SIGNATURE_BYTES)
    auth_data = reader.take(reader.integer(2))
    cert_type = reader.integer(2)
    return SignatureSection(
        signature=signature,
        attestation_key=key,
        qe_report_bytes=report,
        qe_report=parse_enclave_report(report),
        qe_report_signature=report_signature,
        qe_auth_data=auth_data,
        cert_type=cert_type,
        cert_data=reader.take(reader.integer(4)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollateralUrls:
    """The four addresses, by what they give."""

    tcb_info: str
    qe_identity: str
    pck_crl: str
    root_crl: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One HTTP answer with status 200. Header names are lower case."""

    headers: Mapping[str, str]
    body: bytes


def collateral_urls(fmspc: bytes, authority: str, tee_type: int, service: str) -> CollateralUrls:
    """The addresses for platforms of one FMSPC, whose PCK certificates "processor" or "platform" issued.

    `service` is INTEL_PCS or the base address of a PCCS, which has the root's list under an address of its own.
    """
    base = service.rstrip("/")
    kind = "tdx" if tee_type == TEE_TDX else "sgx"
    return CollateralUrls(
        tcb_info=f"{base}/{kind}/certification/v4/tcb?fmspc={fmspc.hex()}",
        qe_identity=f"{base}/{kind}/certification/v4/qe/identity",
        pck_crl=f"{base}/sgx/certification/v4/pckcrl?ca={authority}&encoding=der",
        root_crl=INTEL_ROOT_CRL if base == INTEL_PCS else f"{base}/sgx/certification/v4/rootcacrl",
    )


def assemble_collateral(*, tcb_info: Answer, qe_identity: Answer, pck_crl: Answer, root_crl: Answer) -> str:
    """The four answers as one collateral text (nine texts in JSON), of which nothing is verified. Raises WireError."""
    tcb_text, tcb_signature = _signed_part(tcb_info.body, "tcbInfo")
    qe_text, qe_signature = _signed_part(qe_identity.body, "enclaveIdentity")
    return json.dumps(
        {
            "pck_crl_issuer_chain": _chain(pck_crl, _CRL_CHAIN),
            "root_ca_crl": _der(root_crl.body).hex(),
            "pck_crl": _der(pck_crl.body).hex(),
            "tcb_info_issuer_chain": _chain(tcb_info, _TCB_CHAIN),
            "tcb_info": tcb_text,
            "tcb_info_signature": tcb_signature,
            "qe_identity_issuer_chain": _chain(qe_identity, _QE_CHAIN),
            "qe_identity": qe_text,
            "qe_identity_signature": qe_signature,
        }
    )


def _signed_part(body: bytes, name: str) -> tuple[str, str]:
    """(signed text, signature) of {"NAME": {...}, "signature": "hex"}: the text as sent, since it is what is signed."""
    try:
        text = body.decode() if len(body) <= _LIMIT_ANSWER_BYTES else ""
        document = json.loads(text)
        begin = text.index("{", text.index(f'"{name}"'))
        _, end = json.JSONDecoder().raw_decode(text, begin)
        signature = document["signature"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WireError(_ENDORSEMENT_CODE, f"the answer is not {name} with its signature") from None
    if type(signature) is not str:
        raise WireError(_ENDORSEMENT_CODE, f"the signature of {name} is not text")
    return text[begin:end], signature


def _chain(answer: Answer, header: str) -> str:
    value = answer.headers.get(header)
    if value is None:
        raise WireError(_ENDORSEMENT_CODE, f"the answer has no {header}")
    return unquote(value)


def _der(body: bytes) -> bytes:
    """A PCCS gives revocation lists as hex text where Intel gives DER."""
    if body[:1] == b"\x30":
        return body
    try:
        return bytes.fromhex(body.decode("ascii"))
    except ValueError:
        raise WireError(_ENDORSEMENT_CODE, "a revocation list is neither DER nor hex") from None
