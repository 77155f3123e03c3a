"""Verified answers on disk: everything needed to verify them again offline, for ever, with a frozen clock.

A saved answer is a directory (0700) of files (0600): `answer.json` names what was asked and when, the others hold bytes
exactly as they were on the wire. Nothing in it is trusted: `verify_saved` runs the same checks as the live path. The
facts of the channel (its key, its exporter value) can only be asserted by whoever holds the files, and are listed so.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_sdk.appraisal.session import AttestationRecord
from client_sdk.appraisal.verifier import AttestationResult, ChannelFacts, Prior, appraise, appraise_continued
from client_sdk.errors import Check, MalformedError, Rejection, SdkError, VerificationError
from client_sdk.policy.policy import Policy
from client_sdk.receipts.stream import StreamVerifier
from client_sdk.receipts.verify import Exchange, VerifiedReceipt, verify_receipt
from client_sdk.tee.evidence import Endorsements
from client_sdk.transport.protocol import VerifiedAnswer, check_channel_age
from client_sdk.wire.names import (
    CTI_BYTES,
    EXPORTER_BYTES,
    LIMIT_ATTESTATION_BUNDLE_BYTES,
    LIMIT_RECEIPT_BYTES,
    MEDIA_EVENT_STREAM,
    NONCE_BYTES,
    SPKI_P256_BYTES,
)

FORMAT_VERSION = 1
MANIFEST = "answer.json"
REQUEST = "request"
RESPONSE = "response"
RECEIPT = "receipt"
ATTESTATION = "attestation"
PRIOR_ATTESTATION = "prior-attestation"

_LIMIT_MANIFEST_BYTES = 64 << 10
_LIMIT_BODY_BYTES = 64 << 20
_END_OF_CALENDAR_S = 253_402_300_800  # the year 10000, which no certificate and no datetime can name


class SaveError(SdkError):
    """A verified answer could not be saved; what was at that place before is unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAttestation:
    """A bundle with what the client knew when it judged it. `verified_at` is Unix seconds, by the client's clock."""

    bundle: bytes
    nonce: bytes
    channel: ChannelFacts
    suite: str
    verified_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAnswer:
    """A saved answer as read: form checked, nothing verified.

    `prior` is the full attestation that a continued `attestation` stands on, `age_s` its age at that moment by the
    monotonic clock of the process that saved.
    """

    exchange: Exchange
    body: bytes
    receipt: bytes
    attestation: SavedAttestation
    prior: SavedAttestation | None
    age_s: float
    policy_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSavedAnswer:
    """Proof that a saved answer verified under `policy_digest`'s policy or the one given now."""

    saved: SavedAnswer
    attestation: AttestationResult
    receipt: VerifiedReceipt


def save_answer(directory: Path, answer: VerifiedAnswer, *, policy_digest: bytes) -> None:
    """Write `answer` to `directory`, all of it or nothing. Raises SaveError, also if another answer is there."""
    files = _files(answer, policy_digest)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if directory.exists() and any(directory.iterdir()):
            if not _same(directory, files):
                raise SaveError(f"{directory} already holds something else; choose another directory")
            return
        partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
        try:
            for name, content in files.items():
                _write(partial / name, content)
            _sync_directory(partial)
            partial.rename(directory)  # replaces at most an empty directory
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync_directory(directory.parent)
    except OSError as error:
        raise SaveError(f"cannot save to {directory}: {error.strerror or error}") from error


