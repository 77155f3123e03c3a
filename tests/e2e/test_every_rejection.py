"""Every rejection code, and the tests that reach it. A code without one is a rule that nobody has seen working."""

from __future__ import annotations

import ast
import functools
import os
import re
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from appliance.listener.certificates import CertificateRotator, generate_tls_key
from client_sdk.errors import MalformedError, Rejection
from client_sdk.transport.tls import check_certificate

ROOT = Path(__file__).parents[2]
R = Rejection

VERIFIER = "tests/unit/client_sdk/appraisal/test_verifier.py::test_one_fault_is_one_rejection"
RECEIPTS = "tests/unit/client_sdk/receipts/test_receipts.py::test_one_fault_is_one_rejection"
TRANSPORT = "tests/unit/client_sdk/transport/test_transport.py"
TLS = "tests/unit/client_sdk/transport/test_tls.py::test_one_fault_is_one_rejection"
LIES = "tests/e2e/test_tampered_receipts.py::test_a_claim_changed_and_signed"
RUBBISH = "tests/e2e/test_tampered_receipts.py::test_no_receipt_two_receipts_and_rubbish"
STREAMS = "tests/e2e/test_tampered_streams.py::test_blocks_changed"
RELAYS = "tests/e2e/test_relays_and_impostors.py"
HEADERS = "tests/e2e/test_tampered_receipts.py::test_headers_that_change_the_meaning"
REDIRECTS = "tests/e2e/test_tampered_receipts.py::test_b056_no_redirect_is_followed_wherever_it_leads"
SNP = "tests/e2e/test_sev_snp.py"
TPM2 = "tests/e2e/test_tpm2.py"
TEE = "tests/unit/client_sdk/tee"
GPUS = "tests/unit/client_sdk/appraisal/test_devices.py::test_one_fault_is_one_rejection"
SNP_PINS = f"{TEE}/test_snp_chain.py::test_b009_b032_what_the_policy_demands_and_is_different_is_refused"
TDX_COLLATERAL = f"{TEE}/test_intel_simulated.py::test_collateral_that_does_not_speak_for_the_platform"
NITRO = f"{TEE}/test_nitro.py::test_a_document_that_is_wrong_in_one_way_is_refused_for_it"

