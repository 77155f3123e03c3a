"""Saved answers: complete, private, verified again by the same checks, and honest about what is broken."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client_sdk import Appliance, Policy, Rejection, UnsafeAcceptInsecure, VerificationError
from client_sdk.offline.saved import SaveError, load_saved, save_answer, verify_saved
from client_sdk.transport.protocol import VerifiedAnswer
from client_sdk.wire import cose, names
from tests.simulators.insecure_appliance import MODEL
from tests.simulators.wired_appliance import WiredAppliance


@pytest.fixture
def wired() -> Iterator[WiredAppliance]:
    with WiredAppliance() as appliance:
        yield appliance


@pytest.fixture
def policy(wired: WiredAppliance) -> Policy:
    return Policy(models={MODEL: frozenset({wired.simulator.model.identity})}, insecure=UnsafeAcceptInsecure())


def ask(wired: WiredAppliance, policy: Policy, *, form: str) -> VerifiedAnswer:
    kept: list[VerifiedAnswer] = []
    with Appliance(wired.url, policy=policy, save=kept.append) as appliance:
        if form == "continued":
            appliance.attest()
            wired.drop_connections()
        if form == "stream":
            list(appliance.stream("What is two plus two?", model=MODEL))
        else:
            appliance.chat("What is two plus two?", model=MODEL)
    return kept[-1]


@pytest.fixture(params=["whole", "stream", "continued"])
def saved(request: pytest.FixtureRequest, wired: WiredAppliance, policy: Policy, tmp_path: Path) -> Path:
    directory = tmp_path / "deep" / "answer"
    answer = ask(wired, policy, form=request.param)
    assert (answer.attestation.prior is not None) == (request.param == "continued")
    save_answer(directory, answer, policy_digest=policy.digest)
    return directory


def test_a_saved_answer_verifies_again_without_the_appliance(
    saved: Path, policy: Policy, wired: WiredAppliance
) -> None:
    wired.drop_connections()
    verified = verify_saved(saved, policy)
    assert verified.receipt.claims.cti == verified.saved.exchange.receipt_id
    assert verified.attestation.holder_asserted is True
    trusts = {fact.name: fact.trust for fact in verified.attestation.facts}
    assert trusts["channel binder"] == "holder-asserted"
    assert verified.saved.policy_digest == policy.digest
    assert verified.saved.attestation.suite.startswith("TLS_")


def test_a_saved_answer_is_private(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in saved.iterdir()} == {0o600}
    assert [path.name for path in saved.parent.iterdir()] == ["answer"]


def test_another_answer_never_overwrites_it(saved: Path, wired: WiredAppliance, policy: Policy) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(SaveError):
        save_answer(saved, ask(wired, policy, form="whole"), policy_digest=policy.digest)
    assert before == {path.name: path.read_bytes() for path in saved.iterdir()}
    assert [path.name for path in saved.parent.iterdir()] == ["answer"]


def test_saving_the_same_again_changes_nothing(wired: WiredAppliance, policy: Policy, tmp_path: Path) -> None:
    answer = ask(wired, policy, form="whole")
    (tmp_path / "answer").mkdir()
    for _ in range(2):
        save_answer(tmp_path / "answer", answer, policy_digest=policy.digest)
    assert verify_saved(tmp_path / "answer", policy).receipt.claims.cti == answer.receipt.claims.cti


def test_a_place_that_cannot_be_written_is_named(wired: WiredAppliance, policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="file"):
        save_answer(tmp_path / "file" / "answer", ask(wired, policy, form="whole"), policy_digest=policy.digest)


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["request", "response", "receipt", "attestation"])
def test_a_flipped_bit_is_rejected(saved: Path, policy: Policy, name: str) -> None:
    for at in (-1, len((saved / name).read_bytes()) // 2, 0):
        flip(saved / name, at)
        with pytest.raises(VerificationError):
            verify_saved(saved, policy)
        flip(saved / name, at)
    verify_saved(saved, policy)


def edit(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = saved / "answer.json"
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_text(json.dumps(fields))


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], Rejection]] = {
    "nonce": (lambda f: f["request"].update(nonce="11" * 32), Rejection.RECEIPT_NONCE_MISMATCH),
    "route": (lambda f: f["request"].update(route="/v1/completions"), Rejection.REQUEST_MISMATCH),
    "method": (lambda f: f["request"].update(method="PUT"), Rejection.REQUEST_MISMATCH),
    "status": (lambda f: f["response"].update(status=201), Rejection.STATUS_MISMATCH),
    "receipt id": (lambda f: f["response"].update({"receipt-id": "00" * 16}), Rejection.RECEIPT_ID_MISMATCH),
    "sent later": (lambda f: f["request"].update({"sent-at": time.time() + 999}), Rejection.RECEIPT_TIME),
    "sent much later": (lambda f: f["request"].update({"sent-at": time.time() + 9999}), Rejection.ATTESTATION_TOO_OLD),
    "exporter": (lambda f: f["attestation"].update(exported="22" * 32), Rejection.BINDER_MISMATCH),
    "attestation nonce": (lambda f: f["attestation"].update(nonce="33" * 32), Rejection.NONCE_MISMATCH),
    "verified later": (
        lambda f: f["attestation"].update({"verified-at": time.time() + 9999}),
        Rejection.CLOCK_SKEW,
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_fact_is_rejected(wired: WiredAppliance, policy: Policy, tmp_path: Path, name: str) -> None:
    save_answer(tmp_path / "a", ask(wired, policy, form="whole"), policy_digest=policy.digest)
    change, code = EDITS[name]
    edit(tmp_path / "a", change)
    with pytest.raises(VerificationError) as caught:
        verify_saved(tmp_path / "a", policy)
    assert caught.value.code == code


def test_an_answer_on_a_connection_too_old_for_the_policy_is_rejected(
    wired: WiredAppliance, policy: Policy, tmp_path: Path
) -> None:
    """Live it would have been: the attestation is older at the request than the policy lets a connection be used."""
    save_answer(tmp_path / "a", ask(wired, policy, form="whole"), policy_digest=policy.digest)

    def apart(fields: dict[str, Any]) -> None:
        fields["attestation"]["verified-at"] -= 4
        fields["request"]["sent-at"] += 3
        fields["response"]["received-at"] += 3

    edit(tmp_path / "a", apart)
    verify_saved(tmp_path / "a", replace(policy, max_channel_age_s=10, max_clock_skew_s=5))
    with pytest.raises(VerificationError) as caught:
        verify_saved(tmp_path / "a", replace(policy, max_channel_age_s=1, max_clock_skew_s=5))
    assert caught.value.code == Rejection.ATTESTATION_TOO_OLD


BROKEN: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda d: (d / "answer.json").unlink(),
    "no request": lambda d: (d / "request").unlink(),
    "no response": lambda d: (d / "response").unlink(),
    "no receipt": lambda d: (d / "receipt").unlink(),
    "no bundle": lambda d: (d / "attestation").unlink(),
    "not JSON": lambda d: (d / "answer.json").write_text("{"),
    "a list": lambda d: (d / "answer.json").write_text("[]"),
    "another version": lambda d: edit(d, lambda f: f.update(version=2)),
    "field missing": lambda d: edit(d, lambda f: f.pop("request")),
    "short nonce": lambda d: edit(d, lambda f: f["request"].update(nonce="11" * 31)),
    "upper-case hex": lambda d: edit(d, lambda f: f["request"].update(nonce="AA" * 32)),
    "nonce no text": lambda d: edit(d, lambda f: f["request"].update(nonce=7)),
    "zero nonce": lambda d: edit(d, lambda f: f["attestation"].update(nonce="00" * 32)),
    "status a text": lambda d: edit(d, lambda f: f["response"].update(status="200")),
    "status a truth": lambda d: edit(d, lambda f: f["response"].update(status=True)),
    "time not a number": lambda d: edit(d, lambda f: f["request"].update({"sent-at": float("nan")})),
    "time after the calendar": lambda d: edit(d, lambda f: f["attestation"].update({"verified-at": 5e11})),
    "receipt a pipe": lambda d: ((d / "receipt").unlink(), os.mkfifo(d / "receipt")),
    "receipt too large": lambda d: (d / "receipt").write_bytes(bytes(70_000)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(saved: Path, policy: Policy, name: str) -> None:
    BROKEN[name](saved)
    with pytest.raises(VerificationError) as caught:
        verify_saved(saved, policy)
    assert caught.value.code == Rejection.MALFORMED_SAVED_ANSWER
    assert caught.value.message.split()[0] in ("answer.json", "request", "response", "receipt", "attestation")


def test_another_policy_decides_anew(saved: Path, policy: Policy) -> None:
    other = replace(policy, models={MODEL: frozenset({b"\x01" * 32})})
    with pytest.raises(VerificationError) as caught:
        verify_saved(saved, other)
    assert caught.value.code == Rejection.MODEL_NOT_ALLOWED


def test_the_time_to_judge_by_can_be_given(saved: Path, policy: Policy) -> None:
    at = load_saved(saved).attestation.verified_at
    verify_saved(saved, policy, now=at + 100)
    with pytest.raises(VerificationError) as caught:
        verify_saved(saved, policy, now=at + 1000)
    assert caught.value.code == Rejection.CLOCK_SKEW


def test_a_continued_answer_needs_its_prior_evidence(wired: WiredAppliance, policy: Policy, tmp_path: Path) -> None:
    save_answer(tmp_path / "a", ask(wired, policy, form="continued"), policy_digest=policy.digest)
    verified = verify_saved(tmp_path / "a", policy)
    assert verified.saved.prior is not None
    edit(tmp_path / "a", lambda f: f["prior-attestation"].update({"age-s": 601}))
    with pytest.raises(VerificationError) as caught:
        verify_saved(tmp_path / "a", policy)
    assert caught.value.code == Rejection.CONTINUATION_REFUSED
    edit(tmp_path / "a", lambda f: f.pop("prior-attestation"))
    with pytest.raises(VerificationError) as caught:
        verify_saved(tmp_path / "a", policy)
    assert caught.value.code == Rejection.CONTINUATION_REFUSED


def redacted(directory: Path) -> None:
    path = directory / "receipt"
    path.write_bytes(cose.redacted(path.read_bytes(), limit_bytes=names.LIMIT_RECEIPT_BYTES))


def forged(directory: Path) -> None:
    """Another answer, or another question, of the same length: all that a redacted receipt still tells."""
    for name, honest, lie in (("response", b"Four.", b"Five."), ("request", b"plus", b"less")):
        path = directory / name
        assert honest in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(honest, lie))


def test_who_strips_the_salt_cannot_have_another_answer_accepted(
    wired: WiredAppliance, policy: Policy, tmp_path: Path
) -> None:
    save_answer(tmp_path / "a", ask(wired, policy, form="whole"), policy_digest=policy.digest)
    redacted(tmp_path / "a")
    forged(tmp_path / "a")
    with pytest.raises(VerificationError) as caught:
        verify_saved(tmp_path / "a", policy)
    assert caught.value.code == Rejection.REQUIRED_CLAIM_MISSING


def test_a_redacted_receipt_verifies_where_that_is_asked_for_and_opens_nothing(
    wired: WiredAppliance, policy: Policy, tmp_path: Path
) -> None:
    save_answer(tmp_path / "a", ask(wired, policy, form="whole"), policy_digest=policy.digest)
    redacted(tmp_path / "a")
    verified = verify_saved(tmp_path / "a", policy, accept_redacted=True)
    assert verified.receipt.opened is False
    assert "not checked" in {check.status for check in verified.receipt.checks if check.name == "response body"}
