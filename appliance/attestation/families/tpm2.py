"""Evidence of a TPM 2.0: a quote over configured registers by an attestation key that never leaves the chip.

Unless a persistent key is configured, the key is the primary one of a fixed template in the endorsement hierarchy: the
TPM makes the same key from its seed at every boot, so a policy can pin it and nothing has to be stored.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from appliance.attestation.attester import Binding, Collected
from appliance.config.settings import AttestationConfig
from appliance.errors import AttestationUnavailable, BootError
from client_sdk.tee.tpm2 import abi
from client_sdk.wire import digests
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError
from client_sdk.wire.names import MODE_PRODUCTION

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_LIBRARY = "tpm2_pytss"
_KEY_TEMPLATE = "ecc256:ecdsa-sha256:null"
_KEY_ATTRIBUTES = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|restricted|sign|noda"
_REGISTERS = 24
_READ_AT_ONCE = 8  # TPML_DIGEST holds no more
_PERSISTENT_HANDLES = range(0x81000000, 0x82000000)
_DEVICE = "device:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpm2Settings:
    """`tcti` says how the TPM is reached (tpm2-tss), `pcrs` which registers of the SHA-256 bank are quoted.

    `key_handle` is a persistent attestation key (None: the primary key of the fixed template), `certificate` the
    DER certificate of the key, if somebody issued one.
    """

    tcti: str
    pcrs: tuple[int, ...]
    key_handle: int | None = None
    certificate: bytes | None = None

    @classmethod
    def of(cls, config: AttestationConfig) -> Tpm2Settings:
        """Raises BootError naming the setting at fault."""
        return cls(
            tcti=config.tpm2_tcti,
            pcrs=_registers(config.tpm2_pcrs),
            key_handle=_key_handle(config.tpm2_key_handle),
            certificate=_certificate(config.tpm2_ak_certificate),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A connection to the TPM (tpm2_pytss.ESAPI), the key's handle in it and its marshalled TPMT_PUBLIC."""

    esapi: Any
    key: Any
    public: bytes