REACHED: dict[Rejection, tuple[str, ...]] = {
    R.MALFORMED_CBOR: (VERIFIER, RUBBISH),
    R.MALFORMED_COSE: (VERIFIER, RUBBISH),
    R.MALFORMED_TYP: (VERIFIER, RUBBISH),
    R.MALFORMED_KEY: (VERIFIER,),
    R.MALFORMED_BASE64: (RUBBISH, "tests/e2e/test_command_line.py::test_malformed_is_thirty"),
    R.MALFORMED_BUNDLE: (VERIFIER,),
    R.MALFORMED_ATTESTATION_CLAIMS: (VERIFIER,),
    R.MALFORMED_CHANNEL_PROOF: (VERIFIER,),
    R.MALFORMED_EVIDENCE: (VERIFIER, f"{TEE}/test_snp_vectors.py::test_other_bytes_are_a_typed_error_within_50_ms"),
    R.MALFORMED_ENDORSEMENT: (
        f"{TEE}/test_intel_simulated.py::test_malformed_collateral_is_a_typed_error",
        f"{TEE}/test_nvidia_verify.py::test_malformed_manifests_are_malformed",
    ),
    R.MALFORMED_CERTIFICATE: ("tests/e2e/test_every_rejection.py::test_a_certificate_that_cannot_be_read",),
    R.MALFORMED_RECEIPT_CLAIMS: (RECEIPTS, LIES),
    R.MALFORMED_CHECKPOINT: (
        "tests/unit/client_sdk/receipts/test_streams.py::test_a_signed_checkpoint_of_the_wrong_form",
    ),
    R.MALFORMED_STREAM: (STREAMS,),
    R.MALFORMED_RESPONSE: (RUBBISH, RECEIPTS),
    R.MALFORMED_SAVED_ANSWER: ("tests/e2e/test_command_line.py::test_a_saved_file_missing_or_empty",),
    R.UNSUPPORTED_PROFILE: (VERIFIER, LIES),
    R.BAD_ALGORITHM: (VERIFIER, RECEIPTS),
    R.BAD_KEY: (VERIFIER,),
    R.BAD_SIGNATURE: (VERIFIER, "tests/e2e/test_tampered_receipts.py::test_a_claim_changed_and_not_signed"),
    R.WRONG_KEY: (VERIFIER, "tests/e2e/test_tampered_receipts.py::test_the_receipt_of_another_boot"),
    R.BAD_TLS_KEY: (VERIFIER, TLS),
    R.BAD_CERTIFICATE: (TLS,),
    R.CHAIN_NOT_TRUSTED: (f"{SNP}::test_amd_s_own_roots_refuse_this_guest", TDX_COLLATERAL, NITRO),
    R.CERTIFICATE_REVOKED: (
        f"{TEE}/test_snp_chain.py::test_b001_revocation_lists_are_believed_only_as_far_as_they_are_signed_and_current",
        f"{TEE}/test_nvidia_verify.py::test_nv_12_a_certificate_on_hold_or_revoked_is_refused_required_or_not",
        TDX_COLLATERAL,
    ),
    R.CERTIFICATE_NOT_VALID_NOW: (TLS, TDX_COLLATERAL, NITRO),
    R.ENDORSEMENT_MISMATCH: (
        f"{SNP}::test_b005_both_clients_refuse_a_guest_that_the_host_may_look_into",
        f"{TEE}/test_snp_chain.py::test_b014_levels_that_only_the_report_claims_are_refused",
    ),
    R.EVENT_LOG_MISMATCH: (
        f"{TEE}/test_intel_vectors.py::test_b026_an_edited_payload_is_found_although_its_digest_is_untouched",
        f"{TEE}/test_intel_vectors.py::test_b026_edited_content_of_a_ccel_event_is_found",
    ),
    R.EVIDENCE_BINDING: (VERIFIER,),
    R.TLS_KEY_MISMATCH: (VERIFIER, f"{RELAYS}::test_a_relay_with_a_certificate_of_its_own"),
    R.BINDER_MISMATCH: (VERIFIER, f"{RELAYS}::test_b040_a_relay_that_owns_the_tls_key"),
    R.BINDER_MISSING: (VERIFIER,),
    R.CLAIMS_MISMATCH: (VERIFIER,),
    R.UNSOLICITED_BYTES: (
        f"{TRANSPORT}::test_bytes_that_answer_no_request_are_rejected",
        "tests/integration/channel/test_channel_backends.py::test_bytes_between_two_requests_are_a_rejection",
    ),
    R.CONTENT_ENCODING: (HEADERS,),
    R.REDIRECT: (REDIRECTS,),
    R.FOREIGN_ORIGIN: (f"{RELAYS}::test_only_the_appliance_is_spoken_to",),
    R.NONCE_MISMATCH: (VERIFIER, "tests/e2e/test_command_line.py::test_the_channel_as_the_holder_tells_it"),
    R.CONTINUATION_REFUSED: (f"{TRANSPORT}::test_a_continued_answer_that_nobody_asked_for_is_rejected",),
    R.CLOCK_SKEW: (VERIFIER, "tests/e2e/test_command_line.py::test_verify_offline_years_later"),
    R.ATTESTATION_TOO_OLD: (f"{TRANSPORT}::test_a_connection_that_outlived_its_policy_unseen_is_refused",),
    R.FAMILY_NOT_ALLOWED: (VERIFIER, GPUS),
    R.INSECURE_NOT_ALLOWED: (VERIFIER, f"{RELAYS}::test_a_default_policy_refuses_an_insecure_appliance"),
    R.MODE_MISMATCH: (VERIFIER,),
    R.MEASUREMENT_NOT_ALLOWED: (
        f"{SNP}::test_a_guest_that_is_not_the_one_is_asked_nothing",
        f"{TPM2}::test_a_machine_that_booted_something_else_is_refused",
        f"{TEE}/test_nvidia_vectors.py::test_nv_2_mismatching_manifest_fails_at_index_9",
    ),
    R.DEBUG_NOT_ALLOWED: (
        f"{SNP}::test_b005_both_clients_refuse_a_guest_that_the_host_may_look_into",
        f"{TEE}/test_intel_vectors.py::test_tdx_7_is_a_debug_domain_and_refused_with_or_without_collateral",
        f"{TEE}/test_nitro_vectors.py::test_nitro_3_debug_is_refused",
    ),
    R.TCB_NOT_ALLOWED: (
        f"{SNP}::test_a_guest_that_is_not_the_one_is_asked_nothing",
        f"{TEE}/test_intel_simulated.py::test_b002_every_status_is_refused_by_default_and_admitted_by_its_name_alone",
    ),
    R.GUEST_POLICY_NOT_ALLOWED: (
        f"{SNP}::test_b005_both_clients_refuse_a_guest_that_the_host_may_look_into",
        SNP_PINS,
        f"{TEE}/test_intel_simulated.py::test_attributes_that_no_policy_admits",
    ),
    R.PLATFORM_NOT_ALLOWED: (f"{TPM2}::test_another_attestation_key_is_refused", SNP_PINS, GPUS),
    R.MODEL_NOT_ALLOWED: (VERIFIER, f"{RELAYS}::test_a_policy_for_another_model"),
    R.CONFIG_NOT_ALLOWED: (
        f"{RELAYS}::test_a_policy_for_another_configuration",
        "tests/e2e/test_restarts.py::test_replaced_by_something_else",
    ),
    R.DEVICE_NOT_ALLOWED: (RECEIPTS, LIES, GPUS, f"{SNP}::test_a_guest_that_is_not_the_one_is_asked_nothing"),
    R.ARITHMETIC_NOT_ALLOWED: (RECEIPTS, LIES),
    R.REQUIRED_CLAIM_MISSING: (RECEIPTS, "tests/e2e/test_tampered_receipts.py::test_a_receipt_without_its_salt"),
    R.RECEIPT_MISSING: (RUBBISH, STREAMS),
    R.RECEIPT_ID_MISMATCH: (LIES, "tests/e2e/test_clients.py::test_a_rejection_is_neither_retried_nor_hidden"),
    R.RECEIPT_NONCE_MISMATCH: (LIES, "tests/e2e/test_tampered_receipts.py::test_the_receipt_of_another_request"),
    R.RECEIPT_ATTESTATION_MISMATCH: (
        LIES,
        "tests/e2e/test_tampered_receipts.py::test_the_receipt_of_another_connection",
    ),
    R.RECEIPT_CHANNEL_MISMATCH: (LIES, "tests/e2e/test_tampered_receipts.py::test_the_receipt_of_another_connection"),
    R.RECEIPT_MODE_MISMATCH: (LIES,),
    R.RECEIPT_TIME: (LIES,),
    R.RECEIPT_CHAIN_GAP: (LIES, "tests/unit/client_sdk/receipts/test_receipt_chain.py::test_a_gap_is_named"),
    R.REQUEST_MISMATCH: (LIES,),
    R.RESPONSE_MISMATCH: (LIES, "tests/e2e/test_tampered_receipts.py::test_a_body_changed"),
    R.OUTPUT_MISMATCH: (LIES,),
    R.PARAMETER_MISMATCH: (LIES,),
    R.MODEL_MISMATCH: (LIES,),
    R.CONFIG_MISMATCH: (LIES,),
    R.STATUS_MISMATCH: (LIES, HEADERS),
    R.STREAM_TRUNCATED: (STREAMS,),
    R.STREAM_CHECKPOINT_MISSING: (STREAMS,),
    R.STREAM_CHECKPOINT_MISMATCH: (STREAMS, "tests/e2e/test_tampered_streams.py::test_another_stream_whole"),
    R.STREAM_CHAIN_MISMATCH: (STREAMS, "tests/e2e/test_tampered_streams.py::test_a_frame_rewritten"),
    R.STREAM_AFTER_RECEIPT: (STREAMS,),
}
OF_HARDWARE_FAMILIES = (
    *(R.MALFORMED_ENDORSEMENT, R.CHAIN_NOT_TRUSTED, R.CERTIFICATE_REVOKED, R.ENDORSEMENT_MISMATCH),
    *(R.EVENT_LOG_MISMATCH, R.MEASUREMENT_NOT_ALLOWED, R.DEBUG_NOT_ALLOWED, R.TCB_NOT_ALLOWED),
    *(R.GUEST_POLICY_NOT_ALLOWED, R.PLATFORM_NOT_ALLOWED),
)


