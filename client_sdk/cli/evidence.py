"""Commands of appliance-client about what others made: evidence, AIR receipts, endorsements."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from client_sdk.checks import ShownFact
from client_sdk.cli.console import EXIT_ACCEPT, EXIT_MALFORMED, EXIT_REJECT, Outcome, finish, print_outcome
from client_sdk.system import of_this_process

if TYPE_CHECKING:
    from client_sdk.wire.air import AirClaims

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FILES = click.Path(exists=True, path_type=Path)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")
_now_option = click.option("--now", metavar="TIME", help="Judge at this time (ISO 8601 with zone, or Unix seconds).")

LIMIT_FILE_BYTES = 1 << 20
_END_OF_CALENDAR_S = 253_402_300_800  # the year 10000, which no certificate can name
LIMIT_FIELD_BYTES = 1024
NOT_BOUND = "warning: the binding was not checked, so this evidence may have been made for anybody, at any time"
KEY_ONLY = "warning: the evidence binds the certificate's key only; nothing shows that it is fresh or who sends it"
_AIR_FORM_LAYERS = (1, 3)  # structure and claims: the bytes are wrong, not who signed them
_FAMILIES = ("snp", "azure", "tdx", "sgx", "nitro", "tpm2", "nvidia", "certificate")


@click.command("verify-evidence")
@click.option("--family", type=click.Choice(_FAMILIES), required=True, help="What made the evidence.")
@click.option("--evidence", "evidence_path", type=_FILE, required=True, help="The evidence.")
@click.option(
    "--endorsement", "endorsement_paths", type=_FILES, multiple=True, help="A file or directory; may be repeated."
)
@click.option("--policy", "policy_path", type=_FILE, required=True, help="Your policy (TOML); needs no models.")
@click.option("--report-data", metavar="HEX", help="The report data the evidence must carry.")
@click.option("--nonce", metavar="HEX", help="The nonce the evidence must carry.")
@_now_option
@click.option("--report-only", is_flag=True, help="Admit a policy without measurements: they are not checked then.")
@_json_option
def verify_evidence(
    family: str,
    evidence_path: Path,
    endorsement_paths: tuple[Path, ...],
    policy_path: Path,
    report_data: str | None,
    nonce: str | None,
    now: str | None,
    report_only: bool,
    as_json: bool,
) -> int:
    """Judge one piece of evidence of any protocol, offline."""
    if report_data is not None and nonce is not None:
        raise click.UsageError("give --report-data or --nonce, not both")
    expected_data, expected_nonce = parse_hex(report_data, "--report-data"), parse_hex(nonce, "--nonce")
    moment = of_this_process().now() if now is None else parse_time(now)
    evidence = read_file(evidence_path)
    endorsements = [read_file(path) for given in endorsement_paths for path in _files(given)]

    def work() -> Outcome:
        from client_sdk.offline.evidence import ForeignFiles, ForeignPolicy, judge
        from client_sdk.tee.evidence import ForeignBinding

        policy = ForeignPolicy.load(policy_path, report_only=report_only)
        verdict = judge(
            ForeignFiles(family=family, evidence=evidence, endorsements=endorsements),
            policy,
            ForeignBinding(report_data=expected_data, nonce=expected_nonce),
            now=moment,
        )
        unbound = {"not-checked": NOT_BOUND, "key": "" if verdict.fresh else KEY_ONLY}
        return Outcome(
            result="accept",
            code="OK",
            exit_code=EXIT_ACCEPT,
            message=unbound.get(verdict.binding, ""),
            checks=verdict.checks,
            facts=tuple(ShownFact(name=f.name, value=f.value, trust=f.trust) for f in verdict.facts),
            extra=(("binding", verdict.binding), ("fresh", verdict.fresh)),
        )

    return finish(work, as_json=as_json, otherwise=(("binding", "not-checked"), ("fresh", False)))


def parse_time(text: str) -> float:
    """Unix seconds, or ISO 8601 with a zone. Raises UsageError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = None
    if seconds is not None:
        if not 0 <= seconds < _END_OF_CALENDAR_S:  # NaN and infinities neither
            raise click.UsageError(f"--now {text}: not a time")
        return seconds
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"--now {text}: not a time") from None
    if moment.tzinfo is None:
        raise click.UsageError("--now needs a zone, such as 2026-11-29T16:00:00Z")
    return moment.timestamp()


