"""A genuine SNP report against the caller's policy. What the policy does not demand is listed as not checked."""

from __future__ import annotations

from typing import TypeVar

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection, UndecidedError
from client_sdk.tee.snp import abi
from client_sdk.tee.snp.abi import Report
from client_sdk.tee.snp.certificates import VLEK, Revocation, Vek
from client_sdk.tee.snp.policy import SnpPolicy

_NOT_DEMANDED = "the policy does not demand it"

Ordered = TypeVar("Ordered", int, tuple[int, int])
Pin = TypeVar("Pin", bytes, str)


def appraise(log: CheckLog, policy: SnpPolicy, report: Report, vek: Vek, revocation: Revocation) -> None:
    """All demands of `policy`, the defaults that need no key included. Raises PolicyError through `log`."""
    _check_key(log, policy, vek)
    if policy.require_crl and revocation != "current":
        raise UndecidedError("ENDORSEMENTS_MISSING", f"the policy needs a current revocation list for {vek.product}")
    _check_guest_policy(log, policy, report)
    _check_measurements(log, policy, report)
    _check_platform(log, policy, report)
    _check_tcb(log, policy, vek)
    _check_minima(log, policy, report)


def _check_key(log: CheckLog, policy: SnpPolicy, vek: Vek) -> None:
    if vek.kind == VLEK and not policy.allow_vlek:
        log.reject(
            "report key",
            Rejection.PLATFORM_NOT_ALLOWED,
            "the report is signed by a cloud provider's key (VLEK), not by the chip's; allow_vlek = true admits that",
            expected="VCEK",
            actual=f"VLEK of {vek.csp}",
        )
    log.passed("report key", vek.kind if vek.csp is None else f"{vek.kind} of {vek.csp}")
    if vek.kind == VLEK:
        _any_of(log, "cloud provider", Rejection.PLATFORM_NOT_ALLOWED, policy.csp_ids, vek.csp or "")


def _check_guest_policy(log: CheckLog, policy: SnpPolicy, report: Report) -> None:
    bits, names = report.policy, abi.names_of(report.policy, abi.GUEST_POLICY_BITS)
    if not bits & abi.GUEST_POLICY_MUST_BE_ONE or bits & ~abi.GUEST_POLICY_KNOWN:
        log.reject(
            "guest policy bits",
            Rejection.GUEST_POLICY_NOT_ALLOWED,
            "the guest policy has bits that this version does not know",
            actual=f"{bits:#x}",
        )
    log.passed("guest policy bits")
    if "debug" in names and not policy.allow_debug:
        log.reject(
            "debug mode",
            Rejection.DEBUG_NOT_ALLOWED,
            "the host may debug this guest and read its memory",
            expected="off",
            actual="on",
        )
    log.passed("debug mode", "on, allowed by the policy" if "debug" in names else "off")
    if "migration-agent" in names and not policy.allow_migration_agent:
        log.reject(
            "migration agent", Rejection.GUEST_POLICY_NOT_ALLOWED, "a migration agent may move this guest elsewhere"
        )
    log.passed("migration agent", "allowed by the policy" if "migration-agent" in names else "none")
    if report.vmpl not in policy.allow_vmpl:
        log.reject(
            "VMPL",
            Rejection.GUEST_POLICY_NOT_ALLOWED,
            "the report was asked for at another privilege level than the policy allows",
            expected=", ".join(str(level) for level in sorted(policy.allow_vmpl)),
            actual=str(report.vmpl),
        )
    log.passed("VMPL", str(report.vmpl))
    _check_names(
        log, "guest policy", Rejection.GUEST_POLICY_NOT_ALLOWED, (policy.guest_required, policy.guest_forbidden), names
    )


def _check_measurements(log: CheckLog, policy: SnpPolicy, report: Report) -> None:
    if not any(report.measurement):
        log.reject("launch measurement", Rejection.MEASUREMENT_NOT_ALLOWED, "the launch measurement is all zeros")
    code = Rejection.MEASUREMENT_NOT_ALLOWED
    _any_of(log, "launch measurement", code, policy.measurements, report.measurement)
    _any_of(log, "host data", code, policy.host_data, report.host_data)
    _any_of(log, "family id", code, policy.family_ids, report.family_id)
    _any_of(log, "image id", code, policy.image_ids, report.image_id)
    _any_of(log, "id key digest", code, policy.id_key_digests, report.id_key_digest)
    if policy.author_key_digests is not None and not report.author_key_enabled:
        log.reject("author key digest", code, "no author key signed this guest's id key")
    _any_of(log, "author key digest", code, policy.author_key_digests, report.author_key_digest)


def _check_platform(log: CheckLog, policy: SnpPolicy, report: Report) -> None:
    _any_of(log, "chip id", Rejection.DEVICE_NOT_ALLOWED, policy.chip_ids, report.chip_id)
    names = abi.names_of(report.platform_info, abi.PLATFORM_BITS)
    _check_names(
        log, "platform", Rejection.PLATFORM_NOT_ALLOWED, (policy.platform_required, policy.platform_forbidden), names
    )
    unknown = report.platform_info & ~abi.PLATFORM_KNOWN
    if unknown:
        log.not_checked("unknown platform bits", f"{unknown:#x}: this version does not know what they mean")


