"""What a caller may demand of a trust domain: `[families.tdx]`. docs/families/tdx.md lists every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from client_sdk.errors import PolicyFileError
from client_sdk.tables import check_nothing_left
from client_sdk.tee import pins
from client_sdk.tee.dcap.status import StatusPolicy, take_status_policy
from client_sdk.tee.tdx.abi import MR_BYTES

ZERO = "zero"
_REGISTERS = ("mrtd", "rtmr0", "rtmr1", "rtmr2", "rtmr3")
_FIELDS = ("mr_config_id", "mr_owner", "mr_owner_config", "mr_seam", "mr_signer_seam")
_MASKS = ("td_attributes_set", "td_attributes_clear", "xfam_set", "xfam_clear")
_MASK_BYTES = 8
_LIMIT_PAYLOAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MeasurementSet:
    """One launch, matched as a whole. 48 bytes each; `rtmr3` None: not pinned in this set."""

    mrtd: bytes
    rtmr0: bytes
    rtmr1: bytes
    rtmr2: bytes
    rtmr3: bytes | None = None

    def matches(self, mrtd: bytes, rtmrs: tuple[bytes, ...]) -> bool:
        pinned = (self.rtmr0, self.rtmr1, self.rtmr2, self.rtmr3)
        return self.mrtd == mrtd and all(pin is None or pin == value for pin, value in zip(pinned, rtmrs, strict=True))

    def to_table(self) -> dict[str, str]:
        return {name: _text(value) for name in _REGISTERS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TdxPolicy:
    """`measurements` None: a report alone, nothing launched is judged. `fields` maps the name of a 48-byte field to its
    any-of set, `masks` the names in `_MASKS` to 8 bytes, `events` dstack runtime events to any-of payloads.
    """

    measurements: frozenset[MeasurementSet] | None
    allow_zero_rtmrs: bool = False
    fields: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    masks: Mapping[str, bytes] = field(default_factory=dict)
    require_event_log: bool = False
    events: Mapping[str, frozenset[bytes]] = field(default_factory=dict)
    status: StatusPolicy = field(default_factory=StatusPolicy)

    def __post_init__(self) -> None:
        for name in ("fields", "masks", "events"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def count(self) -> int:
        return 1

    def to_table(self) -> dict[str, object]:
        table: dict[str, object] = {}
        if self.measurements is not None:
            ordered = sorted(self.measurements, key=lambda one: sorted(one.to_table().items()))
            table["measurements"] = [one.to_table() for one in ordered]
        if self.allow_zero_rtmrs:
            table["allow_zero_rtmrs"] = True
        for name, values in sorted(self.fields.items()):
            table[name] = [_text(value) for value in sorted(values)]
        table.update({name: mask.hex() for name, mask in sorted(self.masks.items())})
        if self.require_event_log:
            table["require_event_log"] = True
        if self.events:
            table["events"] = {name: pins.hex_list(payloads) for name, payloads in sorted(self.events.items())}
        return {**table, **self.status.to_table()}


def parse_policy(table: dict[str, object], where: str, report_only: bool) -> TdxPolicy:
    """Read `[families.tdx]`. Raises PolicyFileError naming the key at fault."""
    allow_zero = pins.take_flag(table, "allow_zero_rtmrs", where)
    entries = pins.take_list(table, "measurements", where)
    if entries is None and not report_only:
        raise PolicyFileError(f"{where}.measurements: a list of tables {{mrtd, rtmr0, rtmr1, rtmr2}} is needed")
    policy = TdxPolicy(
        measurements=None
        if entries is None
        else frozenset(_parse_set(entry, f"{where}.measurements", allow_zero) for entry in entries),
        allow_zero_rtmrs=allow_zero,
        fields=_take_fields(table, where),
        masks={
            name: pins.parse_hex(table.pop(name), _MASK_BYTES, f"{where}.{name}") for name in _MASKS if name in table
        },
        require_event_log=pins.take_flag(table, "require_event_log", where),
        events=_take_events(table, where),
        status=take_status_policy(table, where),
    )
    for name in ("td_attributes", "xfam"):
        _check_masks(policy.masks.get(f"{name}_set"), policy.masks.get(f"{name}_clear"), f"{where}.{name}")
    check_nothing_left(table, where)
    return policy


def _parse_set(entry: object, where: str, allow_zero: bool) -> MeasurementSet:
    if type(entry) is not dict:
        raise PolicyFileError(f"{where}: each entry is a table")
    entry = dict(entry)
    missing = [name for name in _REGISTERS[:4] if name not in entry]
    if missing:
        raise PolicyFileError(f"{where}: a set is mrtd, rtmr0, rtmr1, rtmr2 and maybe rtmr3; {missing[0]} is missing")
    rtmr3 = entry.pop("rtmr3", None)
    found = MeasurementSet(
        mrtd=_parse_register(entry.pop("mrtd"), f"{where}.mrtd", zero=False),
        rtmr0=_parse_register(entry.pop("rtmr0"), f"{where}.rtmr0", zero=allow_zero),
        rtmr1=_parse_register(entry.pop("rtmr1"), f"{where}.rtmr1", zero=allow_zero),
        rtmr2=_parse_register(entry.pop("rtmr2"), f"{where}.rtmr2", zero=allow_zero),
        rtmr3=None if rtmr3 is None else _parse_register(rtmr3, f"{where}.rtmr3", zero=True),
    )
    check_nothing_left(entry, where)
    return found


def _parse_register(value: object, where: str, *, zero: bool) -> bytes:
    """48 bytes in hex. "zero" demands an untouched register, where that is a demand at all."""
    if value == ZERO and zero:
        return bytes(MR_BYTES)
    return pins.parse_hex(value, MR_BYTES, where)


def _take_fields(table: dict[str, object], where: str) -> dict[str, frozenset[bytes]]:
    found = {}
    for name in _FIELDS:
        values = pins.take_list(table, name, where)
        if values is not None:
            found[name] = frozenset(_parse_register(value, f"{where}.{name}", zero=True) for value in values)
    return found


def _take_events(table: dict[str, object], where: str) -> dict[str, frozenset[bytes]]:
    if "events" not in table:
        return {}
    events, found = table.pop("events"), {}
    if type(events) is not dict or not events:
        raise PolicyFileError(f"{where}.events: a table of event names, each with a list of payloads in hex")
    events = dict(events)
    for name in list(events):
        payloads = pins.take_list(events, name, f"{where}.events") or []
        found[name] = frozenset(_parse_payload(payload, f"{where}.events.{name}") for payload in payloads)
    return found


def _parse_payload(value: object, where: str) -> bytes:
    if type(value) is not str or not value or len(value) > 2 * _LIMIT_PAYLOAD_BYTES:
        raise PolicyFileError(f"{where}: the whole payload in hex is needed")
    return pins.parse_hex(value, len(value.strip()) // 2, where)


def _check_masks(must: bytes | None, must_not: bytes | None, where: str) -> None:
    if must is not None and must_not is not None and any(a & b for a, b in zip(must, must_not, strict=True)):
        raise PolicyFileError(f"{where}: a bit cannot be both set and clear")


def _text(value: bytes) -> str:
    return value.hex() if any(value) else ZERO
