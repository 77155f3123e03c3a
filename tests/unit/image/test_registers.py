"""Registers of a TPM and of a trust domain: firmware logs, predictions, and what changes them."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_sdk.tee.evidence import EventLog
from client_sdk.tee.tdx import event_log as client_log
from image.measure import eventlog, tdx, tpm, uki
from image.measure.errors import MeasureError
from tests.unit.image import builders

REAL_LOG = Path(__file__).parents[2] / "vectors/tee/tdx/v4_00806f_cos113.ccel.bin"


def replayed(*digests: bytes, start: bytes = bytes(32)) -> bytes:
    for digest in digests:
        start = hashlib.sha256(start + digest).digest()
    return start


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_firmware_registers_are_those_of_the_log() -> None:
    values = tpm.firmware_values(eventlog.parse(builders.make_log(builders.firmware_entries()), "sha256"))
    separator = sha(bytes(4))
    assert values == {
        0: replayed(sha("fw 1\x00".encode("utf-16-le")), sha(b"firmware volume"), separator),
        2: replayed(separator),
        3: replayed(separator),
        6: replayed(separator),
        7: replayed(sha(b"SecureBoot variable"), separator),
    }


def test_startup_locality_is_where_register_0_begins() -> None:
    locality = (0, builders.NO_ACTION, b"StartupLocality\x00\x03", None)
    log = eventlog.parse(builders.make_log([locality, *builders.firmware_entries()]), "sha256")
    start = bytes(31) + b"\x03"
    found = replayed(sha("fw 1\x00".encode("utf-16-le")), sha(b"firmware volume"), sha(bytes(4)), start=start)
    assert tpm.firmware_values(log)[0] == found


def test_an_action_may_be_logged_with_a_nul_that_was_not_hashed() -> None:
    logged = (
        4,
        builders.ACTION,
        b"Calling EFI Application from Boot Option\x00",
        b"Calling EFI Application from Boot Option",
    )
    log = eventlog.parse(builders.make_log([logged]), "sha256")
    assert log.events[0].digest == sha(b"Calling EFI Application from Boot Option")


def _without(register: int, kind: int) -> list[builders.LogEntry]:
    return [one for one in builders.firmware_entries() if one[:2] != (register, kind)]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "truncated"),
        (bytes(200), "specification id"),
        (builders.make_log([]), "empty"),
        (builders.make_log(builders.firmware_entries())[:-1], "truncated"),
        (builders.make_log(builders.firmware_entries(), banks=[(4, "sha1")]), "no sha256 bank"),
        (builders.make_log([(0, builders.SEPARATOR, b"\xff\xff\xff\xff", None)]), "reports an error"),
        (builders.make_log([(4, builders.ACTION, b"Calling", b"Other")]), "not that of its content"),
        (builders.make_log([(24, builders.ACTION, b"Calling", None)]), "no register"),
    ],
)
def test_a_log_that_is_none_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(MeasureError, match=why):
        eventlog.parse(content, "sha256")


@pytest.mark.parametrize("entries", [_without(3, builders.SEPARATOR), 2 * builders.firmware_entries()])
def test_a_log_of_no_whole_boot_is_no_reference(entries: list[builders.LogEntry]) -> None:
    with pytest.raises(MeasureError, match="separators"):
        tpm.firmware_values(eventlog.parse(builders.make_log(entries), "sha256"))


@given(at=st.integers(min_value=0, max_value=2000), flip=st.integers(min_value=1, max_value=255))
@settings(max_examples=200, deadline=None)
def test_a_damaged_log_is_refused_or_gives_other_or_equal_values_but_no_other_error(at: int, flip: int) -> None:
    content = bytearray(builders.make_log(builders.firmware_entries()))
    content[at % len(content)] ^= flip
    try:
        eventlog.parse(bytes(content), "sha256").replay()
    except MeasureError:
        pass


def test_predicted_registers_are_the_events_in_order() -> None:
    image = uki.parse(builders.make_uki())
    values = tpm.predict(image).values
    assert set(values) == {4, 9, 11, 12, 13}
    assert values[12] == values[13] == bytes(32)
    authenticode = "832b422dc7491574e341c8cf79f889526f6a795cf80aaf770660948071161ee6"
    kernel = "62827eb5482c8c45947186e2409527ac222d3d3075605f6bea4d17c249cbfdf7"
    assert values[4] == replayed(
        sha(b"Calling EFI Application from Boot Option"),
        sha(bytes(4)),
        bytes.fromhex(authenticode),
        bytes.fromhex(kernel),
    )


def test_a_log_of_the_same_boot_agrees_and_an_added_command_line_is_named() -> None:
    parsed = uki.parse(builders.make_uki())
    log = eventlog.parse(builders.make_log(builders.firmware_entries()), "sha256")
    extra = tuple(
        eventlog.Event(register=event.register, kind=builders.IPL, digest=event.digest, content=b"")
        for event in tpm.boot_events(parsed)[2:]
    )
    booted = eventlog.Log(algorithm="sha256", events=log.events + extra)
    assert tpm.differences(booted, tpm.predict(parsed)) == ()
    attack = eventlog.Event(register=12, kind=builders.IPL, digest=sha(b"init=/bin/sh"), content=b"")
    found = tpm.differences(eventlog.Log(algorithm="sha256", events=(*booted.events, attack)), tpm.predict(parsed))
    assert len(found) == 1
    assert found[0].startswith("register 12: predicted " + "00" * 32)


def test_firmware_events_of_a_trust_domain_are_those_of_a_real_one() -> None:
    """Order and digests, as Google's TDVF logged them; its boot loaders stand where our image would."""
    log = client_log.parse(EventLog(kind="ccel", content=REAL_LOG.read_bytes()))
    real = [event.digest for event in log if event.register == 1]
    gpt = next(event.content for event in log if event.kind == client_log.EV_EFI_GPT_EVENT)
    ours = [event for event in tdx.boot_events(uki.parse(builders.make_uki()), gpt) if event.register in range(2, 7)]
    assert [event.digest for event in ours[:3]] == real[:3]
    assert [event.digest for event in ours[-2:]] == real[-2:]
    assert [event.what for event in ours[3:-2]] == [
        "unified kernel image (Authenticode)",
        "kernel (Authenticode)",
    ]


