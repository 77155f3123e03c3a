"""A Nitro Secure Module at the ioctl: the driver's checks of its two buffers, and documents under a root of our own."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cbor2

from tests.simulators import nitro

NSM_IOCTL_RAW = 0xC0200A00
_LIMITS = {"user_data": 512, "nonce": 512, "public_key": 1024}


@dataclass
class Nsm:
    """`answer` replaces every response, `failure` is the errno of every ioctl."""

    pcrs: Mapping[int, bytes] = field(default_factory=lambda: dict(nitro.PCRS))
    answer: bytes | None = None
    failure: int = 0
    requests: list[Any] = field(default_factory=list)

    def ioctl(self, descriptor: int, request: int, message: ctypes.Structure) -> int:
        """As drivers/misc/nsm.c: lengths are checked, the response's length is written back."""
        assert descriptor >= 0
        if request != NSM_IOCTL_RAW or ctypes.sizeof(message) != 32:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")
        asked_at, asked_size, answer_at, answer_size = _words(message)
        if self.failure:
            raise OSError(self.failure, "no answer")
        if asked_size > 0x1000 or answer_size > 0x3000:
            raise OSError(errno.EMSGSIZE, "Message too long")
        response = self.exchange(ctypes.string_at(asked_at, asked_size))
        ctypes.memmove(answer_at, response, len(response))
        ctypes.c_uint64.from_buffer(message, 24).value = len(response)
        return 0

    def exchange(self, request: bytes) -> bytes:
        asked = cbor2.loads(request)
        self.requests.append(asked)
        if self.answer is not None:
            return self.answer
        fields = asked["Attestation"]
        if set(fields) != set(_LIMITS):
            return cbor2.dumps({"Error": "InvalidOperation"})
        if any(value is not None and len(value) > _LIMITS[name] for name, value in fields.items()):
            return cbor2.dumps({"Error": "InputTooLarge"})
        document = nitro.document(nitro.Shape(payload={**fields, "pcrs": dict(self.pcrs)}))
        return cbor2.dumps({"Attestation": {"document": document}})


def _words(message: ctypes.Structure) -> tuple[int, int, int, int]:
    raw = bytes(message)
    a, b, c, d = (int.from_bytes(raw[at : at + 8], "little") for at in range(0, 32, 8))
    return a, b, c, d