def parse_hex(text: str | None, option: str) -> bytes | None:
    """At least one byte in hex. Raises UsageError."""
    if text is None:
        return None
    try:
        value = bytes.fromhex(text)
    except ValueError:
        raise click.UsageError(f"{option}: not hex") from None
    if not 1 <= len(value) <= LIMIT_FIELD_BYTES:
        raise click.UsageError(f"{option}: 1 to {LIMIT_FIELD_BYTES} bytes")
    return value


def _files(path: Path) -> list[Path]:
    """The file, or the files of the directory in order of their names."""
    if not path.is_dir():
        return [path]
    return sorted(inner for inner in path.iterdir() if inner.is_file() and not inner.name.startswith("."))


def read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LIMIT_FILE_BYTES + 1)
    except OSError as error:
        raise click.UsageError(f"cannot read {path}: {error.strerror}") from None


@click.command("verify-air")
@click.argument("receipt_path", metavar="RECEIPT", type=_FILE)
@click.option("--key", metavar="HEX", required=True, help="The attested Ed25519 key, 32 bytes in hex.")
@click.option("--nonce", metavar="HEX", help="The nonce the receipt must carry.")
@click.option("--model-hash", metavar="HEX", help="The model hash the receipt must name, 32 bytes.")
@click.option("--platform", metavar="TYPE", help="The measurement type: nitro-pcr or tdx-mrtd-rtmr.")
@click.option("--max-age", metavar="SECONDS", type=click.IntRange(min=0), help="How old the receipt may be.")
@click.option("--allow-evaluation", is_flag=True, help="Admit receipts of security mode `evaluation`.")
@_now_option
@_json_option
def verify_air(
    receipt_path: Path,
    key: str,
    nonce: str | None,
    model_hash: str | None,
    platform: str | None,
    max_age: int | None,
    allow_evaluation: bool,
    now: str | None,
    as_json: bool,
) -> int:
    """Verify an AIR receipt (draft -02) of any maker: AIR-local, which says nothing of a TEE."""
    public, expected_nonce, expected_hash = (
        parse_hex(key, "--key"),
        parse_hex(nonce, "--nonce"),
        parse_hex(model_hash, "--model-hash"),
    )
    if public is None or len(public) != 32:
        raise click.UsageError("--key: 32 bytes are needed")
    if expected_hash is not None and len(expected_hash) != 32:
        raise click.UsageError("--model-hash: 32 bytes are needed")
    moment = of_this_process().now() if now is None else parse_time(now)
    receipt = read_file(receipt_path)

    from client_sdk.offline.air import ASSURANCE, AirPolicy, AirRejected
    from client_sdk.offline.air import verify_air as verify

    policy = AirPolicy(
        nonce=expected_nonce,
        model_hash=expected_hash,
        platform=platform,
        max_age_s=max_age,
        allow_evaluation=allow_evaluation,
    )
    try:
        result = verify(receipt, key=public, policy=policy, now=moment)
    except AirRejected as error:
        outcome = Outcome(
            result="reject",
            code=error.code,
            exit_code=EXIT_MALFORMED if error.layer in _AIR_FORM_LAYERS else EXIT_REJECT,
            message=error.detail,
            checks=error.checks,
            extra=(("layer", error.layer), ("assurance", "none")),
        )
    else:
        stale = "" if result.freshness != "not checked" else "; warning: neither nonce nor age was checked"
        outcome = Outcome(
            result="accept",
            code="OK",
            exit_code=EXIT_ACCEPT,
            message=f"{ASSURANCE}: nothing here shows that the key lives in a TEE{stale}",
            checks=result.checks,
            facts=_air_facts(result.claims),
            extra=(("assurance", result.assurance), ("freshness", result.freshness)),
        )
    print_outcome(outcome, as_json=as_json)
    return outcome.exit_code


def _air_facts(claims: AirClaims) -> tuple[ShownFact, ...]:
    """The claims, all of them by their signer's word alone until somebody reconciles them with its attestation."""
    measured = claims.enclave_measurements
    values = {
        field.name: getattr(claims, field.name) for field in fields(claims) if field.name != "enclave_measurements"
    }
    values |= {"measurement_type": measured.measurement_type, **measured.registers}
    texts = {
        name: value.hex() if isinstance(value, bytes) else str(value)
        for name, value in values.items()
        if value is not None
    }
    return tuple(ShownFact(name=name, value=text, trust="key-signed") for name, text in texts.items())