def test_registers_of_a_trust_domain_fold_the_events_by_register() -> None:
    image = uki.parse(builders.make_uki())
    launch = tdx.predict(image, mrtd=b"m" * 48, rtmr0=b"0" * 48, gpt=None)
    rtmr = {1: bytes(48), 2: bytes(48)}
    for event in tdx.boot_events(image, None):
        number = 1 if event.register < 7 else 2
        rtmr[number] = hashlib.sha384(rtmr[number] + event.digest).digest()
    assert (launch.rtmr1, launch.rtmr2) == (rtmr[1], rtmr[2])
    other = tdx.predict(image, mrtd=b"m" * 48, rtmr0=b"0" * 48, gpt=b"table")
    assert (other.rtmr1 != launch.rtmr1, other.rtmr2 == launch.rtmr2) == (True, True)


@pytest.mark.parametrize("name", ["mrtd", "rtmr0"])
@pytest.mark.parametrize("value", [bytes(48), b"x" * 47])
def test_firmware_values_that_pin_nothing_are_refused(name: str, value: bytes) -> None:
    given = {"mrtd": b"m" * 48, "rtmr0": b"r" * 48, name: value}
    with pytest.raises(MeasureError, match=name):
        tdx.predict(uki.parse(builders.make_uki()), mrtd=given["mrtd"], rtmr0=given["rtmr0"], gpt=None)


def test_partition_table_event_is_header_count_and_used_entries() -> None:
    disk = builders.make_gpt_disk(2)
    content = tdx.gpt_content(disk)
    assert content == disk[512 : 512 + 92] + struct.pack("<Q", 2) + disk[1024 : 1024 + 256]
    assert tdx.gpt_content(bytes(4096)) is None
    with pytest.raises(MeasureError, match="impossible"):
        tdx.gpt_content(disk[:2000])


def test_partition_table_event_has_the_form_of_a_real_one() -> None:
    log = client_log.parse(EventLog(kind="ccel", content=REAL_LOG.read_bytes()))
    real = next(event.content for event in log if event.kind == client_log.EV_EFI_GPT_EVENT)
    count = struct.unpack_from("<Q", real, 92)[0]
    first, _, size = struct.unpack_from("<QII", real, 72)
    disk = bytes(512) + real[:92].ljust(512 * (first - 1), b"\x00") + real[100:].ljust(128 * size, b"\x00")
    assert tdx.gpt_content(disk) == real
    assert count == (len(real) - 100) // size
