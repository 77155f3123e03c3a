"""The one parser of digests typed by people."""

from __future__ import annotations

import re

from appliance.models.errors import InvalidDigest

_HEX = re.compile(r"[0-9a-f]{64}")


def parse_sha256(text: str) -> bytes:
    """The 32 bytes of a SHA-256 written as 64 hex digits; surrounding blanks, case and one `sha256:` are forgiven.

    A prefix of a digest is refused, however long: who may choose the rest may choose the bytes. Raises InvalidDigest.
    """
    normal = text.strip().lower().removeprefix("sha256:").strip()
    if not _HEX.fullmatch(normal):
        raise InvalidDigest(
            f"a SHA-256 is 64 hex digits, with or without 'sha256:' before them; got {len(normal)} characters. "
            "Run `sha256sum FILE` where you trust the file and copy the whole first column."
        )
    return bytes.fromhex(normal)
