"""PE digests against osslsigncode 2.5, PCR 11 against systemd-measure 257, both run on exactly these bytes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image.measure import eventlog, pe, uki
from image.measure.errors import MeasureError
from tests.unit.image import builders

OSSLSIGNCODE = {
    ("uki", "sha256"): "832b422dc7491574e341c8cf79f889526f6a795cf80aaf770660948071161ee6",
    ("kernel", "sha256"): "62827eb5482c8c45947186e2409527ac222d3d3075605f6bea4d17c249cbfdf7",
    ("uki", "sha384"): "f612d4ddf2ea9f61860b3112d3d079c30459abf744ca17f998699e1278f58fb4"
    "c587e24d4eb568ec4007975757e1353f",
    ("kernel", "sha384"): "b1baf1bca75d2079198cf3b11ea7f2ca15a7a096a0cad2cdd77d9883d8d68ccc"
    "85e69d01ba6f4c9f12a57db3d4d57b64",
}
SYSTEMD_MEASURE = {
    "sha256": "f3942dd2452a91c03e5bf7a3203f5657ea09ac27eee8494d48ea4f9c1be0ac76",
    "sha384": "a038f171fb550573b4f30f5366a85100224508ed9dd72001f9ed97d97ef07ac1ad86f37f9cb30c023dce8beeb4b64ba3",
}


@pytest.mark.parametrize(("what", "algorithm"), OSSLSIGNCODE)
def test_digest_of_an_executable_equals_that_of_osslsigncode(what: str, algorithm: str) -> None:
    data = builders.make_uki() if what == "uki" else builders.make_kernel()
    assert pe.authenticode(pe.parse(data, what), algorithm).hex() == OSSLSIGNCODE[what, algorithm]


@pytest.mark.parametrize("algorithm", SYSTEMD_MEASURE)
def test_pcr_11_equals_that_of_systemd_measure(algorithm: str) -> None:
    events = uki.inner_events(uki.parse(builders.make_uki()), algorithm)
    value = eventlog.fold(algorithm, (event.digest for event in events if event.register == 11))
    assert value.hex() == SYSTEMD_MEASURE[algorithm]


def test_check_sum_and_signature_are_not_in_the_digest() -> None:
    plain = {".text": b"code" * 99}
    first = pe.authenticode(pe.parse(builders.make_pe(plain), "x"), "sha256")
    signed = builders.make_pe(plain, certificate=b"signature" * 8, checksum=0x1234)
    assert pe.authenticode(pe.parse(signed, "x"), "sha256") == first
    assert pe.authenticode(pe.parse(builders.make_pe(plain) + b"trailer.", "x"), "sha256") != first


@given(at=st.integers(min_value=0, max_value=10_000), flip=st.integers(min_value=1, max_value=255))
@settings(max_examples=150, deadline=None)
def test_every_other_byte_is_in_the_digest_or_refused(at: int, flip: int) -> None:
    data = builders.make_kernel()
    image = pe.parse(data, "x")
    assert image.security_at is not None
    at %= len(data)
    changed = bytearray(data)
    changed[at] ^= flip
    free = set(range(image.checksum_at, image.checksum_at + 4))
    free |= set(range(image.security_at, image.security_at + 8))
    try:
        found = pe.authenticode(pe.parse(bytes(changed), "x"), "sha256")
    except MeasureError:
        return
    assert (found == pe.authenticode(image, "sha256")) == (at in free)


@given(data=st.binary(max_size=600), cut=st.integers(min_value=0, max_value=2000))
@settings(max_examples=150, deadline=None)
def test_arbitrary_bytes_are_refused_by_name(data: bytes, cut: int) -> None:
    for candidate in (data, b"MZ" + data, builders.make_uki()[:cut]):
        with pytest.raises(MeasureError):
            uki.parse(candidate)


def test_sections_with_a_gap_between_them_are_refused() -> None:
    data = bytearray(builders.make_pe({".a": b"x" * 512, ".b": b"y" * 512}))
    table = 64 + 24 + 240
    data[table + 40 + 16 : table + 40 + 20] = (0).to_bytes(4, "little")  # .b has no bytes in the file any more
    pe.authenticode(pe.parse(bytes(data), "x"), "sha256")
    data[table + 16 : table + 20] = (256).to_bytes(4, "little")
    data[table + 40 + 16 : table + 40 + 20] = (512).to_bytes(4, "little")
    with pytest.raises(MeasureError, match="follow"):
        pe.authenticode(pe.parse(bytes(data), "x"), "sha256")


def test_a_section_larger_in_memory_is_zero_filled() -> None:
    data = bytearray(builders.make_pe({".a": b"x" * 512}))
    table = 64 + 24 + 240
    data[table + 8 : table + 12] = (600).to_bytes(4, "little")
    image = pe.parse(bytes(data), "x")
    assert image.content(image.sections[0]) == b"x" * 512 + bytes(88)


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (builders.make_uki(extra={".osrel": b"ID=x\n"}), ".osrel"),
        (builders.make_uki(extra={".ucode": b"x"}), ".ucode"),
        (builders.make_uki(extra={".profile": b"x"}), ".profile"),
        (builders.make_uki(extra={".pcrsig": b"{}"}), ".pcrsig"),
        (builders.make_uki(extra={".future": b"x"}), ".future"),
        (builders.make_uki(sbat=builders.SBAT.replace(b"systemd,257", b"systemd,258")), "systemd-stub 258"),
        (builders.make_uki(sbat=b"sbat,1\n"), "says its version"),
        (builders.make_uki(initrd=b""), "no section .initrd"),
        (builders.make_uki(kernel=b"no executable"), "kernel in the unified"),
        (builders.make_uki(cmdline=b"a\x00b"), "control characters"),
        (builders.make_uki(cmdline=b"  \n"), "empty"),
        (builders.make_uki(cmdline="quiet ä".encode()), "not ASCII"),
        (builders.make_kernel(), "no section .linux"),
    ],
)
def test_an_image_whose_measurements_are_not_known_is_refused(image: bytes, why: str) -> None:
    with pytest.raises(MeasureError, match=why):
        uki.parse(image)


def test_a_section_twice_is_refused() -> None:
    data = builders.make_uki(extra={".unama": b"other"})
    with pytest.raises(MeasureError, match=r"two sections \.uname"):
        uki.parse(data.replace(b".unama\x00\x00", b".uname\x00\x00"))


def test_pcr_9_is_the_command_line_in_utf_16_and_the_initrd() -> None:
    image = uki.parse(builders.make_uki(cmdline=(" " + builders.CMDLINE + "\n").encode()))
    events = [event for event in uki.inner_events(image, "sha256") if event.register == 9]
    wide = b"".join(bytes((byte, 0)) for byte in builders.CMDLINE.encode()) + b"\x00\x00"
    assert [event.digest for event in events] == [
        hashlib.sha256(wide).digest(),
        hashlib.sha256(builders.INITRD).digest(),
    ]