def load_saved(directory: Path) -> SavedAnswer:
    """Read a saved answer and check its form. Raises MalformedError MALFORMED_SAVED_ANSWER naming the file."""
    fields = _Manifest(directory)
    body = _read(directory / RESPONSE, _LIMIT_BODY_BYTES)
    media_type = fields.text("response", "media-type")
    exchange = Exchange(
        method=fields.text("request", "method"),
        route=fields.text("request", "route"),
        request_body=_read(directory / REQUEST, _LIMIT_BODY_BYTES),
        nonce=fields.hex("request", "nonce", size=NONCE_BYTES),
        http_status=fields.integer("response", "status"),
        media_type=media_type,
        receipt_id=fields.hex("response", "receipt-id", size=CTI_BYTES),
        response_body=None if media_type == MEDIA_EVENT_STREAM else body,
        stream=None,
        sent_at=fields.number("request", "sent-at"),
        received_at=fields.number("response", "received-at"),
    )
    continued = fields.has("prior-attestation")
    return SavedAnswer(
        exchange=exchange,
        body=body,
        receipt=_read(directory / RECEIPT, LIMIT_RECEIPT_BYTES),
        attestation=fields.attestation("attestation", ATTESTATION),
        prior=fields.attestation("prior-attestation", PRIOR_ATTESTATION) if continued else None,
        age_s=fields.number("prior-attestation", "age-s") if continued else 0.0,
        policy_digest=fields.hex("policy-digest", size=32),
    )


def verify_saved(
    directory: Path,
    policy: Policy,
    *,
    now: float | None = None,
    endorsements: Endorsements | None = None,
    accept_redacted: bool = False,
) -> VerifiedSavedAnswer:
    """Verify a saved answer again under `policy`, by the very checks of the live path. Raises VerificationError.

    `now` (Unix seconds) is the time to judge by; without it, the moments at which the answer was verified first.
    `endorsements` are the caller's own, as for the connection on which the answer came. With `accept_redacted` a
    receipt may lack its salt; of a whole answer the saved request and response are then not compared with it
    (`receipt.opened` is False), and anybody could have written them.
    """
    saved = load_saved(directory)
    attestation = _appraise(saved, policy, now, endorsements)
    try:
        check_channel_age(policy, verified_at=saved.attestation.verified_at, sent_at=saved.exchange.sent_at)
        if saved.exchange.response_body is not None:
            receipt = verify_receipt(
                saved.receipt, saved.exchange, attestation, policy, accept_redacted=accept_redacted
            )
        else:
            receipt = _verify_stream(saved, directory, attestation, policy, accept_redacted=accept_redacted)
    except VerificationError as error:
        error.checks = (*attestation.checks, *error.checks)  # what had passed until then belongs to the list
        raise
    return VerifiedSavedAnswer(saved=saved, attestation=attestation, receipt=receipt)


def _appraise(
    saved: SavedAnswer, policy: Policy, now: float | None, endorsements: Endorsements | None
) -> AttestationResult:
    full = saved.prior or saved.attestation
    result = appraise(
        full.bundle,
        nonce=full.nonce,
        channel=full.channel,
        policy=policy,
        now=full.verified_at if now is None else now,
        endorsements=endorsements,
    )
    if saved.prior is None:
        return result
    return appraise_continued(
        saved.attestation.bundle,
        nonce=saved.attestation.nonce,
        channel=saved.attestation.channel,
        policy=policy,
        now=saved.attestation.verified_at if now is None else now,
        continued_from=Prior(result=result, age_s=saved.age_s),
    )


def _verify_stream(
    saved: SavedAnswer, directory: Path, attestation: AttestationResult, policy: Policy, *, accept_redacted: bool
) -> VerifiedReceipt:
    verifier = StreamVerifier(
        saved.exchange,
        attestation=attestation,
        policy=policy,
        clock=lambda: saved.exchange.received_at,
        accept_redacted=accept_redacted,
    )
    verifier.feed(saved.body)
    _, receipt = verifier.finish()
    if receipt.raw != saved.receipt:
        raise _malformed(directory / RECEIPT, "differs from the receipt inside the stream")
    return receipt


def _files(answer: VerifiedAnswer, policy_digest: bytes) -> dict[str, bytes]:
    exchange, record = answer.exchange, answer.attestation
    if answer.body is None or exchange.receipt_id is None:
        raise SaveError("the bytes of this answer were not kept")
    manifest: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "request": {
            "method": exchange.method,
            "route": exchange.route,
            "nonce": exchange.nonce.hex(),
            "sent-at": exchange.sent_at,
        },
        "response": {
            "status": exchange.http_status,
            "media-type": exchange.media_type,
            "receipt-id": exchange.receipt_id.hex(),
            "received-at": exchange.received_at,
        },
        "attestation": _attestation_fields(record),
        "policy-digest": policy_digest.hex(),
    }
    files = {
        REQUEST: exchange.request_body,
        RESPONSE: answer.body,
        RECEIPT: answer.receipt.raw,
        ATTESTATION: record.bundle,
    }
    if record.prior is not None:
        age_s = record.verified_mono - record.prior.verified_mono
        manifest["prior-attestation"] = _attestation_fields(record.prior) | {"age-s": age_s}
        files[PRIOR_ATTESTATION] = record.prior.bundle
    files[MANIFEST] = (json.dumps(manifest, indent=2) + "\n").encode()
    return files


