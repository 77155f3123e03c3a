"""Evidence of NVIDIA GPUs through NVML: each device signs the nonce that ties it to the CPU's claims.

How NVML is reached is an argument; what is asked and what is believed of the answer is here. A machine whose devices
are asked for has all of them in its evidence or none at all: nothing is left out silently.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from appliance.attestation.attester import Collected
from appliance.errors import AttestationUnavailable, BootError
from client_sdk.tee.nvidia import abi
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError

T = TypeVar("T")

_MAX_DEVICES = 62  # of the 64 items a bundle may have
_CODE = "attestation_unavailable"


class NvmlFailure(Exception):
    """NVML refused or failed; the message is NVML's own."""


class Nvml(Protocol):
    """What is needed of NVML, devices by index. Every call may raise NvmlFailure."""

    def confidential(self) -> bool:
        """Whether confidential computing is switched on."""

    def count(self) -> int: ...

    def report(self, index: int, nonce: bytes) -> bytes:
        """The SPDM request and its signed response over `nonce` (32 bytes), one behind the other."""

    def chain(self, index: int) -> bytes:
        """The device's certificates as PEM text, NULs behind it or not."""


class NvidiaDevices:
    """Collects the evidence of every GPU of this machine, through `nvml`."""

    kind = abi.KIND

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def collect(self, nonce: bytes) -> Collected:
        """One item per GPU over `nonce` (32 bytes). Raises AttestationUnavailable."""
        try:
            count = self._nvml.count()
            if not 1 <= count <= _MAX_DEVICES:
                raise AttestationUnavailable(_CODE, f"NVML tells of {count} GPUs; 1 to {_MAX_DEVICES} can be attested")
            items = tuple(self._item(index, nonce) for index in range(count))
        except NvmlFailure as error:
            raise AttestationUnavailable(_CODE, f"NVML does not attest: {error}") from error
        except (WireError, abi.UnsupportedReport) as error:
            raise AttestationUnavailable(_CODE, f"NVML gave a report that cannot be used: {error}") from error
        return Collected(evidence=items)

    def _item(self, index: int, nonce: bytes) -> EvidenceItem:
        request, response = abi.split_report(self._nvml.report(index, nonce))
        if abi.parse_report(request, response).nonce != nonce:
            raise AttestationUnavailable(_CODE, f"GPU {index} signed another nonce than the one it was given")
        chain = abi.pem_to_der(self._nvml.chain(index))
        item = abi.NvidiaItem(request=request, response=response, chain=chain)
        return EvidenceItem(kind=self.kind, content=abi.encode_item(item))


class DriverNvml:
    """NVML of the installed driver through nvidia-ml-py (`library` is its module `pynvml`).

    Raises NvmlFailure where there is no driver.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call(library.nvmlInit)

    def confidential(self) -> bool:
        state = self._call(self._library.nvmlSystemGetConfComputeState)
        return bool(state.ccFeature == self._library.NVML_CC_SYSTEM_FEATURE_ENABLED)

    def count(self) -> int:
        return int(self._call(self._library.nvmlDeviceGetCount))

    def report(self, index: int, nonce: bytes) -> bytes:
        library = self._library
        device = self._call(lambda: library.nvmlDeviceGetHandleByIndex(index))
        report = self._call(lambda: library.nvmlDeviceGetConfComputeGpuAttestationReport(device, nonce))
        return bytes(report.attestationReport)[: report.attestationReportSize]

    def chain(self, index: int) -> bytes:
        library = self._library
        device = self._call(lambda: library.nvmlDeviceGetHandleByIndex(index))
        certificate = self._call(lambda: library.nvmlDeviceGetConfComputeGpuCertificate(device))
        return bytes(certificate.attestationCertChain)[: certificate.attestationCertChainSize]

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except self._library.NVMLError as error:
            raise NvmlFailure(str(error)) from error


def create(load: Callable[[str], Any] = importlib.import_module) -> NvidiaDevices:
    """The devices of this machine. Raises BootError where they cannot be attested, and says why."""
    try:
        nvml = DriverNvml(load("pynvml"))
        if not nvml.confidential():
            raise BootError("the GPUs' confidential computing is switched off, so none of them can attest")
        count = nvml.count()
    except ImportError as error:
        raise BootError("attesting GPUs needs the extra: attested-inference[nvml]") from error
    except NvmlFailure as error:
        raise BootError(f"the GPUs cannot be asked for evidence: {error}") from error
    if not count:
        raise BootError("NVML tells of no GPU")
    return NvidiaDevices(nvml)
