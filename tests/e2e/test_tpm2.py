"""An appliance that attests with a real TPM in software, over RA-TLS: accepted by its pins, refused by any other."""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_sdk import Appliance, Policy, Rejection, VerificationError
from client_sdk.appraisal.session import AttestationRecord
from client_sdk.appraisal.verifier import AttestationResult, appraise
from client_sdk.wire import cbor, digests
from client_sdk.wire.attestation import AttestationBundle
from tests.e2e.evidence import Collected
from tests.e2e.programs import MODEL, Served, run_client, run_program
from tests.simulators.swtpm import Swtpm, swtpm

pytestmark = pytest.mark.model
ARGUMENTS = ("--model", MODEL, "--attester", "tpm2")
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tpm(workspace: Path) -> Iterator[Swtpm]:
    with swtpm(workspace / "tpm") as running:
        yield running


@pytest.fixture(scope="module")
def environ(tpm: Swtpm) -> dict[str, str]:
    return {"APPLIANCE_ATTESTATION_TPM2_TCTI": tpm.tcti}


@pytest.fixture(scope="module")
def pinned(workspace: Path, environ: dict[str, str]) -> str:
    """The policy of a caller who took the reference values on the machine itself. Made before anything is served."""
    printed = run_program("appliance", "reference-values", *ARGUMENTS, "--on-this-machine", environ=environ)
    assert printed.returncode == 0, printed.stderr
    reference, policy = workspace / "tpm2-values.toml", workspace / "tpm2-policy.toml"
    reference.write_text(printed.stdout)
    made = run_client("policy", "init", "--from", str(reference), "-o", str(policy))
    assert made.returncode == 0, made.stderr
    return policy.read_text()


@pytest.fixture(scope="module")
def served(workspace: Path, pinned: str, environ: dict[str, str]) -> Iterator[Served]:
    assert "families.tpm2" in pinned
    with Served(workspace / "tpm2-server", arguments=ARGUMENTS, environ=environ) as running:
        yield running


@pytest.fixture(scope="module")
def record(served: Served, pinned: str) -> AttestationRecord:
    """The attestation behind one verified answer."""
    saved = Collected()
    with Appliance(served.url, policy=Policy.parse(pinned), save=saved) as appliance:
        answer = appliance.chat(QUESTION, model=MODEL, temperature=0, max_tokens=4)
        assert answer.text
    return saved.answers[0].attestation


def swapped(pinned: str, digest: str) -> Policy:
    """The policy with the last digit of one pinned digest changed."""
    assert digest in pinned
    return Policy.parse(pinned.replace(digest, digest[:-1] + ("0" if digest[-1] != "0" else "1")))


def judged(
    record: AttestationRecord, policy: Policy, *, nonce: bytes | None = None, bundle: bytes | None = None
) -> AttestationResult:
    return appraise(
        bundle or record.bundle,
        nonce=nonce or record.nonce,
        channel=record.channel,
        policy=policy,
        now=record.result.verified_at,
    )


def test_the_quote_over_this_connection_is_accepted(record: AttestationRecord) -> None:
    result = record.result
    assert (result.family, result.claims.mode) == ("tpm2", "production")
    facts = {fact.name: (fact.value, fact.trust) for fact in result.facts}
    assert facts["TPM protection"] == ("measured boot, not memory encryption", "key-signed")
    assert facts["TPM attestation key hierarchy"][0] == "endorsement"
    statuses = {check.name: check.status for check in result.checks}
    assert statuses["evidence binds the claims"] == "passed"
    assert statuses["boot measurement"] == "passed"
    assert statuses["attestation key pinned"] == "passed"
    assert statuses["memory encryption"] == "not checked"


def refused(served: Served, policy: Policy) -> VerificationError:
    with Appliance(served.url, policy=policy) as appliance, pytest.raises(VerificationError) as raised:
        appliance.chat(QUESTION, model=MODEL, max_tokens=4)
    return raised.value


def test_another_register_is_refused(served: Served, pinned: str) -> None:
    (registers,) = tomllib.loads(pinned)["families"]["tpm2"]["pcr_sets"]
    error = refused(served, swapped(pinned, registers["9"]))
    assert error.code is Rejection.MEASUREMENT_NOT_ALLOWED


def test_another_attestation_key_is_refused(served: Served, pinned: str) -> None:
    (key,) = tomllib.loads(pinned)["families"]["tpm2"]["ak_pins"]
    error = refused(served, swapped(pinned, key))
    assert error.code is Rejection.PLATFORM_NOT_ALLOWED


def test_a_policy_of_another_family_never_implies_a_tpm(served: Served, pinned: str) -> None:
    table, _, _ = pinned.partition("[families.tpm2]")
    _, _, rest = pinned.partition("[receipt]")
    registers = ", ".join(f'pcr{register} = "{"11" * 48}"' for register in range(3))
    other = f"{table}[families.nitro]\nmeasurements = [{{{registers}}}]\n\n[receipt]{rest}"
    assert refused(served, Policy.parse(other)).code is Rejection.FAMILY_NOT_ALLOWED


def test_a_replayed_quote_answers_no_other_nonce(record: AttestationRecord, pinned: str) -> None:
    policy = Policy.parse(pinned)
    assert judged(record, policy).family == "tpm2"
    with pytest.raises(VerificationError) as raised:
        judged(record, policy, nonce=secrets.token_bytes(32))
    assert raised.value.code in (Rejection.NONCE_MISMATCH, Rejection.BINDER_MISMATCH)


def test_a_quote_under_claims_it_was_not_made_for_is_refused(record: AttestationRecord, pinned: str) -> None:
    bundle = AttestationBundle.parse(record.bundle)
    assert bundle.claims is not None
    nonce = secrets.token_bytes(32)
    claims = bundle.claims.replace(record.nonce, nonce)
    assert claims != bundle.claims
    fields: Any = cbor.decode(record.bundle, limit_bytes=1 << 20)
    with pytest.raises(VerificationError) as raised:
        judged(record, Policy.parse(pinned), nonce=nonce, bundle=cbor.encode({**fields, "claims": claims}))
    assert raised.value.code is Rejection.EVIDENCE_BINDING
    assert digests.tpm_extra_data(claims) != digests.tpm_extra_data(bundle.claims)


def test_a_machine_that_booted_something_else_is_refused(
    served: Served, pinned: str, record: AttestationRecord, tpm: Swtpm
) -> None:
    """Last: it stops the appliance of this module, measures, and starts it again."""
    assert record.result.family == "tpm2"
    served.stop()
    tpm.stop()
    tpm.start()
    tpm.extend(11, b"\xee" * 32)
    served.start()
    assert refused(served, Policy.parse(pinned)).code is Rejection.MEASUREMENT_NOT_ALLOWED


def test_no_tpm_no_listener(workspace: Path) -> None:
    gone = {"APPLIANCE_ATTESTATION_TPM2_TCTI": f"device:{workspace}/no-tpm"}
    done = run_program("appliance", "serve", *ARGUMENTS, environ=gone)
    assert done.returncode == 1
    assert "there is no" in done.stderr
