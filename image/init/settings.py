"""Operator settings: a disk that is not measured, with a closed schema. Any other key stops the boot.

The disk is the file itself, padded with zeros: no partition, no file system. A file system would have the kernel parse
what the host wrote. Its first line says what it is:

    # attested-inference settings 1
    port = 8443                     # TCP, 1024 to 65535; default 8443
    vsock_port = 8443               # also on vsock; default: not
    endorsement_relay = "vsock:2:8003"  # or "192.0.2.1:8003": a CONNECT proxy; default: none

    [[api_keys]]                    # at least one while a TCP port is open: an entry of what `appliance keys new` keeps
    id = "key_0123456789ab"
    sha256 = "<64 hex>"             # of the key's text, never the key
    label = "front end"
    scopes = ["inference", "receipts"]
    created = 1764374400
    expires = 1795910400            # optional

What a setting can do is bounded by this list: who may call, and where; and through whom certificates of the evidence
are fetched, which callers verify against their own roots. Everything that changes an answer, or what a receipt says, is
measured.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from dataclasses import dataclass
from typing import Final

from image.init.cmdline import printable
from image.init.errors import Stop

FIRST_LINE: Final = b"# attested-inference settings 1\n"
LIMIT_BYTES: Final = 1 << 20
SCOPES: Final = frozenset({"inference", "metrics", "receipts"})
_KEYS: Final = frozenset({"port", "vsock_port", "endorsement_relay", "api_keys"})
_ENTRY_KEYS: Final = frozenset({"id", "sha256", "label", "scopes", "created", "expires"})
_ID = re.compile(r"key_[0-9a-f]{12}")
_HEX = re.compile(r"[0-9a-f]{64}")
_PORTS: Final = range(1024, 65536)
_VSOCK_PORTS: Final = range(1, 2**32 - 1)
_VSOCK_CIDS: Final = range(1, 2**32 - 1)
_RELAY_PORTS: Final = range(1, 65536)
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")
_MAX_TIME: Final = 2**53
_LABEL_LIMIT: Final = 128
_MAX_API_KEYS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """As in the appliance's key file: `sha256` 64 hex digits, times in seconds since 1970."""

    key_id: str
    sha256: str
    label: str
    scopes: tuple[str, ...]
    created: int
    expires: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`vsock_port` None: not on vsock. `endorsement_relay` is ADDRESS:PORT or vsock:CID:PORT; empty: none."""

    port: int
    vsock_port: int | None
    endorsement_relay: str
    api_keys: tuple[ApiKey, ...]


def parse(disk: bytes) -> Settings:
    """The settings in a disk's bytes. Raises Stop naming the key at fault, never a value of a secret."""
    if not disk.startswith(FIRST_LINE) or len(disk) > LIMIT_BYTES:
        raise Stop(f"the settings disk does not begin with its first line, or has over {LIMIT_BYTES} bytes")
    try:
        table = tomllib.loads(disk.rstrip(b"\x00").decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        raise Stop("the operator settings are not TOML") from None
    _closed(table, _KEYS, "operator setting")
    entries = table.get("api_keys", [])
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_API_KEYS:
        raise Stop(f"operator settings: api_keys must be 1 to {_MAX_API_KEYS} tables: without a key nobody could call")
    keys = tuple(_api_key(entry, number) for number, entry in enumerate(entries))
    if len({key.key_id for key in keys}) != len(keys):
        raise Stop("operator settings: two api_keys with one id")
    return Settings(
        port=_integer(table, "port", _PORTS, 8443),
        vsock_port=_integer(table, "vsock_port", _VSOCK_PORTS, 0) or None,
        endorsement_relay=_relay(table.get("endorsement_relay", "")),
        api_keys=keys,
    )


def _closed(table: dict[str, object], known: frozenset[str], what: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise Stop(f"unknown {what} {printable(unknown[0])!r}; known: {', '.join(sorted(known))}")


def _integer(table: dict[str, object], key: str, allowed: range, default: int) -> int:
    value = table.get(key, default)
    if type(value) is not int or (key in table and value not in allowed):
        raise Stop(f"operator settings: {key} must be a whole number from {allowed.start} to {allowed.stop - 1}")
    return value


def _relay(value: object) -> str:
    """An address, since nothing here resolves names. Raises Stop."""
    place, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    vsock = place.startswith("vsock:")
    where = place.removeprefix("vsock:")
    if value == "" or (
        _is_number_of(port, _VSOCK_PORTS if vsock else _RELAY_PORTS)
        and (_is_number_of(where, _VSOCK_CIDS) if vsock else _is_ipv4(where))
    ):
        return str(value)
    raise Stop("operator settings: endorsement_relay must be an IPv4 address and a port, or vsock:CID:PORT")


def _is_number_of(text: str, allowed: range) -> bool:
    return _NUMBER.fullmatch(text) is not None and int(text) in allowed


def _is_ipv4(text: str) -> bool:
    try:
        return str(ipaddress.IPv4Address(text)) == text
    except ValueError:
        return False


def _api_key(entry: object, number: int) -> ApiKey:
    if not isinstance(entry, dict):
        raise Stop(f"operator settings: api_keys[{number}] is no table")
    _closed(entry, _ENTRY_KEYS, f"operator setting of api_keys[{number}]")
    match entry:
        case {
            "id": str(key_id),
            "sha256": str(sha256),
            "label": str(label),
            "scopes": [str(), *_] as scopes,
            "created": int(created),
            **rest,
        } if (
            _ID.fullmatch(key_id)
            and _HEX.fullmatch(sha256)
            and len(label) <= _LABEL_LIMIT
            and label.isprintable()
            and all(isinstance(scope, str) and scope in SCOPES for scope in scopes)
            and _is_time(created)
            and ("expires" not in rest or _is_time(rest["expires"]))
        ):
            return ApiKey(
                key_id=key_id,
                sha256=sha256,
                label=label,
                scopes=tuple(sorted(set(scopes))),
                created=created,
                expires=rest.get("expires"),
            )
        case _:
            raise Stop(f"operator settings: api_keys[{number}] has a missing or bad value")


def _is_time(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TIME


def key_file(settings: Settings) -> bytes:
    """The appliance's key file, version 1 (docs/operations.md, section 4)."""
    keys = [
        {
            "id": key.key_id,
            "sha256": key.sha256,
            "label": key.label,
            "scopes": list(key.scopes),
            "created": key.created,
            "expires": key.expires,
            "revoked": None,
        }
        for key in settings.api_keys
    ]
    return json.dumps({"version": 1, "keys": keys}, indent=2, ensure_ascii=False).encode() + b"\n"


def listen_addresses(settings: Settings) -> tuple[str, ...]:
    """In the words of `appliance serve --listen`."""
    vsock = () if settings.vsock_port is None else (f"vsock:{settings.vsock_port}",)
    return (f"0.0.0.0:{settings.port}", *vsock)


def environment(settings: Settings) -> dict[str, str]:
    """What the appliance reads from its environment (docs/operations.md, section 2): places, nothing else."""
    relay = settings.endorsement_relay
    return {"APPLIANCE_ATTESTATION_ENDORSEMENT_RELAY": relay} if relay else {}
