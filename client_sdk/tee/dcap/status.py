"""What a policy may say about an Intel platform's TCB: which status, which advisories, how old, which machine.

The keys are the same in `[families.tdx]` and `[families.sgx]`; docs/families/tdx.md lists them with their defaults.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from client_sdk.checks import CheckLog
from client_sdk.errors import PolicyFileError, Rejection
from client_sdk.tee import pins
from client_sdk.tee.dcap.verify import Level, Verdict

PPID_BYTES = 16
UP_TO_DATE, OUT_OF_DATE = "UpToDate", "OutOfDate"
ALLOWABLE_STATUSES = frozenset(
    {
        "SWHardeningNeeded",
        "ConfigurationNeeded",
        "ConfigurationAndSWHardeningNeeded",
        OUT_OF_DATE,
        "OutOfDateConfigurationNeeded",
    }
)
_ADVISORY = re.compile(r"INTEL-SA-[0-9]{5}")
_MAX_GRACE_S = 3 * 366 * 86_400
_FLAGS = ("forbid_dynamic_platform", "forbid_cached_keys", "forbid_smt")
_NOT_DEMANDED = "the policy does not demand it"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusPolicy:
    """`allow` names statuses accepted beside UpToDate; grace periods are seconds after a TCB level's date, None: none.

    `ppids` are 16-byte platform ids, None: any. The three flags refuse what the PCK certificate does not deny.
    """

    allow: frozenset[str] = frozenset()
    reject_advisories: frozenset[str] = frozenset()
    platform_grace_period_s: int | None = None
    qe_grace_period_s: int | None = None
    min_evaluation_number: int | None = None
    forbid_dynamic_platform: bool = False
    forbid_cached_keys: bool = False
    forbid_smt: bool = False
    ppids: frozenset[bytes] | None = None

    def to_table(self) -> dict[str, object]:
        """The keys that differ from their defaults."""
        table: dict[str, object] = {}
        if self.allow:
            table["allow_tcb_status"] = sorted(self.allow)
        if self.reject_advisories:
            table["reject_advisories"] = sorted(self.reject_advisories)
        for key, value in (
            ("platform_grace_period_s", self.platform_grace_period_s),
            ("qe_grace_period_s", self.qe_grace_period_s),
            ("min_tcb_evaluation_data_number", self.min_evaluation_number),
        ):
            if value is not None:
                table[key] = value
        table.update({flag: True for flag in _FLAGS if getattr(self, flag)})
        if self.ppids is not None:
            table["ppids"] = pins.hex_list(self.ppids)
        return table


def take_status_policy(table: dict[str, object], where: str) -> StatusPolicy:
    """Take these keys out of a family's table. Raises PolicyFileError naming the key at fault."""
    allow = pins.take_names(table, "allow_tcb_status", where) or frozenset()
    for status in sorted(allow - ALLOWABLE_STATUSES):
        raise PolicyFileError(
            f"{where}.allow_tcb_status: {status!r} is not one of {', '.join(sorted(ALLOWABLE_STATUSES))}"
        )
    advisories = pins.take_names(table, "reject_advisories", where) or frozenset()
    for advisory in sorted(advisories):
        if _ADVISORY.fullmatch(advisory) is None:
            raise PolicyFileError(f"{where}.reject_advisories: {advisory!r} is not of the form INTEL-SA-00000")
    policy = StatusPolicy(
        allow=allow,
        reject_advisories=advisories,
        platform_grace_period_s=pins.take_integer(table, "platform_grace_period_s", where, low=1, high=_MAX_GRACE_S),
        qe_grace_period_s=pins.take_integer(table, "qe_grace_period_s", where, low=1, high=_MAX_GRACE_S),
        min_evaluation_number=pins.take_integer(
            table, "min_tcb_evaluation_data_number", where, low=1, high=(1 << 32) - 1
        ),
        ppids=pins.take_pins(table, "ppids", PPID_BYTES, where),
        **{flag: pins.take_flag(table, flag, where) for flag in _FLAGS},
    )
    if OUT_OF_DATE in allow and (policy.platform_grace_period_s or policy.qe_grace_period_s):
        raise PolicyFileError(f"{where}: a grace period says nothing where OutOfDate is allowed for good")
    return policy


