"""Judge evidence of somebody else's protocol, offline: files in, a verdict out.

The checks are those of a session; what is missing is the session. Unless the caller says what the evidence must carry,
nothing ties it to anything, and the verdict says `binding: not-checked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from client_sdk.checks import CheckLog
from client_sdk.errors import Check, Rejection
from client_sdk.policy.policy import parse_families
from client_sdk.tables import check_nothing_left, check_version, parse_toml, read_text, take_table
from client_sdk.tee import endorsements as given
from client_sdk.tee.certificate.policy import CertificatePolicy, parse_policy
from client_sdk.tee.certificate.verify import Question, verify_certificate
from client_sdk.tee.evidence import AuthenticEvidence, DeviceSetPolicy, FamilyPolicy, ForeignBinding
from client_sdk.tee.families import FAMILIES
from client_sdk.tee.files import FAMILY_NAMES, read_evidence

CERTIFICATE = "certificate"
FAMILY_CHOICES = (*FAMILY_NAMES, CERTIFICATE)
BINDING_KEY, BINDING_REPORT_DATA, BINDING_NONCE, BINDING_NOT_CHECKED = "key", "report-data", "nonce", "not-checked"
# What a whole policy holds besides, which foreign evidence cannot show.
_NOT_FOR_EVIDENCE = ("models", "configs", "receipt", "limits", "unsafe_accept_insecure")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPolicy:
    """The part of a policy that is about evidence: `families` and what a certificate around evidence must show."""

    families: dict[str, FamilyPolicy]
    certificate: CertificatePolicy

    @classmethod
    def load(cls, path: Path, *, report_only: bool) -> ForeignPolicy:
        return cls.parse(read_text(path), report_only=report_only)

    @classmethod
    def parse(cls, text: str, *, report_only: bool) -> ForeignPolicy:
        """Raises PolicyFileError naming the key at fault. `report_only` admits families without launch measurement."""
        table = parse_toml(text)
        check_version(table)
        certificate = take_table(table, "certificate") if "certificate" in table else {}
        families = parse_families(take_table(table, "families"), report_only=report_only)
        for key in _NOT_FOR_EVIDENCE:
            table.pop(key, None)
        check_nothing_left(table, "")
        return cls(families=families, certificate=parse_policy(certificate, "certificate"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFact:
    name: str
    value: str
    trust: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignVerdict:
    """Accepted evidence. `binding` says what it was tied to, `fresh` whether a nonce of the caller's is in it."""

    checks: tuple[Check, ...]
    facts: tuple[ForeignFact, ...]
    binding: str
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFiles:
    """`family` by its name on the command line; `evidence` and `endorsements` are the files' bytes."""

    family: str
    evidence: bytes
    endorsements: Sequence[bytes] = ()


def judge(files: ForeignFiles, policy: ForeignPolicy, binding: ForeignBinding, *, now: float) -> ForeignVerdict:
    """Judge one file of evidence as of `now` (Unix seconds). Raises VerificationError, UndecidedError."""
    log = CheckLog()
    if files.family == CERTIFICATE:
        return _judge_certificate(log, files, policy, binding, now)
    name = FAMILY_NAMES[files.family]
    demanded = policy.families.get(name)
    if demanded is None or name not in FAMILIES:
        log.reject(
            "evidence family",
            Rejection.FAMILY_NOT_ALLOWED,
            "the policy does not accept this family of evidence",
            expected=", ".join(sorted(policy.families)),
            actual=name,
        )
    log.passed("evidence family", name)
    with log.step("files well formed"):
        read = read_evidence(files.family, files.evidence, files.endorsements)
    facts: list[ForeignFact] = []
    judged: list[AuthenticEvidence] = []
    seen: set[bytes] = set()
    for content in read.contents:
        with log.step("evidence well formed"):
            parsed = FAMILIES[name].parse_evidence(content)
        evidence = parsed.authenticate(log, read.endorsements, now=now)
        evidence.check_foreign(log, binding)
        evidence.appraise(log, demanded, now=now)
        log.require(
            evidence.identity not in seen, "distinct devices", Rejection.DEVICE_NOT_ALLOWED, "a device came twice"
        )
        seen.add(evidence.identity)
        judged.append(evidence)
        facts += _facts(evidence)
    if len(read.contents) < demanded.count:
        log.reject(
            "number of devices", Rejection.DEVICE_NOT_ALLOWED, f"{len(seen)} of {demanded.count} devices have evidence"
        )
    if isinstance(demanded, DeviceSetPolicy):
        demanded.check_devices(log, judged)
    bound = _bound(binding)
    return ForeignVerdict(checks=log.checks, facts=tuple(facts), binding=bound, fresh=bound == BINDING_NONCE)


def _judge_certificate(
    log: CheckLog, files: ForeignFiles, policy: ForeignPolicy, binding: ForeignBinding, now: float
) -> ForeignVerdict:
    with log.step("endorsements well formed"):
        endorsements = given.merge(given.recognise(file) for file in files.endorsements)
    question = Question(
        policies=policy.families,
        endorsements=endorsements,
        binding=binding,
        now=now,
        certificate=policy.certificate,
    )
    found = verify_certificate(files.evidence, log, question)
    facts = [fact for evidence in found.evidence for fact in _facts(evidence)]
    facts += [ForeignFact(name=name, value=value, trust="holder-asserted") for name, value in found.asserted]
    fresh = binding.nonce is not None
    return ForeignVerdict(checks=log.checks, facts=tuple(facts), binding=BINDING_KEY, fresh=fresh)


def _facts(evidence: AuthenticEvidence) -> list[ForeignFact]:
    return [ForeignFact(name=name, value=value, trust=evidence.trust) for name, value in evidence.facts]


def _bound(binding: ForeignBinding) -> str:
    if binding.nonce is not None:
        return BINDING_NONCE
    return BINDING_NOT_CHECKED if binding.report_data is None else BINDING_REPORT_DATA
