"""Mutated files of every kind a caller can hand over: certificates with evidence, endorsements, parts, AIR, policies.

A typed error or nothing new; a changed piece of evidence is never accepted as bound to its key. Same seed, same inputs.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from client_sdk.checks import CheckLog
from client_sdk.errors import PolicyFileError, SdkError
from client_sdk.offline.air import AirPolicy, AirRejected, verify_air
from client_sdk.offline.evidence import ForeignPolicy
from client_sdk.policy.policy import Policy
from client_sdk.tee import x509
from client_sdk.tee.certificate import carriers
from client_sdk.tee.endorsements import recognise
from client_sdk.tee.files import read_evidence
from client_sdk.tee.insecure.abi import parse_item
from client_sdk.wire import foreign_cbor
from client_sdk.wire.attestation import AttestationBundle
from client_sdk.wire.errors import WireError
from tests.fuzz.mutations import mutated
from tests.simulators import intel
from tests.simulators.insecure_appliance import InsecureAppliance, seeded
from tests.unit.client_sdk.tee import test_certificate as certificates

VECTORS = Path(__file__).parents[1] / "vectors"
TEE = VECTORS / "tee"
AIR = json.loads((VECTORS / "air" / "valid" / "v1-tdx-with-nonce.json").read_bytes())
APPLIANCE = InsecureAppliance()
BUNDLE = APPLIANCE.bundle(seeded("nonce"), APPLIANCE.connect())
TPM2 = ("tpm2/swtpm_quote.msg", "tpm2/swtpm_quote.sig.der", "tpm2/swtpm_ak.pub.pem")
AZURE = tuple(
    f"snp/genoa_v3_azure.{part}" for part in ("report.bin", "hcl-runtime.json", "vtpm-quote.msg", "vtpm-quote.sig")
)
NVIDIA = ("nvidia/hopper_580.159.03.report.bin", "nvidia/hopper_580.159.03.chain.pem")
POLICY = f"""version = 1
unsafe_accept_insecure = true
[models]
"m" = ["{"ab" * 32}"]
[families.sev-snp]
measurements = ["{"11" * 48}"]
min_tcb = {{Milan = {{snp = 1}}}}
[families.tdx]
measurements = [{{mrtd = "{"11" * 48}", rtmr0 = "{"11" * 48}", rtmr1 = "{"11" * 48}", rtmr2 = "{"11" * 48}"}}]
events = {{app-id = ["11"]}}
[families.nitro]
measurements = [{{pcr0 = "{"11" * 48}", pcr1 = "{"11" * 48}", pcr2 = "{"11" * 48}"}}]
[limits]
max_continued_s = 0
""".encode()
INTERESTING = (
    b"",
    b"\x00",
    b"\xff" * 4,
    b"\x30\x80",
    b"\x30\x84\xff\xff\xff\xff",
    b"\x9f",
    b"\xdf",
    b'"',
    b"[",
    b"{",
    b"\n[x]\n",
)


def named(scheme: str) -> bytes:
    return certificates.certificate([certificates.GOOD[scheme]])


def carried(data: bytes) -> None:
    """Found in whatever still is a certificate: the readers of all schemes, without the signature's protection."""
    for certificate in x509.parse_certificates(data):
        carriers.find(certificate)


def judged(data: bytes) -> None:
    found = certificates.judge(data, CheckLog())
    assert found.certificate.spki == certificates.SPKI, "evidence was accepted for another key"


def parts(family: str, at: int, *names: str) -> tuple[bytes, Callable[[bytes], object]]:
    """The file at `at` of a set of evidence and files beside it, and a reader of the set with another in its place."""
    files = [seed_of(name) for name in names]

    def read(data: bytes) -> object:
        evidence, *beside = (data if number == at else file for number, file in enumerate(files))
        return read_evidence(family, evidence, beside)

    return files[at], read


def air(data: bytes) -> None:
    verify_air(data, key=bytes.fromhex(AIR["public_key_hex"]), policy=AirPolicy(), now=AIR["claims"]["iat"])


def policy(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(PolicyFileError):
        Policy.parse(text)
    with contextlib.suppress(PolicyFileError):
        ForeignPolicy.parse(text, report_only=True)


def seed_of(name: str) -> bytes:
    return (TEE / name).read_bytes()


TARGETS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    **{f"certificate, {name}": (named(name), carried) for name in ("ccc sgx", "cmw json collection", "cmw collection")},
    **{f"certificate, {name}": (named(name), carried) for name in ("dstack msgpack", "dstack scale", "intel twice")},
    "certificate, gramine": (certificates.GRAMINE, carried),
    "certificate, nitro": (certificates.EVERVAULT, carried),
    "certificate, whole": (named("cmw record"), judged),
    "bundle": (BUNDLE, AttestationBundle.parse),
    "insecure": (AttestationBundle.parse(BUNDLE).evidence[0].content, parse_item),
    "crl": (seed_of("snp/crl_milan.der"), recognise),
    "chain": (seed_of("snp/chain_milan_ask_ark_asvk.pem"), recognise),
    "collateral": (intel.Intel().collateral().encode(), recognise),
    "manifest": (seed_of("nvidia/rim_vbios_96.00.5E.00.01.xml"), recognise),
    "log": (seed_of("tdx/v4_90c06f_dstack.eventlog.json"), recognise),
    "foreign cbor": (
        seed_of("nitro/prod_2025-12-25a.cose.cbor"),
        lambda d: foreign_cbor.decode(d, limit_bytes=1 << 20),
    ),
    **{f"tpm2, part {at}": parts("tpm2", at, *TPM2) for at in range(len(TPM2))},
    **{f"azure, part {at}": parts("azure", at, *AZURE) for at in range(len(AZURE))},
    **{f"nvidia, part {at}": parts("nvidia", at, *NVIDIA) for at in range(len(NVIDIA))},
    "nvidia, JSON": parts("nvidia", 0, "nvidia/switch_ls10.evidence.json"),
    "air": (bytes.fromhex(AIR["receipt_hex"]), air),
    "policy": (POLICY, policy),
}


@pytest.mark.parametrize(("seed", "target"), TARGETS.values(), ids=TARGETS.keys())
def test_mutations_end_in_typed_errors(seed: bytes, target: Callable[[bytes], object], fuzz_seconds: float) -> None:
    target(seed)
    draw, until = random.Random(20261129), time.monotonic() + fuzz_seconds / 8
    tried = 0
    while time.monotonic() < until:
        content = mutated(seed, draw, INTERESTING)
        started = time.thread_time()
        try:
            target(content)
        except (SdkError, WireError, AirRejected):
            pass
        except BaseException:
            print(content.hex())
            raise
        assert time.thread_time() - started < 0.5, content.hex()
        tried += 1
    assert tried > 5
