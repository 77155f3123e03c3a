"""Enclave image files and SEV-SNP launches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image.measure import cpio, eif, snp
from image.measure.errors import MeasureError
from tests.unit.image import builders

EIF = eif.Eif(
    kernel=b"kernel" * 10,
    cmdline="reboot=k panic=30",
    ramdisks=(b"init" * 5, b"application" * 7, b"model" * 9),
    metadata=eif.make_metadata("appliance", "1.2.0", "6.12", "2026-01-01"),
)
# PCR2 of an enclave with one ramdisk, as many published enclaves show it.
PUBLISHED_EMPTY_PCR2 = (
    "21b9efbc184807662e966d34f390821309eeac6802309798826296bf3e8bec7c10edb30948c90ba67310f7b964fc500a"
)


def extended(*parts: bytes) -> bytes:
    return hashlib.sha384(bytes(48) + hashlib.sha384(b"".join(parts)).digest()).digest()


def test_file_is_laid_out_as_the_format_says() -> None:
    data = eif.write(EIF)
    assert data[:4] == b".eif"
    assert struct.unpack_from(">HHQQHH", data, 4) == (4, 0, 1 << 30, 2, 0, 6)
    offsets, sizes = struct.unpack_from(">32Q", data, 28), struct.unpack_from(">32Q", data, 28 + 256)
    assert offsets[0] == 548
    kinds = []
    for offset, size in zip(offsets[:6], sizes[:6], strict=True):
        kind, flags, claimed = struct.unpack_from(">HHQ", data, offset)
        assert (flags, claimed) == (0, size)
        kinds.append(kind)
    assert kinds == [1, 2, 5, 3, 3, 3]
    assert not any(offsets[6:] + sizes[6:])
    assert int.from_bytes(data[544:548], "big") == zlib.crc32(data[:544] + data[548:])
    assert offsets[5] + 12 + sizes[5] == len(data)
    assert set(json.loads(EIF.metadata)) == {
        "ImageName",
        "ImageVersion",
        "BuildMetadata",
        "DockerInfo",
        "CustomMetadata",
    }


def test_what_is_written_is_read_back() -> None:
    assert eif.read(eif.write(EIF)) == EIF


def test_registers_are_extensions_of_the_concatenated_parts() -> None:
    boot = (EIF.kernel, EIF.cmdline.encode(), EIF.ramdisks[0])
    assert EIF.pcrs() == (extended(*boot, *EIF.ramdisks[1:]), extended(*boot), extended(*EIF.ramdisks[1:]))


def test_one_ramdisk_gives_the_published_constant() -> None:
    pcrs = dataclasses.replace(EIF, ramdisks=EIF.ramdisks[:1]).pcrs()
    assert pcrs[2].hex() == PUBLISHED_EMPTY_PCR2
    assert pcrs[0] == pcrs[1]


def test_metadata_is_in_no_register() -> None:
    other = dataclasses.replace(EIF, metadata=b"{}", default_memory_bytes=1 << 31)
    assert other.pcrs() == EIF.pcrs()


@given(at=st.integers(min_value=0, max_value=5000), flip=st.integers(min_value=1, max_value=255))
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_refused(at: int, flip: int) -> None:
    data = bytearray(eif.write(EIF))
    data[at % len(data)] ^= flip
    with pytest.raises(MeasureError):
        eif.read(bytes(data))


def _with_check_sum(data: bytes) -> bytes:
    return data[:544] + zlib.crc32(data[:544] + data[548:]).to_bytes(4, "big") + data[548:]


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (5, b"\x03", "version 3"),
        (7, b"\x01", "flags 0x1"),
        (27, b"\x00", "impossible number"),
        (27, b"\x05", "impossible number"),
        (28 + 7, b"\x00", "do not follow"),
        (549, b"\x03", "kernel, command line"),
    ],
)
def test_a_whole_file_that_says_something_else_is_refused(at: int, value: bytes, why: str) -> None:
    data = eif.write(EIF)
    with pytest.raises(MeasureError, match=why):
        eif.read(_with_check_sum(data[:at] + value + data[at + 1 :]))


@pytest.mark.parametrize(
    "change", [{"kernel": b""}, {"ramdisks": ()}, {"ramdisks": (b"",)}, {"cmdline": ""}, {"cmdline": "a\nb"}]
)
def test_what_cannot_boot_is_not_written(change: dict[str, object]) -> None:
    with pytest.raises(MeasureError):
        eif.write(dataclasses.replace(EIF, **change))  # type: ignore[arg-type]


def test_files_of_a_ramdisk_are_found_by_digest() -> None:
    archive = builders.make_cpio({"init": b"#!", "model/weights.gguf": b"weights" * 999})
    assert cpio.file_digests(archive) == {
        "init": hashlib.sha256(b"#!").digest(),
        "model/weights.gguf": hashlib.sha256(b"weights" * 999).digest(),
    }


@pytest.mark.parametrize(
    "archive",
    [
        b"",
        b"\x1f\x8b" + bytes(200),
        builders.make_cpio({"a": b"x" * 100})[:-600],
        builders.make_cpio({"a": b"x"}) + b"another",
        builders.make_cpio({"a": b"x", "b": b"y"}).replace(b"b\x00", b"a\x00", 1),
        builders.make_cpio({"a": b"x"}).replace(b"070701", b"070702", 1),
    ],
)
def test_a_ramdisk_with_two_readings_or_none_is_refused(archive: bytes) -> None:
    with pytest.raises(MeasureError):
        cpio.file_digests(archive)


@pytest.fixture
def firmware(tmp_path: Path) -> Path:
    path = tmp_path / "AMDSEV.fd"
    path.write_bytes(builders.make_ovmf(kernel_hashes=True))
    return path


@pytest.fixture
def boot(tmp_path: Path) -> snp.Boot:
    (tmp_path / "vmlinuz").write_bytes(builders.make_kernel())
    (tmp_path / "initrd").write_bytes(builders.INITRD)
    return snp.Boot(kernel=tmp_path / "vmlinuz", initrd=tmp_path / "initrd", cmdline=builders.CMDLINE)


MACHINE = snp.Machine(vcpus=1, vcpu_type="EPYC-Milan", guest_features=1)


def measured(firmware: Path, boot: snp.Boot | None, machine: snp.Machine = MACHINE) -> bytes:
    (launch,) = snp.predict(firmware, boot, [machine])
    assert launch.covers_boot == (boot is not None)
    return launch.measurement


def test_each_of_count_type_features_kernel_initrd_and_command_line_changes_the_launch(
    firmware: Path, boot: snp.Boot, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(b"other")
    other = tmp_path / "other"
    values = [
        measured(firmware, boot),
        measured(firmware, boot, dataclasses.replace(MACHINE, vcpus=2)),
        measured(firmware, boot, dataclasses.replace(MACHINE, vcpu_type="EPYC-Genoa")),
        measured(firmware, boot, dataclasses.replace(MACHINE, guest_features=0x21)),
        measured(firmware, dataclasses.replace(boot, kernel=other)),
        measured(firmware, dataclasses.replace(boot, initrd=other)),
        measured(firmware, dataclasses.replace(boot, cmdline=builders.CMDLINE + " x")),
        measured(firmware, None),
    ]
    assert len(set(values)) == len(values)
    assert values[0] == measured(firmware, boot)


def test_firmware_without_kernel_hashes_never_covers_the_image(tmp_path: Path, boot: snp.Boot) -> None:
    plain = tmp_path / "OVMF.fd"
    plain.write_bytes(builders.make_ovmf(kernel_hashes=False))
    assert not snp.has_kernel_hashes(plain)
    with pytest.raises(MeasureError, match="does not cover kernel, command line or weights"):
        snp.predict(plain, boot, [MACHINE])
    assert len(measured(plain, None)) == 48


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (dataclasses.replace(MACHINE, vcpu_type="Skylake"), "no vCPU type"),
        (dataclasses.replace(MACHINE, vcpus=0), "1 to 512"),
        (dataclasses.replace(MACHINE, guest_features=2), "bit 0"),
        (dataclasses.replace(MACHINE, vmm="other"), "known monitor"),
    ],
)
def test_machines_that_do_not_exist_are_refused(firmware: Path, machine: snp.Machine, why: str) -> None:
    with pytest.raises(MeasureError, match=why):
        snp.predict(firmware, None, [machine])


@pytest.mark.parametrize("content", [b"", b"x" * 100, builders.make_ovmf(kernel_hashes=True)[:-100]])
def test_what_is_no_firmware_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(MeasureError, match="SEV-SNP"):
        snp.predict(tmp_path / "x", None, [MACHINE])