def appraise(log: CheckLog, policy: StatusPolicy, verdict: Verdict, *, now: float) -> None:
    """Judge the platform. `now` (Unix seconds) counts for grace periods alone. Raises PolicyError through `log`."""
    _appraise_status(log, policy, verdict, now)
    _appraise_advisories(log, policy, verdict)
    least = policy.min_evaluation_number
    if least is None:
        log.not_checked("TCB evaluation data number", f"{verdict.evaluation_number}; {_NOT_DEMANDED}")
    elif verdict.evaluation_number < least:
        log.reject(
            "TCB evaluation data number",
            Rejection.TCB_NOT_ALLOWED,
            "the collateral is from an older TCB evaluation than the policy asks for",
            expected=f"{least} or more",
            actual=str(verdict.evaluation_number),
        )
    else:
        log.passed("TCB evaluation data number", str(verdict.evaluation_number))
    for name, forbidden, value in (
        ("dynamic platform", policy.forbid_dynamic_platform, verdict.dynamic_platform),
        ("cached keys", policy.forbid_cached_keys, verdict.cached_keys),
        ("SMT", policy.forbid_smt, verdict.smt),
    ):
        _appraise_flag(log, name, forbidden, value)
    if policy.ppids is None:
        log.not_checked("platform id", _NOT_DEMANDED)
    elif verdict.ppid not in policy.ppids:
        log.reject(
            "platform id",
            Rejection.DEVICE_NOT_ALLOWED,
            "the policy does not name this platform",
            expected=" or ".join(pins.hex_list(policy.ppids)),
            actual=verdict.ppid.hex(),
        )
    else:
        log.passed("platform id", verdict.ppid.hex())


def _appraise_status(log: CheckLog, policy: StatusPolicy, verdict: Verdict, now: float) -> None:
    if verdict.status == UP_TO_DATE or verdict.status in policy.allow:
        log.passed("TCB status", verdict.status)
    elif verdict.status == OUT_OF_DATE and _in_grace(policy, verdict, now):
        log.passed("TCB status", f"{verdict.status}, within the grace period")
    else:
        log.reject(
            "TCB status",
            Rejection.TCB_NOT_ALLOWED,
            "Intel does not call this platform's TCB one that the policy accepts",
            expected=" or ".join([UP_TO_DATE, *sorted(policy.allow)]),
            actual=verdict.status,
        )


def _in_grace(policy: StatusPolicy, verdict: Verdict, now: float) -> bool:
    """Every component out of date is so for less than its grace period, and one of them explains the status."""

    def stale(level: Level) -> bool:
        return level.status.startswith(OUT_OF_DATE)

    judged = [
        (level, grace)
        for level, grace in (
            (verdict.platform, policy.platform_grace_period_s),
            (verdict.qe, policy.qe_grace_period_s),
        )
        if stale(level)
    ]
    return bool(judged) and all(grace is not None and now <= level.date + grace for level, grace in judged)


def _appraise_advisories(log: CheckLog, policy: StatusPolicy, verdict: Verdict) -> None:
    listed = ", ".join(verdict.advisories) or "none"
    if not policy.reject_advisories:
        log.not_checked("security advisories", f"{listed}; {_NOT_DEMANDED}")
        return
    found = sorted(policy.reject_advisories.intersection(verdict.advisories))
    if found:
        log.reject(
            "security advisories",
            Rejection.TCB_NOT_ALLOWED,
            f"the platform is open to {', '.join(found)}",
            expected="none of " + ", ".join(sorted(policy.reject_advisories)),
            actual=listed,
        )
    log.passed("security advisories", listed)


def _appraise_flag(log: CheckLog, name: str, forbidden: bool, value: str) -> None:
    if not forbidden:
        log.not_checked(name, f"{value}; {_NOT_DEMANDED}")
        return
    log.require(
        value == "False",
        f"no {name}",
        Rejection.PLATFORM_NOT_ALLOWED,
        f"the PCK certificate says {value!r} about {name}",
    )


def facts(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    """(name, value) of what Intel says about the platform."""
    return (
        ("TCB status", verdict.status),
        ("security advisories", ", ".join(verdict.advisories) or "none"),
        ("TCB evaluation data number", str(verdict.evaluation_number)),
        ("platform TCB level", verdict.platform.status),
        ("quoting enclave TCB level", verdict.qe.status),
        ("FMSPC", verdict.fmspc.hex()),
        ("platform id", verdict.ppid.hex()),
        ("SGX type", {0: "standard", 1: "scalable", 2: "scalable with integrity"}.get(verdict.sgx_type, "unknown")),
        ("dynamic platform", verdict.dynamic_platform),
        ("cached keys", verdict.cached_keys),
        ("SMT", verdict.smt),
    )
