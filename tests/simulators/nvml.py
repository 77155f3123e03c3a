"""NVML as nvidia-ml-py shows it, with devices of tests/simulators/nvidia.py behind it and NVML's own structures."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pynvml

from tests.simulators.nvidia import Device, Report


class Library:
    """Stands for the module `pynvml`. `fails` names functions that raise NVML's error for "not supported"."""

    NVMLError = pynvml.NVMLError
    NVML_CC_SYSTEM_FEATURE_ENABLED = pynvml.NVML_CC_SYSTEM_FEATURE_ENABLED

    def __init__(self, devices: Sequence[Device], *, feature: int = 1, fails: frozenset[str] = frozenset()) -> None:
        self.devices = devices
        self.feature = feature
        self.fails = fails
        self.report = Report()
        self.spoilt_nonce: bytes | None = None
        self.initialised = False

    def _called(self, name: str) -> None:
        if name in self.fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if not self.initialised and name != "nvmlInit":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        self.initialised = True

    def nvmlSystemGetConfComputeState(self) -> Any:
        self._called("nvmlSystemGetConfComputeState")
        state = pynvml.c_nvmlConfComputeSystemState_t()
        state.ccFeature = self.feature
        return state

    def nvmlDeviceGetCount(self) -> int:
        self._called("nvmlDeviceGetCount")
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._called("nvmlDeviceGetHandleByIndex")
        return index

    def nvmlDeviceGetConfComputeGpuAttestationReport(self, handle: int, nonce: bytes) -> Any:
        self._called("nvmlDeviceGetConfComputeGpuAttestationReport")
        asked = Report(
            nonce=self.spoilt_nonce or bytes((ctypes.c_uint8 * len(nonce))(*nonce)),
            version=self.report.version,
            raw_record=self.report.raw_record,
        )
        content = b"".join(self.devices[handle].exchange(asked))
        report = pynvml.c_nvmlConfComputeGpuAttestationReport_t()
        report.attestationReport[: len(content)] = content
        report.attestationReportSize = len(content)
        return report

    def nvmlDeviceGetConfComputeGpuCertificate(self, handle: int) -> Any:
        self._called("nvmlDeviceGetConfComputeGpuCertificate")
        chain = self.devices[handle].pem()
        certificate = pynvml.c_nvmlConfComputeGpuCertificate_t()
        certificate.attestationCertChain[: len(chain)] = chain
        certificate.attestationCertChainSize = len(chain) + 1  # with the NUL behind the text
        return certificate