class Tpm2Attester:
    """Makes quotes. The connection is opened when first needed, and anew after a failure: a TPM that was reset knows
    no handle of before.
    """

    family = abi.KIND
    mode = MODE_PRODUCTION

    def __init__(self, settings: Tpm2Settings) -> None:
        self._settings = settings
        self._selection = abi.PcrSelection(bank=abi.SHA256, registers=settings.pcrs)
        self._library: Any = importlib.import_module(_LIBRARY)
        self._opened: _Opened | None = None

    def collect(self, binding: Binding) -> Collected:
        """A fresh quote whose extraData names the claims. Raises AttestationUnavailable."""
        content = self._attempt(lambda opened: self._quote(opened, binding.extra_data))
        return Collected(evidence=(EvidenceItem(kind=self.family, content=content),))

    def reference_table(self) -> Mapping[str, object]:
        """The attestation key and the registers as they are now, in the words of a policy's `[families.tpm2]`."""
        public, values = self._attempt(lambda opened: (opened.public, self._read_registers(opened)))
        return {
            "ak_pins": [digests.sha256(public).hex()],
            "pcr_sets": [{str(register): values[register].hex() for register in self._settings.pcrs}],
        }

    def close(self) -> None:
        """Let go of the TPM; it is opened again when needed."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            if self._settings.key_handle is None:  # a TPM without a resource manager has room for three objects
                opened.esapi.flush_context(opened.key)
        except self._library.TSS2_Exception as error:
            _LOG.debug("the TPM's key could not be flushed: %s", error)
        opened.esapi.close()

    def _attempt(self, action: Callable[[_Opened], T]) -> T:
        """Twice, the second time on a new connection: the first may be one from before the TPM was reset."""
        try:
            return action(self._open())
        except self._library.TSS2_Exception:
            self.close()
        try:
            return action(self._open())
        except self._library.TSS2_Exception as error:
            self.close()
            raise AttestationUnavailable("attestation_unavailable", f"the TPM does not answer: {error}") from error

    def _open(self) -> _Opened:
        if self._opened is None:
            esapi = self._library.ESAPI(self._settings.tcti)
            try:
                self._opened = self._load_key(esapi)
            except self._library.TSS2_Exception:
                esapi.close()
                raise
        return self._opened

    def _load_key(self, esapi: Any) -> _Opened:
        library, handle = self._library, self._settings.key_handle
        if handle is None:
            template = library.TPM2B_PUBLIC.parse(_KEY_TEMPLATE, objectAttributes=_KEY_ATTRIBUTES, nameAlg="sha256")
            sensitive = library.TPM2B_SENSITIVE_CREATE()
            key, public, *_ = esapi.create_primary(sensitive, template, library.ESYS_TR.ENDORSEMENT)
        else:
            key = esapi.tr_from_tpmpublic(handle)
            public, *_ = esapi.read_public(key)
        return _Opened(esapi=esapi, key=key, public=public.publicArea.marshal())

    def _quote(self, opened: _Opened, extra_data: bytes) -> bytes:
        library = self._library
        selection = library.TPML_PCR_SELECTION.parse(_selection_text(self._settings.pcrs))
        quoted, signature = opened.esapi.quote(opened.key, selection, library.TPM2B_DATA(extra_data))
        attest = bytes(quoted.attestationData)
        try:
            selections = abi.parse_attest(attest).selections
        except WireError as error:
            raise AttestationUnavailable("attestation_unavailable", f"the TPM's quote is odd: {error}") from error
        if selections != (self._selection,):  # a TPM leaves out registers of a bank that it does not keep
            raise AttestationUnavailable("attestation_unavailable", "the TPM keeps no SHA-256 bank of these registers")
        return abi.encode_item(
            attest=attest,
            signature=signature.marshal(),
            public=opened.public,
            certificate=self._settings.certificate,
        )

    def _read_registers(self, opened: _Opened) -> dict[int, bytes]:
        values: dict[int, bytes] = {}
        counters = set()
        for start in range(0, len(self._settings.pcrs), _READ_AT_ONCE):
            wanted = self._settings.pcrs[start : start + _READ_AT_ONCE]
            counter, _, found = opened.esapi.pcr_read(_selection_text(wanted))
            counters.add(counter)
            values.update(zip(wanted, (bytes(value) for value in found), strict=False))
        if len(values) != len(self._settings.pcrs) or len(counters) != 1:
            raise AttestationUnavailable(
                "attestation_unavailable", "the registers cannot be read, or changed meanwhile: try again"
            )
        return values


def missing(config: AttestationConfig) -> str | None:
    """Why there is no TPM to use here, None where there is one."""
    if importlib.util.find_spec(_LIBRARY) is None:
        return "tpm2-pytss is not installed: install attested-inference[tpm2]"
    if config.tpm2_tcti.startswith(_DEVICE) and not Path(config.tpm2_tcti.removeprefix(_DEVICE)).exists():
        return f"there is no {config.tpm2_tcti.removeprefix(_DEVICE)}"
    return None


def create(config: AttestationConfig, _random_bytes: Callable[[int], bytes]) -> Tpm2Attester:
    """Raises BootError naming the setting at fault."""
    return Tpm2Attester(Tpm2Settings.of(config))


def _registers(texts: Iterable[str]) -> tuple[int, ...]:
    registers = set()
    for text in texts:
        if not text.isascii() or not text.isdecimal() or int(text) >= _REGISTERS:
            raise BootError(f"attestation.tpm2_pcrs: {text[:16]!r} is no register from 0 to {_REGISTERS - 1}")
        registers.add(int(text))
    if not registers:
        raise BootError("attestation.tpm2_pcrs is empty: a quote over nothing says nothing")
    return tuple(sorted(registers))


def _key_handle(text: str) -> int | None:
    if not text:
        return None
    try:
        handle = int(text, 16)
    except ValueError:
        handle = 0
    if handle not in _PERSISTENT_HANDLES:
        raise BootError("attestation.tpm2_key_handle: a persistent handle is 0x81000000 to 0x81ffffff")
    return handle


def _certificate(path: str) -> bytes | None:
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BootError(f"attestation.tpm2_ak_certificate {path} cannot be read: {error.__class__.__name__}") from error
    if not 1 <= len(data) <= abi.LIMIT_CERTIFICATE_BYTES or data[:1] != b"\x30":
        raise BootError(f"attestation.tpm2_ak_certificate {path} is no DER certificate")
    return data


def _selection_text(registers: Iterable[int]) -> str:
    return "sha256:" + ",".join(str(register) for register in registers)