def _check_tcb(log: CheckLog, policy: SnpPolicy, vek: Vek) -> None:
    """By the certificate's levels, which AMD signed; the report states the same ones."""
    _any_of(log, "product", Rejection.PLATFORM_NOT_ALLOWED, policy.products, vek.product)
    if policy.min_tcb is None:
        log.not_checked("minimum patch levels", f"{_NOT_DEMANDED} (certified: {vek.tcb})")
        return
    levels = policy.min_tcb.get("", policy.min_tcb.get(vek.product))
    if levels is None:
        log.reject(
            "minimum patch levels",
            Rejection.TCB_NOT_ALLOWED,
            "the policy has no minimum for this product",
            expected=", ".join(policy.min_tcb),
            actual=vek.product,
        )
    for component, least in levels.items():
        actual = getattr(vek.tcb, component)
        if actual is None or actual < least:
            log.reject(
                f"patch level of {component}",
                Rejection.TCB_NOT_ALLOWED,
                "the platform's firmware is older than the policy allows",
                expected=f"at least {least}",
                actual=str(actual),
            )
    log.passed("minimum patch levels", str(vek.tcb))


def _check_minima(log: CheckLog, policy: SnpPolicy, report: Report) -> None:
    _at_least(log, "guest SVN", Rejection.GUEST_POLICY_NOT_ALLOWED, policy.min_guest_svn, report.guest_svn)
    _at_least(log, "firmware ABI in the guest policy", Rejection.GUEST_POLICY_NOT_ALLOWED, policy.min_abi, report.abi)
    firmware = report.committed_firmware[:2]
    _at_least(log, "firmware version", Rejection.TCB_NOT_ALLOWED, policy.min_firmware, firmware)


def _at_least(log: CheckLog, name: str, code: Rejection, least: Ordered | None, actual: Ordered) -> None:
    if least is not None and actual < least:
        log.reject(
            name,
            code,
            f"the {name} is lower than the policy allows",
            expected=f"at least {_shown(least)}",
            actual=_shown(actual),
        )
    _listed(log, name, checked=least is not None, why=_NOT_DEMANDED)


def _check_names(
    log: CheckLog,
    what: str,
    code: Rejection,
    demands: tuple[frozenset[str] | None, frozenset[str] | None],
    actual: frozenset[str],
) -> None:
    required, forbidden = demands
    for verb, wrong in (
        ("requires", (required or frozenset()) - actual),
        ("forbids", (forbidden or frozenset()) & actual),
    ):
        if wrong:
            log.reject(
                f"{what} settings",
                code,
                f"the policy {verb} {', '.join(sorted(wrong))}",
                actual=", ".join(sorted(actual)) or "none set",
            )
    _listed(log, f"{what} settings", checked=required is not None or forbidden is not None, why=_NOT_DEMANDED)


def _any_of(log: CheckLog, name: str, code: Rejection, allowed: frozenset[Pin] | None, actual: Pin) -> None:
    if allowed is not None and actual not in allowed:
        log.reject(
            name,
            code,
            f"the {name} is none that the policy allows",
            expected=", ".join(_shown(value) for value in sorted(allowed)),
            actual=_shown(actual),
        )
    _listed(log, name, checked=allowed is not None, why=_NOT_DEMANDED)


def _listed(log: CheckLog, name: str, *, checked: bool, why: str) -> None:
    if checked:
        log.passed(name)
    else:
        log.not_checked(name, why)


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return ".".join(str(part) for part in value)
    return str(value)


def facts(report: Report, vek: Vek) -> tuple[tuple[str, str], ...]:
    """What the report and AMD's certificate say, to show."""
    guest, platform = (
        abi.names_of(report.policy, abi.GUEST_POLICY_BITS),
        abi.names_of(report.platform_info, abi.PLATFORM_BITS),
    )
    shown = [
        ("SNP product", vek.product),
        ("SNP report version", str(report.version)),
        ("SNP report key", vek.kind if vek.csp is None else f"{vek.kind} of {vek.csp}"),
        ("SNP chip id", report.chip_id.hex()),
        ("SNP launch measurement", report.measurement.hex()),
        ("SNP report data", report.report_data.hex()),
        ("SNP host data", report.host_data.hex()),
        ("SNP VMPL", str(report.vmpl)),
        ("SNP guest policy", f"{report.policy:#x} ({', '.join(sorted(guest)) or 'nothing set'})"),
        ("SNP guest SVN", str(report.guest_svn)),
        ("SNP family id", report.family_id.hex()),
        ("SNP image id", report.image_id.hex()),
        ("SNP id key digest", report.id_key_digest.hex()),
        ("SNP author key digest", report.author_key_digest.hex()),
        ("SNP report id", report.report_id.hex()),
        ("SNP platform info", f"{report.platform_info:#x} ({', '.join(sorted(platform)) or 'nothing set'})"),
        ("SNP certified patch levels", str(vek.tcb)),
        ("SNP firmware", f"{_shown(report.firmware)} (committed {_shown(report.committed_firmware)})"),
    ]
    if report.mitigations is not None:
        shown.append(("SNP mitigation vectors", f"launch {report.mitigations[0]:#x}, now {report.mitigations[1]:#x}"))
    return tuple(shown)
