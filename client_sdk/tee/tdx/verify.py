"""Verify evidence of a TDX trust domain: a quote, Intel's collateral, and the logs that explain its registers."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, UndecidedError
from client_sdk.tee import x509
from client_sdk.tee.dcap import abi as dcap_abi
from client_sdk.tee.dcap import binding as dcap_binding
from client_sdk.tee.dcap import status as dcap_status
from client_sdk.tee.dcap import verify as dcap
from client_sdk.tee.dcap.roots import intel_root
from client_sdk.tee.evidence import Endorsements, FamilyPolicy, ForeignBinding, SessionBinding, Trust
from client_sdk.tee.tdx import abi, event_log
from client_sdk.tee.tdx.event_log import Event
from client_sdk.tee.tdx.policy import TdxPolicy
from client_sdk.wire.names import MODE_PRODUCTION

_NOT_DEMANDED = "the policy does not demand it"
_MAX_EVENT_FACTS = 32
_MAX_FACT_CHARACTERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticTdx:
    """A quote that Intel's chain vouches for. `events` are those of logs that replay to its registers."""

    quote: abi.TdxQuote
    verdict: dcap.Verdict
    events: tuple[Event, ...]
    has_event_log: bool
    mode: str = MODE_PRODUCTION
    trust: Trust = "hardware-signed"

    @property
    def identity(self) -> bytes:
        """The platform id (PPID): one machine, whichever domain on it."""
        return self.verdict.ppid

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        report = self.quote.report
        measured = (
            ("MRTD", report.mr_td.hex()),
            *((f"RTMR{number}", value.hex()) for number, value in enumerate(report.rtmrs)),
            ("MRCONFIGID", report.mr_config_id.hex()),
            ("MROWNER", report.mr_owner.hex()),
            ("MROWNERCONFIG", report.mr_owner_config.hex()),
            ("MRSEAM", report.mr_seam.hex()),
            ("MRSIGNERSEAM", report.mr_signer_seam.hex()),
            ("TD attributes", report.td_attributes.hex()),
            ("XFAM", report.xfam.hex()),
            ("TEE TCB SVN", report.tee_tcb_svn.hex()),
            ("report data", report.report_data.hex()),
        )
        runtime = [event for event in self.events if event.is_runtime][:_MAX_EVENT_FACTS]
        events = ((f"event {_printable(event.name)}", event.content.hex()[:_MAX_FACT_CHARACTERS]) for event in runtime)
        return (*measured, *dcap_status.facts(self.verdict), *events)

    def check_session(self, log: CheckLog, binding: SessionBinding) -> None:
        dcap_binding.check_session(log, self.quote.report.report_data, binding)

    def check_foreign(self, log: CheckLog, binding: ForeignBinding) -> None:
        dcap_binding.check_foreign(log, self.quote.report.report_data, binding)

    def appraise(self, log: CheckLog, policy: FamilyPolicy | None, *, now: float) -> None:
        if not isinstance(policy, TdxPolicy):
            log.reject("family policy", Rejection.FAMILY_NOT_ALLOWED, "the policy demands nothing of this family")
        dcap_status.appraise(log, policy.status, self.verdict, now=now)
        self._appraise_measurements(log, policy)
        self._appraise_fields(log, policy)
        self._appraise_events(log, policy)

    def _appraise_measurements(self, log: CheckLog, policy: TdxPolicy) -> None:
        report = self.quote.report
        zero = bytes(abi.MR_BYTES)
        untouched = [name for name, value in (("MRTD", report.mr_td),) if value == zero]
        if not policy.allow_zero_rtmrs:
            untouched += [f"RTMR{number}" for number in range(3) if report.rtmrs[number] == zero]
        log.require(
            not untouched,
            "launch was measured",
            Rejection.MEASUREMENT_NOT_ALLOWED,
            f"{', '.join(untouched)} measured nothing (allow_zero_rtmrs admits RTMRs that did not)",
        )
        if policy.measurements is None:
            log.not_checked("launch measurement", "the policy names none: only the report is judged")
        elif not any(pinned.matches(report.mr_td, report.rtmrs) for pinned in policy.measurements):
            log.reject(
                "launch measurement",
                Rejection.MEASUREMENT_NOT_ALLOWED,
                "MRTD and RTMRs together are no set that the policy names",
                expected=" or ".join(one.mrtd.hex() for one in sorted(policy.measurements, key=repr)[:8]),
                actual=", ".join(value.hex() for value in (report.mr_td, *report.rtmrs)),
            )
        else:
            log.passed("launch measurement", report.mr_td.hex())

    def _appraise_fields(self, log: CheckLog, policy: TdxPolicy) -> None:
        report = self.quote.report
        for name in ("mr_config_id", "mr_owner", "mr_owner_config", "mr_seam", "mr_signer_seam"):
            value, pinned = getattr(report, name), policy.fields.get(name)
            if pinned is None:
                log.not_checked(name, _NOT_DEMANDED)
            elif value not in pinned:
                log.reject(
                    name,
                    Rejection.MEASUREMENT_NOT_ALLOWED,
                    f"{name} is not one the policy accepts",
                    expected=" or ".join(pin.hex() for pin in sorted(pinned)[:8]),
                    actual=value.hex(),
                )
            else:
                log.passed(name, value.hex())
        for name, value in (("td_attributes", report.td_attributes), ("xfam", report.xfam)):
            self._appraise_bits(log, policy, name, value)

    def _appraise_bits(self, log: CheckLog, policy: TdxPolicy, name: str, value: bytes) -> None:
        must, must_not = policy.masks.get(f"{name}_set"), policy.masks.get(f"{name}_clear")
        if must is None and must_not is None:
            log.not_checked(name, _NOT_DEMANDED)
            return
        bits = int.from_bytes(value, "little")
        missing = int.from_bytes(must or b"", "little") & ~bits
        surplus = int.from_bytes(must_not or b"", "little") & bits
        log.require(
            not missing and not surplus,
            name,
            Rejection.GUEST_POLICY_NOT_ALLOWED,
            f"{name} {value.hex()} lacks bits {missing:#x} and has forbidden bits {surplus:#x}",
        )

    def _appraise_events(self, log: CheckLog, policy: TdxPolicy) -> None:
        if not self.has_event_log:
            if policy.require_event_log or policy.events:
                log.reject("event log", Rejection.EVENT_LOG_MISMATCH, "the policy asks for an event log; none came")
            log.not_checked("event log", "none came, and the policy does not ask for one")
        measured = [event for event in self.events if event.register == event_log.RUNTIME_REGISTER]
        unexplained = sum(not event.is_runtime for event in measured)
        if unexplained:  # a second event of a name could pass for something whose content nobody recomputes
            message = f"the log has {unexplained} events in RTMR3 of which it does not say what was measured"
            if policy.events:
                log.reject("runtime events complete", Rejection.EVENT_LOG_MISMATCH, message)
            log.not_checked("runtime events complete", message)
        for name, payloads in sorted(policy.events.items()):
            found = [payload for event in measured if (payload := event.payload_as(name)) is not None]
            if len(found) != 1 or found[0] not in payloads:
                log.reject(
                    f"event {name}",
                    Rejection.MEASUREMENT_NOT_ALLOWED,
                    f"the log has {len(found)} events of that name; exactly one with an accepted payload is needed",
                    expected=" or ".join(one.hex()[:_MAX_FACT_CHARACTERS] for one in sorted(payloads)[:8]),
                    actual=", ".join(one.hex()[:_MAX_FACT_CHARACTERS] for one in found[:8]) or "none",
                )
            log.passed(f"event {name}", found[0].hex()[:_MAX_FACT_CHARACTERS])


