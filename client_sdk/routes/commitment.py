"""One salted commitment of a receipt, recomputed and compared."""

from __future__ import annotations

import hmac

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.wire import digests

REDACTED = "the receipt came without its salt"


def commitment(
    log: CheckLog, name: str, code: Rejection, salt: bytes | None, opened: tuple[str, bytes, bytes | None]
) -> None:
    """`opened` is (label, content we hold, commitment in the receipt): recompute and compare."""
    if salt is None:
        log.not_checked(name, REDACTED)
        return
    label, content, committed = opened
    same = committed is not None and hmac.compare_digest(digests.commitment(salt, label, content), committed)
    log.require(same, name, code, f"{name} is not what the receipt commits to")