def test_every_code_has_its_tests() -> None:
    assert set(Rejection) == set(REACHED)
    assert all(REACHED.values())


@pytest.mark.parametrize("code", OF_HARDWARE_FAMILIES)
def test_a_code_of_hardware_is_raised_by_hardware_families_alone(code: Rejection) -> None:
    """Fetching endorsements belongs to the families: no answer of an appliance comes near it."""
    everywhere = [path for path in (ROOT / "client_sdk").rglob("*.py") if "tee" not in path.parts]
    naming = {path.name for path in everywhere if re.search(rf"\b{code.value}\b", path.read_text("utf-8"))}
    assert naming <= {"errors.py", "checks.py", "fetch.py"}


@pytest.mark.parametrize(("code", "node"), [(code, node) for code, nodes in REACHED.items() for node in nodes])
def test_the_test_exists_and_names_the_code(code: Rejection, node: str) -> None:
    path, _, name = node.partition("::")
    assert re.search(rf"\b{code.value}\b", reach_of(ROOT / path, name)), f"{node} does not speak of {code}"


@functools.cache
def reach_of(path: Path, name: str) -> str:
    """The source of a test function and of the module's definitions that it mentions, directly or through others."""
    text = path.read_text("utf-8")
    definitions: dict[str, tuple[str, set[str]]] = {}
    for node in ast.parse(text).body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        source = "\n".join(text.splitlines()[start - 1 : node.end_lineno])
        mentioned = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        for defined in _names(node):
            definitions[defined] = (source, mentioned)
    assert name in definitions, f"{path.name} has no test {name}"
    wanted, seen = [name], set[str]()
    while wanted:
        current = wanted.pop()
        if current in definitions and current not in seen:
            seen.add(current)
            wanted += definitions[current][1]
    return "\n".join(definitions[each][0] for each in sorted(seen))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_a_certificate_that_cannot_be_read() -> None:
    """A curve that no library knows, in a certificate that is well formed otherwise. MALFORMED_CERTIFICATE"""
    rotator = CertificateRotator(generate_tls_key(), now=time.time, random_bytes=os.urandom)
    check_certificate(rotator.certificate, now=time.time())
    curve = bytes.fromhex("06082a8648ce3d030107")
    der = rotator.certificate.public_bytes(Encoding.DER)
    assert der.count(curve) == 1
    unknown = x509.load_der_x509_certificate(der.replace(curve, curve[:-1] + b"\x7f"))
    with pytest.raises(MalformedError) as caught:
        check_certificate(unknown, now=time.time())
    assert caught.value.code == R.MALFORMED_CERTIFICATE
