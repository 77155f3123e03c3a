"""Each rejection of an attestation bundle, by exactly one fault; the honest twin is accepted by the same call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from client_sdk.appraisal.verifier import AttestationResult, ChannelFacts, Prior, appraise, appraise_continued
from client_sdk.errors import (
    AuthenticityError,
    FreshnessError,
    MalformedError,
    PolicyError,
    Rejection,
    VerificationError,
)
from client_sdk.policy.policy import Policy, parse_families
from client_sdk.tee.insecure import abi
from client_sdk.wire import cbor, cose, digests, names
from client_sdk.wire.attestation import AttestationBundle, EvidenceItem
from tests.simulators.attested import attested, policy_for
from tests.simulators.insecure_appliance import MODEL, NOW, InsecureAppliance, SigningKey, seeded

NONCE = seeded("the client's nonce")
SMALL_ORDER = b"\x01" + bytes(31)


@dataclass
class World:
    """All inputs of one appraisal. A fault changes one of them."""

    appliance: InsecureAppliance
    bundle: bytes
    channel: ChannelFacts | None
    policy: Policy
    nonce: bytes = NONCE
    now: float = NOW

    def appraise(self) -> AttestationResult:
        return appraise(self.bundle, nonce=self.nonce, channel=self.channel, policy=self.policy, now=self.now)

    def rebuild(self, **edits: Any) -> None:
        self.bundle = self.appliance.bundle(NONCE, self.appliance.connect(), **edits)

    def edit_fields(self, edit: Callable[[AttestationBundle], AttestationBundle]) -> None:
        self.bundle = edit(AttestationBundle.parse(self.bundle)).encode()


def world() -> World:
    appliance = InsecureAppliance()
    connection = appliance.connect()
    return World(
        appliance=appliance,
        bundle=appliance.bundle(NONCE, connection),
        channel=connection.channel,
        policy=policy_for(appliance),
    )


def claims(**changes: Any) -> Callable[[World], None]:
    return lambda w: w.rebuild(edit_claims=lambda value: replace(value, **changes))


def proof(**changes: Any) -> Callable[[World], None]:
    return lambda w: w.rebuild(edit_proof=lambda value: replace(value, **changes))


def signed_proof(payload: Callable[[World], bytes], **header: Any) -> Callable[[World], None]:
    def apply(w: World) -> None:
        sealed = w.appliance.channel_key.sign1(payload(w), **{"typ": names.TYP_CHANNEL_PROOF, **header})
        w.edit_fields(lambda bundle: replace(bundle, channel_proof=sealed))

    return apply


def honest_proof(w: World) -> bytes:
    sign1 = AttestationBundle.parse(w.bundle).channel_proof
    return cose.parse_sign1(sign1, typ=names.TYP_CHANNEL_PROOF, salted=False, limit_bytes=2048).payload


def item(content: Callable[[EvidenceItem], EvidenceItem]) -> Callable[[World], None]:
    return lambda w: w.rebuild(edit_items=lambda items: (content(items[0]),))


def field(**changes: Any) -> Callable[[World], None]:
    def apply(w: World) -> None:
        for key, value in changes.items():
            setattr(w, key, value)

    return apply


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes((data[-1] ^ 1,))


def broken_evidence_signature(honest: EvidenceItem) -> EvidenceItem:
    parsed = abi.parse_item(honest.content)
    key = cose.okp_key(parsed.public, curve=names.CURVE_ED25519)
    evidence = cbor.decode(honest.content, limit_bytes=4096)
    assert isinstance(evidence, dict)
    return replace(honest, content=abi.encode_item(key, flip_last(evidence["evidence"])))


def evidence_by(signer: SigningKey, named: SigningKey) -> Callable[[World], None]:
    def apply(w: World) -> None:
        body = AttestationBundle.parse(w.bundle).claims
        assert body is not None
        sealed = signer.sign1(digests.report_data(body), typ=names.TYP_INSECURE_EVIDENCE)
        item = EvidenceItem(kind=abi.KIND, content=abi.encode_item(named.cose_key, sealed))
        w.edit_fields(lambda bundle: replace(bundle, evidence=(item,)))

    return apply


def replace_claims(payload: bytes) -> Callable[[World], None]:
    return lambda w: w.edit_fields(lambda bundle: replace(bundle, claims=payload))


def claims_map(**changes: object) -> Callable[[World], None]:
    def apply(w: World) -> None:
        decoded = cbor.decode(AttestationBundle.parse(w.bundle).claims or b"", limit_bytes=1 << 20)
        assert isinstance(decoded, dict)
        decoded.update(changes)
        replace_claims(cbor.encode(decoded))(w)

    return apply


def p384_spki() -> bytes:
    public = ec.derive_private_key(7, ec.SECP384R1()).public_key()
    return public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def with_channel(**changes: bytes) -> Callable[[World], None]:
    def apply(w: World) -> None:
        assert w.channel is not None
        w.channel = replace(w.channel, **changes)

    return apply


def policy(**changes: Any) -> Callable[[World], None]:
    return lambda w: field(policy=policy_for(w.appliance, **changes))(w)


def other_family(w: World) -> None:
    w.edit_fields(lambda b: replace(b, evidence=(EvidenceItem(kind="sev-snp", content=b"\x00" * 1184),)))


def default_policy(w: World) -> None:
    """A policy that names no insecure opt-in cannot even be built without a family, so it is built around that."""
    object.__setattr__(w.policy, "insecure", None)


OTHER = SigningKey("somebody else")
DEVICE = EvidenceItem(kind="unheard-of", content=b"report")

FAULTS: list[tuple[str, Rejection, Callable[[World], None]]] = [
    ("bundle-trailing-byte", Rejection.MALFORMED_CBOR, lambda w: field(bundle=w.bundle + b"\x00")(w)),
    ("bundle-is-a-list", Rejection.MALFORMED_BUNDLE, field(bundle=cbor.encode([]))),
    ("bundle-without-evidence", Rejection.MALFORMED_BUNDLE, lambda w: w.rebuild(edit_items=lambda _: ())),
    ("claims-unknown-field", Rejection.MALFORMED_ATTESTATION_CLAIMS, claims_map(extra=1)),
    ("claims-profile", Rejection.UNSUPPORTED_PROFILE, claims_map(profile="tag:attested-inference,2026:attestation-v2")),
    ("claims-zero-nonce", Rejection.MALFORMED_ATTESTATION_CLAIMS, claims(nonce=bytes(32))),
    ("receipt-key-shape", Rejection.MALFORMED_KEY, claims(receipt_key=cbor.encode({1: 1, -1: 4, -2: bytes(32)}))),
    ("receipt-key-small-order", Rejection.BAD_KEY, claims(receipt_key=cose.okp_key(SMALL_ORDER, curve=6))),
    ("channel-key-small-order", Rejection.BAD_KEY, claims(channel_key=cose.okp_key(SMALL_ORDER, curve=6))),
    ("air-key-small-order", Rejection.BAD_KEY, claims(air_key=cose.okp_key(SMALL_ORDER, curve=6))),
    ("sealing-key-shape", Rejection.MALFORMED_KEY, claims(sealing_key=cose.okp_key(OTHER.public, curve=6))),
    ("evidence-layout", Rejection.MALFORMED_EVIDENCE, item(lambda i: replace(i, content=cbor.encode([])))),
    ("evidence-report-size", Rejection.MALFORMED_EVIDENCE, lambda w: w.rebuild(edit_report=lambda r: r[:63])),
    ("evidence-signature", Rejection.BAD_SIGNATURE, item(broken_evidence_signature)),
    ("evidence-under-another-key", Rejection.WRONG_KEY, evidence_by(OTHER, SigningKey("appliance evidence"))),
    ("evidence-of-other-claims", Rejection.EVIDENCE_BINDING, lambda w: w.rebuild(edit_report=flip_last)),
    (
        "device-named-not-carried",
        Rejection.EVIDENCE_BINDING,
        claims(devices=(("unheard-of", digests.item_digest("unheard-of", b"report")),)),
    ),
    ("device-carried-not-named", Rejection.EVIDENCE_BINDING, lambda w: w.rebuild(edit_items=lambda i: (*i, i[0]))),
    (
        "device-nobody-can-judge",
        Rejection.FAMILY_NOT_ALLOWED,
        lambda w: w.rebuild(
            edit_claims=lambda c: replace(c, devices=(("unheard-of", digests.item_digest("unheard-of", b"report")),)),
            edit_items=lambda i: (*i, DEVICE),
        ),
    ),
    ("tls-key-type", Rejection.BAD_TLS_KEY, with_channel(spki=p384_spki())),
    ("tls-key-of-another", Rejection.TLS_KEY_MISMATCH, with_channel(spki=InsecureAppliance("other").spki)),
    ("tls-key-null", Rejection.TLS_KEY_MISMATCH, claims(tls_key=None)),
    ("binder-null", Rejection.BINDER_MISSING, claims(binder=None)),
    ("relay-with-the-tls-key", Rejection.BINDER_MISMATCH, with_channel(exported=seeded("the relay's connection"))),
    ("no-tls-but-tls-claims", Rejection.TLS_KEY_MISMATCH, field(channel=None)),
    ("proof-typ", Rejection.MALFORMED_TYP, signed_proof(honest_proof, typ=names.TYP_RECEIPT)),
    ("proof-not-cose", Rejection.MALFORMED_COSE, lambda w: w.edit_fields(lambda b: replace(b, channel_proof=b"\x84"))),
    ("proof-salted", Rejection.MALFORMED_COSE, signed_proof(honest_proof, salt=bytes(32))),
    ("proof-algorithm", Rejection.BAD_ALGORITHM, signed_proof(honest_proof, protected={names.HEADER_ALG: -7})),
    ("proof-key", Rejection.WRONG_KEY, signed_proof(honest_proof, protected={names.HEADER_KID: OTHER.kid})),
    (
        "proof-signature",
        Rejection.BAD_SIGNATURE,
        lambda w: w.edit_fields(lambda b: replace(b, channel_proof=flip_last(b.channel_proof))),
    ),
    ("proof-payload", Rejection.MALFORMED_CHANNEL_PROOF, signed_proof(lambda _: cbor.encode([]))),
    ("proof-of-other-claims", Rejection.CLAIMS_MISMATCH, proof(claims=seeded("other claims"))),
    ("proof-binder-null", Rejection.BINDER_MISSING, proof(binder=None)),
    ("proof-binder-of-another-connection", Rejection.BINDER_MISMATCH, proof(binder=seeded("other binder"))),
    ("proof-nonce", Rejection.NONCE_MISMATCH, proof(nonce=seeded("old nonce"))),
    ("B011-claims-nonce", Rejection.NONCE_MISMATCH, claims(nonce=seeded("old nonce"))),
    ("B013-first-sight-of-an-old-bundle", Rejection.NONCE_MISMATCH, field(nonce=seeded("tomorrow's nonce"))),
    ("issued-in-the-past", Rejection.CLOCK_SKEW, claims(issued_at=int(NOW) - 301)),
    ("issued-in-the-future", Rejection.CLOCK_SKEW, claims(issued_at=int(NOW) + 301)),
    ("B052-B186-default-policy", Rejection.INSECURE_NOT_ALLOWED, default_policy),
    ("B052-production-claims", Rejection.MODE_MISMATCH, claims(mode=names.MODE_PRODUCTION)),
    ("family-not-named", Rejection.FAMILY_NOT_ALLOWED, other_family),
    ("B009-B086-other-weights-same-name", Rejection.MODEL_NOT_ALLOWED, claims(models={MODEL: seeded("other weights")})),
    ("B027-only-models-nobody-named", Rejection.MODEL_NOT_ALLOWED, claims(models={"other": seeded("other weights")})),
    ("no-models", Rejection.MODEL_NOT_ALLOWED, claims(models={})),
    ("B009-config", Rejection.CONFIG_NOT_ALLOWED, policy(configs=frozenset({seeded("other config")}))),
    (
        "continued-where-full-is-needed",
        Rejection.CONTINUATION_REFUSED,
        lambda w: field(bundle=w.appliance.continued(NONCE, w.appliance.connect(), seeded("claims")))(w),
    ),
]


@pytest.mark.parametrize(("code", "fault"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_one_fault_is_one_rejection(code: Rejection, fault: Callable[[World], None]) -> None:
    w = world()
    w.appraise()
    fault(w)
    with pytest.raises(VerificationError) as caught:
        w.appraise()
    assert caught.value.code == code
    assert caught.value.checks[-1].status == "failed"
    assert all(check.status != "failed" for check in caught.value.checks[:-1])


def test_result_carries_only_what_the_evidence_vouches_for() -> None:
    w = world()
    result = w.appraise()
    assert result.receipt_key == w.appliance.receipt_key.public
    assert result.channel_key == w.appliance.channel_key.public
    assert result.receipt_kid == w.appliance.receipt_key.kid
    assert result.binder == result.claims.binder
    assert (result.family, result.evidence_age_s, result.verified_at) == ("insecure", 0.0, NOW)
    assert {fact.trust for fact in result.facts} == {"self-asserted", "key-signed"}
    assert all(fact.trust == "self-asserted" for fact in result.facts if fact.name in ("mode", f"model {MODEL}"))


def test_b038_result_says_what_was_not_checked() -> None:
    result = world().appraise()
    open_points = {check.name for check in result.checks if check.status == "not checked"}
    expected = {"configuration", "launch measurement", "debug mode", "platform TCB", "vendor certificate chain"}
    assert open_points == expected


def test_b174_rejection_names_what_was_expected_and_what_came() -> None:
    w = world()
    claims(models={MODEL: seeded("other weights")})(w)
    with pytest.raises(PolicyError) as caught:
        w.appraise()
    assert caught.value.expected == w.appliance.model.identity.hex()
    assert caught.value.actual == seeded("other weights").hex()


def test_a_served_model_the_policy_does_not_name_is_listed_not_accepted() -> None:
    w = world()
    claims(models={MODEL: w.appliance.model.identity, "other": seeded("other")})(w)
    assert ("model other", "not checked") in {(c.name, c.status) for c in w.appraise().checks}


def test_pinned_config_and_any_of_pins_are_accepted() -> None:
    w = world()
    identity = w.appliance.model.identity
    w.policy = policy_for(
        w.appliance,
        configs=frozenset({w.appliance.config, seeded("next config")}),
        models={MODEL: frozenset({identity, seeded("next model")})},
    )
    assert ("configuration", "passed") in {(c.name, c.status) for c in w.appraise().checks}


def test_without_tls_the_channel_is_listed_as_not_checked() -> None:
    w = world()
    w.channel = None
    w.rebuild(edit_claims=lambda c: replace(c, binder=None, tls_key=None), edit_proof=lambda p: replace(p, binder=None))
    result = w.appraise()
    assert result.binder is None
    assert ("binder", "not checked") in {(c.name, c.status) for c in result.checks}


@pytest.mark.parametrize("part", ["claims", "proof"])
def test_a_binder_without_tls_is_refused(part: str) -> None:
    w = world()
    w.channel = None
    bound = seeded("some binder")
    w.rebuild(
        edit_claims=lambda c: replace(c, binder=bound if part == "claims" else None, tls_key=None),
        edit_proof=lambda p: replace(p, binder=bound if part == "proof" else None),
    )
    with pytest.raises(AuthenticityError) as caught:
        w.appraise()
    assert caught.value.code == Rejection.BINDER_MISMATCH


def test_offline_channel_facts_are_marked_as_the_holders() -> None:
    w = world()
    assert w.channel is not None
    channel = replace(w.channel, holder_asserted=True)
    result = appraise(w.bundle, nonce=NONCE, channel=channel, policy=w.policy, now=NOW)
    assert {f.trust for f in result.facts if f.name == "channel binder"} == {"holder-asserted"}


@pytest.mark.parametrize("nonce", [bytes(32), b"short", b""])
def test_a_caller_that_draws_no_nonce_is_told_so(nonce: bytes) -> None:
    w = world()
    w.nonce = nonce
    with pytest.raises(ValueError, match="nonce"):
        w.appraise()


@pytest.mark.parametrize("exported", [b"", bytes(31)])
def test_a_caller_without_exporter_output_is_told_so(exported: bytes) -> None:
    w = world()
    with_channel(exported=exported)(w)
    with pytest.raises(ValueError, match="exporter"):
        w.appraise()


class Continued:
    """A second connection to an appliance attested before."""

    def __init__(self) -> None:
        self.first = attested()
        self.connection = self.first.appliance.connect("second")
        self.nonce = seeded("second nonce")
        self.age_s = 599.0
        self.policy = self.first.policy
        self.prior = self.first.result
        self.bundle = self.build()

    def build(self, **edits: Any) -> bytes:
        have = self.first.result.claims_digest
        return self.first.appliance.continued(self.nonce, self.connection, have, **edits)

    def appraise(self) -> AttestationResult:
        return appraise_continued(
            self.bundle,
            nonce=self.nonce,
            channel=self.connection.channel,
            policy=self.policy,
            now=NOW + self.age_s,
            continued_from=Prior(result=self.prior, age_s=self.age_s),
        )


def rebuilt(**changes: Any) -> Callable[[Continued], None]:
    def apply(c: Continued) -> None:
        c.bundle = c.build(edit_proof=lambda proof: replace(proof, **changes))

    return apply


def changed(**changes: Any) -> Callable[[Continued], None]:
    def apply(c: Continued) -> None:
        for key, value in changes.items():
            setattr(c, key, value)

    return apply


def full_again(c: Continued) -> None:
    c.bundle = c.first.appliance.bundle(c.nonce, c.connection)


def key_of_another_boot(c: Continued) -> None:
    c.bundle = InsecureAppliance("next boot").continued(c.nonce, c.connection, c.prior.claims_digest)


CONTINUED_FAULTS: list[tuple[str, Rejection, Callable[[Continued], None]]] = [
    ("malformed", Rejection.MALFORMED_CBOR, changed(bundle=b"\xff")),
    ("full-answer", Rejection.CONTINUATION_REFUSED, full_again),
    ("window-over", Rejection.CONTINUATION_REFUSED, changed(age_s=600.0)),
    ("clock-ran-backwards", Rejection.CONTINUATION_REFUSED, changed(age_s=-1.0)),
    (
        "never",
        Rejection.CONTINUATION_REFUSED,
        lambda c: changed(policy=policy_for(c.first.appliance, max_continued_s=0))(c),
    ),
    ("other-boot", Rejection.WRONG_KEY, key_of_another_boot),
    ("other-claims", Rejection.CLAIMS_MISMATCH, rebuilt(claims=seeded("other claims"))),
    ("other-connection", Rejection.BINDER_MISMATCH, rebuilt(binder=seeded("other binder"))),
    ("no-binder", Rejection.BINDER_MISSING, rebuilt(binder=None)),
    ("replayed", Rejection.NONCE_MISMATCH, rebuilt(nonce=seeded("old nonce"))),
    (
        "policy-changed",
        Rejection.MODEL_NOT_ALLOWED,
        lambda c: changed(policy=policy_for(InsecureAppliance(), models={MODEL: frozenset({seeded("new pin")})}))(c),
    ),
]


@pytest.mark.parametrize(("code", "fault"), [f[1:] for f in CONTINUED_FAULTS], ids=[f[0] for f in CONTINUED_FAULTS])
def test_one_fault_in_a_continued_answer(code: Rejection, fault: Callable[[Continued], None]) -> None:
    c = Continued()
    c.appraise()
    fault(c)
    with pytest.raises(VerificationError) as caught:
        c.appraise()
    assert caught.value.code == code
    assert caught.value.checks[-1].status == "failed"


def test_a_continued_result_trusts_no_more_than_the_evidence_it_stands_on() -> None:
    c = Continued()
    assert {fact.trust for fact in c.appraise().facts if fact.name in ("family", "mode")} == {"self-asserted"}
    table = {"ak_pins": ["11" * 32], "pcr_sets": [dict.fromkeys("02479", "11" * 32)]}
    c.policy = policy_for(c.first.appliance, families=parse_families({"tpm2": table}, report_only=False))
    facts = tuple(replace(fact, trust="key-signed") for fact in c.prior.facts)
    c.prior = replace(c.prior, family="tpm2", facts=facts)
    assert {fact.trust for fact in c.appraise().facts if fact.name in ("family", "mode")} == {"key-signed"}


def test_continued_result_has_the_new_binder_and_the_evidence_age() -> None:
    c = Continued()
    result = c.appraise()
    assert result.claims_digest == c.first.result.claims_digest
    assert result.binder == digests.channel_binder(c.connection.channel.spki, c.connection.channel.exported)
    assert result.evidence_age_s == 599.0
    aged = next(check for check in result.checks if check.name == "fresh hardware evidence")
    assert aged.status == "not checked"
    assert "599 s old" in aged.detail


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Rejection.MALFORMED_COSE, MalformedError),
        (Rejection.UNSUPPORTED_PROFILE, MalformedError),
        (Rejection.BINDER_MISMATCH, AuthenticityError),
        (Rejection.NONCE_MISMATCH, FreshnessError),
        (Rejection.RECEIPT_TIME, FreshnessError),
        (Rejection.MODE_MISMATCH, PolicyError),
        (Rejection.STREAM_TRUNCATED, AuthenticityError),
    ],
)
def test_codes_belong_to_one_branch_of_the_error_tree(code: Rejection, kind: type[VerificationError]) -> None:
    from client_sdk.checks import error_class

    assert error_class(code) is kind
