"""A real TPM in software (swtpm) on loopback ports, booted by a firmware of ours that measures what a test says."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpm2_pytss import ESAPI, TPM2_ALG
from tpm2_pytss.constants import ESYS_TR
from tpm2_pytss.types import (
    TPM2B_PUBLIC,
    TPM2B_SENSITIVE_CREATE,
    TPML_DIGEST_VALUES,
    TPML_PCR_SELECTION,
    TPMS_PCR_SELECTION,
    TPMT_HA,
    TPMU_HA,
)

BOOT: Mapping[int, bytes] = {register: bytes([register + 1]) * 32 for register in (*range(10), 11)}
"""What a boot measures into which register: one digest each."""
_START_LIMIT_S = 20.0


@dataclass
class Swtpm:
    """A running TPM. One connection at a time: whoever holds one keeps others waiting."""

    state: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def tcti(self) -> str:
        return f"swtpm:host=127.0.0.1,port={self.port}"

    def start(self, measured: Mapping[int, bytes] = BOOT) -> None:
        """Power it on (again: with the seeds it has, so with the same keys) and measure a boot."""
        self.state.mkdir(parents=True, exist_ok=True)
        ports = (f"type=tcp,port={self.port},bindaddr=127.0.0.1", f"type=tcp,port={self.port + 1},bindaddr=127.0.0.1")
        command = ["swtpm", "socket", "--tpm2", "--tpmstate", f"dir={self.state}", "--server", ports[0]]
        command += ["--ctrl", ports[1], "--flags", "not-need-init,startup-clear"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()
        for register, digest in measured.items():
            self.extend(register, digest)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None

    @contextmanager
    def opened(self) -> Iterator[ESAPI]:
        esapi = ESAPI(self.tcti)
        try:
            yield esapi
        finally:
            esapi.close()

    def extend(self, register: int, digest: bytes) -> None:
        value = TPMT_HA(hashAlg=TPM2_ALG.SHA256, digest=TPMU_HA(sha256=digest))
        with self.opened() as esapi:
            esapi.pcr_extend(ESYS_TR(register), TPML_DIGEST_VALUES([value]))

    def drop_bank(self) -> None:
        """Keep no SHA-256 bank from the next start on."""
        none = TPMS_PCR_SELECTION(hash=TPM2_ALG.SHA256, sizeofSelect=3, pcrSelect=bytes(3))
        with self.opened() as esapi:
            esapi.pcr_allocate(TPML_PCR_SELECTION([none]), session1=ESYS_TR.PASSWORD)

    def persist_key(self, handle: int) -> bytes:
        """Make an RSA attestation key and keep it under `handle`; returns its TPMT_PUBLIC."""
        attributes = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|restricted|sign"
        template = TPM2B_PUBLIC.parse("rsa2048:rsassa-sha256:null", objectAttributes=attributes, nameAlg="sha256")
        with self.opened() as esapi:
            key, public, *_ = esapi.create_primary(TPM2B_SENSITIVE_CREATE(), template, ESYS_TR.OWNER)
            esapi.evict_control(ESYS_TR.OWNER, key, handle)
            esapi.flush_context(key)
            marshalled: bytes = public.publicArea.marshal()
            return marshalled

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "swtpm ended"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port + 1)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("swtpm does not listen")


@contextmanager
def swtpm(state: Path) -> Iterator[Swtpm]:
    """A booted TPM whose seeds are in `state`."""
    tpm = Swtpm(state, free_ports())
    tpm.start()
    try:
        yield tpm
    finally:
        tpm.stop()


def free_ports() -> int:
    """A port that is free on loopback together with the next one: commands and control."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
