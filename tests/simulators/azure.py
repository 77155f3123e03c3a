"""An Azure confidential VM: a paravisor's report over the AMD simulator, and a virtual TPM that quotes."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from client_sdk.wire import cbor
from tests.simulators import amd

PCRS: Mapping[int, bytes] = {register: bytes((register + 1,)) * 32 for register in (0, 2, 4, 7, 11)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine. `fields` overrides parts of the item, `configuration` the paravisor's statement."""

    report: amd.Report = field(default_factory=amd.Report)
    configuration: Mapping[str, object] = field(
        default_factory=lambda: {
            "secure-boot": True,
            "console-enabled": False,
            "vmUniqueId": "390CBCF5-6C67-4D9B-98EF-C3F1699CC8FC",
        }
    )
    key: Mapping[str, object] = field(default_factory=dict)
    pcrs: Mapping[int, bytes] = field(default_factory=lambda: PCRS)
    extra_data: bytes = b"e" * 32
    report_data: bytes | None = None
    report_type: int = 2
    hash_type: int = 1
    marshalled: bool = True
    fields: Mapping[str, object] = field(default_factory=dict)

    def item(self, chip: amd.Chip) -> bytes:
        """The content of the evidence item."""
        runtime = self.runtime()
        bound = self.report_data or hashlib.sha256(runtime).digest() + bytes(32)
        values = {name: getattr(self.report, name) for name in self.report.__dataclass_fields__}
        report = amd.Report(**values | {"report_data": bound}).sign(chip.key)
        attest = quote(self.pcrs, self.extra_data)
        signature = ak().sign(attest, padding.PKCS1v15(), hashes.SHA256())
        if self.marshalled:
            signature = struct.pack(">HHH", 0x14, 0x0B, len(signature)) + signature
        item = {
            "hcl-report": hcl_report(report, runtime, report_type=self.report_type, hash_type=self.hash_type),
            "runtime-json": runtime,
            "attest": attest,
            "signature": signature,
        }
        return cbor.encode(item | dict(self.fields))

    def runtime(self) -> bytes:
        numbers = ak().public_key().public_numbers()
        key = {"kid": "HCLAkPub", "kty": "RSA", "e": _base64(numbers.e), "n": _base64(numbers.n)} | dict(self.key)
        keys = [key, {"kid": "HCLEkPub", "kty": "RSA"}]
        return json.dumps({"keys": keys, "vm-configuration": dict(self.configuration)}).encode()


def hcl_report(report: bytes, runtime: bytes, *, report_type: int = 2, hash_type: int = 1) -> bytes:
    """What the NV index of the paravisor holds, zeros at its end included."""
    header = b"HCLA" + struct.pack("<III", 2, 32 + len(report) + 20 + len(runtime), 2) + bytes(16)
    data = struct.pack("<IIIII", 20 + len(runtime), 1, report_type, hash_type, len(runtime))
    return (header + report + data + runtime).ljust(2600, b"\x00")


def quote(pcrs: Mapping[int, bytes], extra_data: bytes) -> bytes:
    """TPMS_ATTEST over SHA-256 registers."""
    bits = sum(1 << register for register in pcrs).to_bytes(3, "little")
    digest = hashlib.sha256(b"".join(pcrs[register] for register in sorted(pcrs))).digest()
    signer = b"\x00\x0b" + b"s" * 32
    return (
        b"\xffTCG\x80\x18"
        + struct.pack(">H", len(signer))
        + signer
        + struct.pack(">H", len(extra_data))
        + extra_data
        + struct.pack(">QIIBQ", 1234, 3, 1, 1, 0x2020031200120003)
        + struct.pack(">IHB", 1, 0x0B, 3)
        + bits
        + struct.pack(">H", len(digest))
        + digest
    )


@functools.cache
def ak() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _base64(number: int) -> str:
    raw = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