def _attestation_fields(record: AttestationRecord) -> dict[str, Any]:
    return {
        "nonce": record.nonce.hex(),
        "spki": record.channel.spki.hex(),
        "exported": record.channel.exported.hex(),
        "suite": record.suite,
        "verified-at": record.verified_at,
    }


class _Manifest:
    """answer.json, read field by field; whatever is not as it should be names its place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / MANIFEST
        try:
            self._fields: Any = json.loads(_read(self._path, _LIMIT_MANIFEST_BYTES))
        except (ValueError, RecursionError):
            raise _malformed(self._path, "is not JSON") from None
        if not isinstance(self._fields, Mapping) or self._fields.get("version") != FORMAT_VERSION:
            raise _malformed(self._path, f"is not version {FORMAT_VERSION} of this format")

    def has(self, key: str) -> bool:
        return key in self._fields

    def text(self, *path: str) -> str:
        value = self._take(path)
        if not isinstance(value, str):
            raise self._wrong(path, "a text")
        return value

    def hex(self, *path: str, size: int) -> bytes:
        text = self.text(*path)
        try:
            value = bytes.fromhex(text)
        except ValueError:
            value = b""
        if len(value) != size or value.hex() != text:
            raise self._wrong(path, f"{size} bytes in hex")
        return value

    def integer(self, *path: str) -> int:
        value = self._take(path)
        if type(value) is not int:
            raise self._wrong(path, "an integer")
        return value

    def number(self, *path: str) -> float:
        value = self._take(path)
        if type(value) not in (int, float) or not 0 <= value < _END_OF_CALENDAR_S:
            raise self._wrong(path, "a number of seconds")
        return float(value)

    def attestation(self, key: str, file_name: str) -> SavedAttestation:
        nonce = self.hex(key, "nonce", size=NONCE_BYTES)
        if not any(nonce):
            raise self._wrong((key, "nonce"), "a nonce that was drawn")
        return SavedAttestation(
            bundle=_read(self._directory / file_name, LIMIT_ATTESTATION_BUNDLE_BYTES),
            nonce=nonce,
            channel=ChannelFacts(
                holder_asserted=True,
                spki=self.hex(key, "spki", size=SPKI_P256_BYTES),
                exported=self.hex(key, "exported", size=EXPORTER_BYTES),
            ),
            suite=self.text(key, "suite"),
            verified_at=self.number(key, "verified-at"),
        )

    def _take(self, path: tuple[str, ...]) -> Any:
        value = self._fields
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                raise self._wrong(path, "there")
            value = value[key]
        return value

    def _wrong(self, path: tuple[str, ...], expected: str) -> MalformedError:
        return _malformed(self._path, f"{'.'.join(path)} is not {expected}")


def _malformed(path: Path, what: str) -> MalformedError:
    message = f"{path.name} {what}"
    check = Check(name="saved answer", status="failed", detail=message)
    return MalformedError(Rejection.MALFORMED_SAVED_ANSWER, message, checks=(check,))


def _read(path: Path, limit_bytes: int) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise _malformed(path, "is no regular file")  # opening a pipe would wait for ever
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise _malformed(path, f"cannot be read ({error.strerror})") from None
    if len(content) > limit_bytes:
        raise _malformed(path, f"is larger than {limit_bytes} bytes")
    return content


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _same(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Whether `directory` holds exactly this answer already."""
    present = {path.name: path for path in directory.iterdir()}
    return present.keys() == files.keys() and all(present[name].read_bytes() == files[name] for name in files)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
