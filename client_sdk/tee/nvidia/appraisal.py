"""Judge an authentic NVIDIA device by a policy: versions, mode, device, measurements, revocation, service verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from client_sdk.checks import CheckLog, shown
from client_sdk.errors import Rejection, UndecidedError
from client_sdk.tee.nvidia import measurements
from client_sdk.tee.nvidia.policy import NvidiaPolicy
from client_sdk.tee.nvidia.rim import Component, Manifest

if TYPE_CHECKING:
    from client_sdk.tee.nvidia.verify import AuthenticNvidia


def appraise(device: AuthenticNvidia, log: CheckLog, policy: NvidiaPolicy) -> None:
    """Every demand of `policy` on one device. Raises VerificationError through `log`, UndecidedError."""
    log.require(
        device.product.kind in policy.kinds,
        "device kind",
        Rejection.DEVICE_NOT_ALLOWED,
        f"the policy accepts no {device.product.kind}",
    )
    _check_pinned(device, log, policy)
    used = _check_measurements(device, log, policy)
    _check_ocsp(device, log, policy, used)
    _check_service(device, log, policy)


def _check_pinned(device: AuthenticNvidia, log: CheckLog, policy: NvidiaPolicy) -> None:
    report = device.report
    platform, own = Rejection.PLATFORM_NOT_ALLOWED, Rejection.DEVICE_NOT_ALLOWED
    _any_of(log, "architecture", platform, policy.architectures, device.product.architecture)
    if device.product.kind == "gpu":  # switches report neither
        _any_of(log, "driver version", Rejection.TCB_NOT_ALLOWED, policy.driver_versions, report.driver_version)
        _any_of(log, "mode", platform, policy.modes, report.mode)
        wanted = None if policy.protected_pcie is None else frozenset({policy.protected_pcie})
        _any_of(log, "protected PCIe", platform, wanted, report.protected_pcie)
    _any_of(log, "VBIOS version", Rejection.TCB_NOT_ALLOWED, policy.vbios_versions, report.vbios_version)
    _any_of(log, "pinned firmware id", Rejection.MEASUREMENT_NOT_ALLOWED, policy.firmware_ids, device.firmware)
    _any_of(log, "device id", own, policy.device_ids, device.identity)


def _any_of(log: CheckLog, name: str, code: Rejection, allowed: frozenset[object] | None, actual: object) -> None:
    if allowed is None:
        log.not_checked(name, "the policy pins none")
        return
    if actual not in allowed:
        log.reject(
            name,
            code,
            f"the device's {name} is not one the policy accepts",
            expected=" or ".join(sorted(_shown(value) for value in allowed)[:8]),
            actual=_shown(actual),
        )
    log.passed(name, _shown(actual))


def _check_measurements(device: AuthenticNvidia, log: CheckLog, policy: NvidiaPolicy) -> tuple[Manifest, ...]:
    """Manifests given are compared whether or not they are required. Returns those that were used."""
    versions: dict[Component, str | None] = {"vbios": device.report.vbios_version}
    if device.product.kind == "gpu":
        versions["driver"] = device.report.driver_version
    used, missing = [], []
    for component, version in sorted(versions.items()):
        manifest = measurements.choose(
            log, device.vouched.manifests, component=component, product=device.product.chip, version=version
        )
        if manifest is None:
            missing.append(component)
            log.not_checked(f"{component} measurements", f"no {component} manifest for {version} was given")
        else:
            used.append(manifest)
    measurements.check(log, device.report, used)
    if missing and policy.require_rim:
        wanted = " and ".join(f"{component} {versions[component]}" for component in missing)
        raise UndecidedError(
            "ENDORSEMENTS_MISSING", f"reference manifests of {device.product.chip} are needed: {wanted}"
        )
    if missing:
        log.not_checked("developer mode", "only the measurements tell it, and not all were compared")
    else:
        log.passed("developer mode", "off: all measurements are those of production firmware")
    return tuple(used)


def _check_ocsp(device: AuthenticNvidia, log: CheckLog, policy: NvidiaPolicy, used: tuple[Manifest, ...]) -> None:
    """The leaf lives and dies with its firmware: NVIDIA answers for the certificates above it, and for manifests'."""
    wanted = [*device.path[1:], *(signer for manifest in used for signer in manifest.signers)]
    open_ones = [c.common_name() for c in wanted if c.fingerprint not in device.vouched.not_revoked]
    if not open_ones:
        log.passed("OCSP", f"{len(wanted)} certificates are good")
    elif policy.ocsp == "required":
        raise UndecidedError("ENDORSEMENTS_MISSING", f"OCSP answers are needed: {', '.join(map(repr, open_ones[:8]))}")
    else:
        log.not_checked("OCSP", f"{len(open_ones)} of {len(wanted)} certificates have no answer, none is required")


def _check_service(device: AuthenticNvidia, log: CheckLog, policy: NvidiaPolicy) -> None:
    name = "attestation service's verdict"
    verdicts = device.vouched.verdicts
    own = [verdict for verdict in verdicts or () if verdict.is_about(device.path[0].serial)]
    if not own:
        if policy.require_nras:
            needed = "a key set for its token is" if verdicts is None else "a token about this device is"
            raise UndecidedError(
                "ENDORSEMENTS_MISSING", f"the policy requires the attestation service: {needed} needed"
            )
        log.not_checked(name, "no token about this device was verified, none is required")
        return
    for verdict in own:
        wrong = verdict.shortcomings()
        log.require(not wrong, name, Rejection.PLATFORM_NOT_ALLOWED, f"the service found fault: {', '.join(wrong)}")
        log.equal(
            "nonce in the service's token",
            Rejection.NONCE_MISMATCH,
            expected=device.report.nonce.hex(),
            actual=verdict.claims.get("eat_nonce"),
        )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return shown(value)