@dataclass(frozen=True, slots=True)
class TdxEvidence:
    """A well-formed quote. `root` is Intel's pinned root unless a test brings its own."""

    quote: abi.TdxQuote
    root: x509.Certificate

    def authenticate(self, log: CheckLog, endorsements: Endorsements, *, now: float) -> AuthenticTdx:
        quote = self.quote
        certified = dcap.check_quote_signatures(log, quote.section, quote.signed, self.root, now)
        _check_attributes(log, quote.report)
        collateral = dcap.check_collateral(log, certified, endorsements, dcap_abi.TEE_TDX, now)
        verdict = dcap.judge_tcb(log, quote.trimmed, collateral, self.root, now)
        dcap.check_same_report(log, verdict, _fields(quote.report))
        logs = [one for one in endorsements.event_logs if one.kind in event_log.KINDS]
        events: list[Event] = []
        for one in logs:
            with log.step(f"event log ({one.kind}) replays to RTMR0-3"):
                parsed = event_log.parse(one)
                event_log.check(parsed, quote.report.rtmrs)
                events = events or list(parsed)
        return AuthenticTdx(quote=quote, verdict=verdict, events=tuple(events), has_event_log=bool(logs))


def parse_evidence(content: bytes, root: x509.Certificate | None = None) -> TdxEvidence:
    """Parse a `tdx` item: a quote, padding tolerated. Raises WireError, UndecidedError for a version to come."""
    header = dcap_abi.parse_header(content)
    if dcap_abi.is_from_a_later_version(header, max(abi.VERSIONS)):
        raise UndecidedError("UNSUPPORTED_VERSION", f"unsupported version {header.version} of a TDX quote")
    kind = abi.body_type(content)
    if kind is not None and kind > abi.BODY_TD_15 and header.qe_vendor == dcap_abi.INTEL_QE_VENDOR:
        raise UndecidedError("UNSUPPORTED_VERSION", f"unsupported version {kind} of a TD report")
    return TdxEvidence(abi.parse_quote(content), root or intel_root())


