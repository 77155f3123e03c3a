"""The single comparisons of an appraisal with the caller's policy; `verifier` says which run, and when."""

from __future__ import annotations

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.policy.policy import FAMILY_INSECURE, Policy
from client_sdk.tee.evidence import AuthenticEvidence, DeviceSetPolicy
from client_sdk.tee.families import FAMILIES
from client_sdk.wire import digests
from client_sdk.wire.attestation import AttestationBundle, AttestationClaims


def check_family(log: CheckLog, family: str, policy: Policy) -> None:
    if family == FAMILY_INSECURE and policy.insecure is None:
        log.reject(
            "evidence family",
            Rejection.INSECURE_NOT_ALLOWED,
            "the appliance runs without hardware protection and the policy does not accept that",
        )
    allowed = family in policy.families or family == FAMILY_INSECURE
    if not allowed or family not in FAMILIES or not FAMILIES[family].primary:
        log.reject(
            "evidence family",
            Rejection.FAMILY_NOT_ALLOWED,
            "the policy does not accept this family of evidence",
            expected=", ".join(sorted(policy.families)) or FAMILY_INSECURE,
            actual=family[:64],
        )
    log.passed("evidence family", family)


def check_devices(log: CheckLog, bundle: AttestationBundle, claims: AttestationClaims) -> None:
    """The claims name exactly the other items of the bundle, in order."""
    carried = tuple((item.kind, digests.item_digest(item.kind, item.content)) for item in bundle.evidence[1:])
    log.require(
        claims.devices == carried,
        "device evidence",
        Rejection.EVIDENCE_BINDING,
        "items differ from the claims' devices",
    )


def appraise_devices(log: CheckLog, devices: list[tuple[str, AuthenticEvidence]], policy: Policy, now: float) -> None:
    """Every device beside the first item is of a family the policy names, appraised by it, and counted once."""
    seen: set[bytes] = set()
    for kind, device in devices:
        demanded = policy.families.get(kind)
        if demanded is None or FAMILIES[kind].primary:
            log.reject(
                "device family", Rejection.FAMILY_NOT_ALLOWED, f"the policy does not accept {kind[:64]!r} as a device"
            )
        log.require(
            device.identity not in seen, "distinct devices", Rejection.DEVICE_NOT_ALLOWED, "a device came twice"
        )
        seen.add(device.identity)
        device.appraise(log, demanded, now=now)
    for name, demanded in policy.families.items():
        if not FAMILIES[name].primary:
            present = sum(kind == name for kind, _ in devices)
            enough, missing = present >= demanded.count, f"{present} of {demanded.count} devices have evidence"
            log.require(enough, f"number of {name} devices", Rejection.DEVICE_NOT_ALLOWED, missing)
        if isinstance(demanded, DeviceSetPolicy):
            demanded.check_devices(log, [device for kind, device in devices if kind == name])


def check_issued_at(log: CheckLog, claims: AttestationClaims, now: float, *, max_clock_skew_s: int) -> None:
    """The host sets this clock, so it is judged only as plausible; freshness is the nonce's work."""
    offset_s = claims.issued_at - now
    if abs(offset_s) > max_clock_skew_s:
        log.reject(
            "issued-at",
            Rejection.CLOCK_SKEW,
            "the clocks differ more than the policy allows",
            expected=f"within {max_clock_skew_s} s",
            actual=f"{offset_s:+.0f} s",
        )
    log.passed("issued-at", f"{round(offset_s):+d} s")


def check_policy(log: CheckLog, claims: AttestationClaims, policy: Policy, mode: str) -> None:
    log.equal("mode agrees with the evidence", Rejection.MODE_MISMATCH, expected=mode, actual=claims.mode)
    accepted = []
    for name, identity in sorted(claims.models.items()):
        pins = policy.models.get(name)
        if pins is None:
            log.not_checked(f"model {name}", "served, but the policy does not name it: its answers are refused")
            continue
        if identity not in pins:
            log.reject(
                f"model {name}",
                Rejection.MODEL_NOT_ALLOWED,
                f"the model served as {name} is not one the policy accepts",
                expected=" or ".join(pin.hex() for pin in sorted(pins)),
                actual=identity.hex(),
            )
        log.passed(f"model {name}", identity.hex())
        accepted.append(name)
    if not accepted:
        log.reject(
            "models",
            Rejection.MODEL_NOT_ALLOWED,
            "no model of the policy is served here",
            expected=", ".join(sorted(policy.models)),
            actual=", ".join(sorted(claims.models)) or "none",
        )
    if policy.configs is None:
        log.not_checked("configuration", "the policy pins none")
    elif claims.config not in policy.configs:
        log.reject(
            "configuration",
            Rejection.CONFIG_NOT_ALLOWED,
            "the configuration is not one the policy accepts",
            expected=" or ".join(pin.hex() for pin in sorted(policy.configs)),
            actual=claims.config.hex(),
        )
    else:
        log.passed("configuration", claims.config.hex())
