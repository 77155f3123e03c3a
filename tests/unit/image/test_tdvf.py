"""MRTD from a firmware file: against the two operations written out by hand, and from files that are no firmware."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image.measure import eventlog, tdvf, tdx
from image.measure.errors import MeasureError
from tests.unit.image import builders
from tests.unit.image.test_registers import REAL_LOG

BASE = (1 << 32) - 2 * 4096


def added(address: int) -> bytes:
    block = bytearray(128)
    block[0:12] = b"MEM.PAGE.ADD"
    block[16:24] = address.to_bytes(8, "little")
    return bytes(block)


def extended(address: int, content: bytes) -> bytes:
    block = bytearray(128)
    block[0:9] = b"MR.EXTEND"
    block[16:24] = address.to_bytes(8, "little")
    return bytes(block) + content


def by_hand(two_pass: bool) -> bytes:
    file = builders.make_tdvf()
    code = file[-2 * 4096 :]
    chunks = [[extended(BASE + at, code[at : at + 256]) for at in range(p, p + 4096, 256)] for p in (0, 4096)]
    adds = [added(BASE), added(BASE + 4096)]
    blocks = [*adds, *chunks[0], *chunks[1]] if two_pass else [adds[0], *chunks[0], adds[1], *chunks[1]]
    blocks += [added(0xFFF00000), added(0x800000), added(0x801000)]
    return hashlib.sha384(b"".join(blocks)).digest()


@pytest.mark.parametrize("two_pass", [False, True])
def test_mrtd_is_the_two_operations_in_the_order_asked_for(two_pass: bool) -> None:
    assert tdvf.mrtd(builders.make_tdvf(), two_pass=two_pass) == by_hand(two_pass)


def test_measured_bytes_count_and_variables_do_not() -> None:
    honest, file = tdvf.mrtd(builders.make_tdvf()), bytearray(builders.make_tdvf())
    file[100] ^= 1  # in the variables
    assert tdvf.mrtd(bytes(file)) == honest
    file[65536 - 8192 + 100] ^= 1
    assert tdvf.mrtd(bytes(file)) != honest


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "no table of GUIDs"),
        (bytes(65536), "no table of GUIDs"),
        (builders.make_ovmf(kernel_hashes=True), "no TDX metadata"),
        (builders.make_tdvf(version=2), "version 1"),
        (builders.make_tdvf(measured=b"x" * 4096), "does not fill"),
        (builders.make_tdvf()[4096 * 12 :], "does not fill"),
        (builders.make_tdvf()[-200:], "no metadata|truncated|no TDX"),
    ],
)
def test_a_file_that_is_no_such_firmware_is_refused(file: bytes, why: str) -> None:
    with pytest.raises(MeasureError, match=why):
        tdvf.mrtd(file)


@given(at=st.integers(min_value=0, max_value=600), flip=st.integers(min_value=1, max_value=255))
@settings(max_examples=150, deadline=None)
def test_damaged_tables_are_refused_or_measured_but_no_other_error(at: int, flip: int) -> None:
    file = bytearray(builders.make_tdvf())
    file[-1 - at if at < 300 else 65536 - 3 * 4096 + at - 300] ^= flip
    try:
        assert len(tdvf.mrtd(bytes(file))) == 48
    except MeasureError:
        pass


def test_rtmr0_is_replayed_from_the_log_of_a_launch() -> None:
    log = eventlog.parse(REAL_LOG.read_bytes(), "sha384")
    value = bytes(48)
    for event in log.events:
        if event.register == 1:
            value = hashlib.sha384(value + event.digest).digest()
    assert tdx.rtmr0_of(log) == value
    quote = REAL_LOG.with_name("v4_00806f_cos113.quote.bin").read_bytes()
    assert quote[48 + 328 : 48 + 376] == value


def test_a_log_without_its_separator_gives_no_rtmr0() -> None:
    log = eventlog.parse(REAL_LOG.read_bytes(), "sha384")
    cut = eventlog.Log(algorithm="sha384", events=log.events[:5])
    with pytest.raises(MeasureError, match="0 separators"):
        tdx.rtmr0_of(cut)