def _printable(name: str) -> str:
    """A name that the domain chose, safe to show."""
    return name[:64] if name.isprintable() else ascii(name[:64])


def _check_attributes(log: CheckLog, report: abi.TdReport) -> None:
    """What no policy admits: a domain that the host can look into, move, or have a service domain tend."""
    log.require(
        not report.attribute_bits & abi.DEBUG_BITS,
        "debug mode",
        Rejection.DEBUG_NOT_ALLOWED,
        f"TD attributes {report.td_attributes.hex()}: the host may debug or profile this domain",
    )
    log.require(
        bool(report.attribute_bits & abi.SEPT_VE_DISABLE),
        "SEPT_VE_DISABLE",
        Rejection.GUEST_POLICY_NOT_ALLOWED,
        "the host may inject #VE at any memory access of this domain",
    )
    log.require(
        not report.attribute_bits & abi.MIGRATABLE,
        "not migratable",
        Rejection.GUEST_POLICY_NOT_ALLOWED,
        "a migration domain may move this one to another machine",
    )
    if report.mr_service_td is not None:
        log.require(
            not any(report.mr_service_td),
            "no service domain",
            Rejection.GUEST_POLICY_NOT_ALLOWED,
            "a service domain is bound to this one",
        )


def _fields(report: abi.TdReport) -> dict[str, bytes]:
    fields = {
        "tee_tcb_svn": report.tee_tcb_svn,
        "mr_seam": report.mr_seam,
        "mr_signer_seam": report.mr_signer_seam,
        "td_attributes": report.td_attributes,
        "xfam": report.xfam,
        "mr_td": report.mr_td,
        "mr_config_id": report.mr_config_id,
        "mr_owner": report.mr_owner,
        "mr_owner_config": report.mr_owner_config,
        **{f"rt_mr{number}": value for number, value in enumerate(report.rtmrs)},
        "report_data": report.report_data,
    }
    return fields if report.mr_service_td is None else {**fields, "mr_service_td": report.mr_service_td}
