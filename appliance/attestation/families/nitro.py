"""Evidence of AWS Nitro Enclaves: attestation documents from the Nitro Secure Module behind /dev/nsm.

The driver's one request carries two buffers, CBOR in and CBOR out (linux/nsm.h). How the ioctl reaches the device is an
argument; what is asked and what is believed of the answer is here.
"""

from __future__ import annotations

import ctypes
import fcntl
from collections.abc import Callable, Mapping
from pathlib import Path

from appliance.attestation.attester import Binding, Collected
from appliance.config.settings import AttestationConfig
from appliance.errors import AttestationUnavailable
from client_sdk.tee.nitro import abi
from client_sdk.wire import cbor, foreign_cbor
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.errors import WireError
from client_sdk.wire.names import MODE_PRODUCTION

DEVICE = Path("/dev/nsm")
NSM_IOCTL_RAW = 0xC0200A00  # _IOWR(0x0A, 0x0, struct nsm_raw), two iovecs of 16 bytes
LIMIT_REQUEST_BYTES = 0x1000
LIMIT_RESPONSE_BYTES = 0x3000
_LAUNCH_REGISTERS = ("0", "1", "2", "3", "4", "8")

Exchange = Callable[[bytes], bytes]
"""One request to the NSM and its response, both CBOR. Raises OSError."""


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _RawMessage(ctypes.Structure):
    _fields_ = (("request", _Iovec), ("response", _Iovec))


def device_exchange(
    request: bytes,
    *,
    device: Path = DEVICE,
    ioctl: Callable[[int, int, ctypes.Structure], object] = fcntl.ioctl,
) -> bytes:
    """Ask the driver at `device`. `ioctl` is the system call, (descriptor, request, struct). Raises OSError."""
    question = ctypes.create_string_buffer(request, len(request))
    answer = ctypes.create_string_buffer(LIMIT_RESPONSE_BYTES)
    message = _RawMessage(
        request=_Iovec(ctypes.addressof(question), len(request)),
        response=_Iovec(ctypes.addressof(answer), LIMIT_RESPONSE_BYTES),
    )
    with device.open("r+b", buffering=0) as file:
        ioctl(file.fileno(), NSM_IOCTL_RAW, message)
    return answer.raw[: min(message.response.length, LIMIT_RESPONSE_BYTES)]


class NitroAttester:
    """Asks for documents over H, the nonce and the connection's key, through `exchange`."""

    family = abi.KIND
    mode = MODE_PRODUCTION

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def collect(self, binding: Binding) -> Collected:
        """A fresh document. Raises AttestationUnavailable."""
        document = self._document(user_data=binding.report_data, nonce=binding.nonce, public_key=binding.spki)
        return Collected(evidence=(EvidenceItem(kind=self.family, content=document),))

    def reference_table(self) -> Mapping[str, object]:
        """This enclave's registers in the words of a policy's `[families.nitro]`; in debug mode there are none."""
        content = self._document(user_data=None, nonce=None, public_key=None)
        try:
            document = abi.parse_document(content)
        except WireError as error:
            raise _odd(str(error)) from error
        pinned = {name: document.pcrs[int(name)] for name in _LAUNCH_REGISTERS if int(name) in document.pcrs}
        if not all(any(document.pcrs.get(register, b"")) for register in (0, 1, 2)):
            raise AttestationUnavailable("attestation_unavailable", "an enclave in debug mode has no measurements")
        return {"measurements": [{f"pcr{name}": value.hex() for name, value in pinned.items() if any(value)}]}

    def _document(self, *, user_data: bytes | None, nonce: bytes | None, public_key: bytes | None) -> bytes:
        fields = {"user_data": user_data, "nonce": nonce, "public_key": public_key}
        request = cbor.encode({"Attestation": fields})
        if len(request) > LIMIT_REQUEST_BYTES:
            raise AttestationUnavailable("attestation_unavailable", "the request is larger than the NSM takes")
        try:
            response = self._exchange(request)
        except OSError as error:
            raise AttestationUnavailable(
                "attestation_unavailable", f"the Nitro Secure Module does not answer: {error.strerror}"
            ) from error
        return _parse_response(response)


def missing(_config: AttestationConfig) -> str | None:
    """Why this is no Nitro Enclave, None where it is one."""
    return None if DEVICE.exists() else f"there is no {DEVICE}"


def create(_config: AttestationConfig, _random_bytes: Callable[[int], bytes]) -> NitroAttester:
    return NitroAttester(device_exchange)


def _parse_response(response: bytes) -> bytes:
    """The document in {"Attestation": {"document": bstr}}; {"Error": text} is the other answer."""
    try:
        answer = foreign_cbor.decode(response, limit_bytes=LIMIT_RESPONSE_BYTES)
    except WireError as error:
        raise _odd(str(error)) from error
    if type(answer) is dict and set(answer) == {"Error"}:
        raise _odd(f"error {str(answer['Error'])[:64]!r}")
    attestation = answer.get("Attestation") if type(answer) is dict else None
    document = attestation.get("document") if type(attestation) is dict else None
    if type(document) is not bytes or not document:
        raise _odd("no document")
    return document


def _odd(what: str) -> AttestationUnavailable:
    return AttestationUnavailable("attestation_unavailable", f"the Nitro Secure Module answers: {what}")
