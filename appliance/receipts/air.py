"""AIR receipts (draft-tsyrulnikov-rats-attested-inference-receipt-02) beside our own, where the operator wants them.

Off by default: the draft names an IPR disclosure (docs/air.md). They are signed by a key of their own, which our
attestation claims name, and reach "AIR-local" only: the draft's own key bindings are not ours. AIR has no layout for
other hardware than Intel TDX and AWS Nitro, none for streams and none for refusals: those get no AIR receipt.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.receipts.transcript import Subject
from client_sdk.tee.nitro import abi as nitro
from client_sdk.tee.tdx import abi as tdx
from client_sdk.wire import air, cose, digests
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.receipt import ModelFacts

FAMILIES = frozenset({tdx.KIND, nitro.KIND})
_NITRO_REGISTERS = (0, 1, 2, 3, 4, 8)
_MAX_REMEMBERED = 4096
_MODE = "production"


@dataclass(frozen=True, slots=True, kw_only=True)
class AirRecord:
    """One whole answer. `took_ms` from the request's head to its end, `finished_at` Unix seconds."""

    subject: Subject
    model: ModelFacts
    request: bytes
    response: bytes
    took_ms: int
    finished_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    document_hash: bytes
    measurements: air.Measurements


class AirIssuer:
    """Issues AIR receipts. `sign` is the AIR key's, which signs nothing else; `memory_mb` tells the peak of memory.

    `policy_version` names the configuration. Thread-safe.
    """

    def __init__(
        self, *, iss: str, policy_version: str, sign: Callable[[bytes], bytes], memory_mb: Callable[[], int]
    ) -> None:
        self._iss = iss
        self._policy_version = policy_version
        self._sign = sign
        self._memory_mb = memory_mb
        self._lock = threading.Lock()
        self._evidence: OrderedDict[bytes, _Evidence] = OrderedDict()

    def remember(self, claims_digest: bytes, evidence: Sequence[EvidenceItem]) -> None:
        """What the attestation `claims_digest` rests on: an AIR receipt names the very document and its registers."""
        found = _Evidence(document_hash=digests.sha256(evidence[0].content), measurements=_measurements(evidence[0]))
        with self._lock:
            self._evidence[claims_digest] = found
            while len(self._evidence) > _MAX_REMEMBERED:
                self._evidence.popitem(last=False)

    def issue(self, record: AirRecord) -> bytes | None:
        """The receipt, None where no attestation is in force on the connection: there is no document to name then."""
        attestation = record.subject.attestation
        with self._lock:
            found = None if attestation is None else self._evidence.get(attestation)
        if found is None:
            return None
        model_hash, scheme = _model_hash(record.model)
        payload = air.AirClaims(
            iss=self._iss,
            iat=record.finished_at,
            cti=record.subject.cti,
            eat_nonce=record.subject.eat_nonce,
            model_id=record.model.name,
            model_version=record.model.identity.hex(),
            model_hash=model_hash,
            model_hash_scheme=scheme,
            request_hash=digests.sha256(record.request),
            response_hash=digests.sha256(record.response),
            attestation_doc_hash=found.document_hash,
            enclave_measurements=found.measurements,
            policy_version=self._policy_version,
            sequence_number=0,  # constant: chains are our own receipts' business, and a counter links callers
            execution_time_ms=record.took_ms,
            memory_peak_mb=self._memory_mb(),
            security_mode=_MODE,
        ).encode()
        return air.encode_receipt(payload, self._sign(cose.signature_input(air.PROTECTED, payload)))


def _model_hash(model: ModelFacts) -> tuple[bytes, str | None]:
    """The hash of the one weights file; for several our identity of the model, of which AIR has no scheme."""
    if len(model.weights) == 1:
        return model.weights[0][1], "sha256-single"
    return model.identity, None


def _measurements(item: EvidenceItem) -> air.Measurements:
    if item.kind == tdx.KIND:
        report = tdx.parse_quote(item.content).report
        values = (report.mr_td, *report.rtmrs)
        registers = {f"pcr{number}": value for number, value in enumerate(values)}
        return air.Measurements(measurement_type=air.TYPE_TDX, registers=registers)
    pcrs = nitro.parse_document(item.content).pcrs
    registers = {f"pcr{number}": pcrs[number] for number in _NITRO_REGISTERS if number in pcrs}
    return air.Measurements(measurement_type=air.TYPE_NITRO, registers=registers)
