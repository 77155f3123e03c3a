"""Compare what a device measured with what its reference manifests say (nvtrust's rules, section "verifier")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.tee.nvidia.abi import DISABLED, ENABLED, Report
from client_sdk.tee.nvidia.rim import Component, Manifest

_NVDEC0_INDEX = 35


def choose(
    log: CheckLog, manifests: Sequence[Manifest], *, component: Component, product: str, version: str | None
) -> Manifest | None:
    """The manifest for this very version; None where none was given for this product and component.

    One for another version was meant for another device or is the wrong one: either way this device differs from all
    that its product was vouched for, so ENDORSEMENT_MISMATCH is raised through `log`.
    """
    given = [m for m in manifests if m.component == component and m.product.replace("_", "") == product]
    matching = [m for m in given if m.version == version]
    if given and not matching:
        log.reject(
            f"{component} manifest",
            Rejection.ENDORSEMENT_MISMATCH,
            f"no {component} manifest is for the version that the device reports",
            expected=" or ".join(sorted({m.version for m in given})),
            actual=version or "none",
        )
    return matching[0] if matching else None


def check(log: CheckLog, report: Report, manifests: Sequence[Manifest]) -> None:
    """Every active measurement of every manifest is what the device reports. Raises through `log`.

    Golden index i is SPDM block i + 1. A measurement active in two manifests is a contradiction, never a choice.
    """
    golden: dict[int, tuple[Component, frozenset[bytes]]] = {}
    for manifest in manifests:
        for index, values in manifest.golden.items():
            if index in golden:
                log.reject(
                    "manifests agree", Rejection.ENDORSEMENT_MISMATCH, f"two manifests claim measurement {index}"
                )
            golden[index] = (manifest.component, values)
    skipped = _skipped(log, report)
    counts: dict[Component, int] = {}
    for index, (component, values) in sorted(golden.items()):
        if index not in skipped:
            _check_one(log, report.measurements, index, component, values)
            counts[component] = counts.get(component, 0) + 1
    for part, count in counts.items():
        log.passed(f"{part} measurements", f"{count} of {count} match")
    for index in sorted(skipped & golden.keys()):
        log.not_checked(f"measurement {index}", "the video decoder it measures is switched off")


def _check_one(
    log: CheckLog, measured: Mapping[int, bytes], index: int, component: Component, values: frozenset[bytes]
) -> None:
    actual = measured.get(index + 1)
    if actual not in values:
        log.reject(
            f"{component} measurements",
            Rejection.MEASUREMENT_NOT_ALLOWED,
            f"measurement {index} is not what the {component} manifest says",
            expected=" or ".join(sorted(value.hex() for value in values)[:4]),
            actual="none" if actual is None else actual.hex(),
        )


def _skipped(log: CheckLog, report: Report) -> frozenset[int]:
    """Index 35 measures the decoder NVDEC0 and means nothing where that is off."""
    status = report.nvdec0_status
    if status is not None and status not in (ENABLED, DISABLED):
        log.reject("decoder status", Rejection.PLATFORM_NOT_ALLOWED, f"NVDEC0 has the unknown status {status:#04x}")
    return frozenset({_NVDEC0_INDEX}) if status == DISABLED else frozenset()
