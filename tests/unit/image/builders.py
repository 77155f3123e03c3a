"""Small true-to-format files to measure: PE executables, unified kernel images, logs, firmware, disks, archives."""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Mapping, Sequence

FILE_ALIGNMENT, SECTION_ALIGNMENT = 512, 4096
SBAT = (
    b"sbat,1,SBAT Version,sbat,1,https://github.com/rhboot/shim/blob/main/SBAT.md\n"
    b"systemd-stub,1,The systemd Developers,systemd,257,https://systemd.io/\n"
    b"systemd-stub.test,1,Test,systemd,257.1,https://example.org/\n\x00"
)
ROOT, MODEL = "a1" * 32, "b2" * 32
CMDLINE = f"console=ttyS0 quiet appliance.root_hash={ROOT} appliance.model_hash={MODEL}"
UNAME = b"6.12.1-test"
INITRD = b"initrd \x00\x01\x02" * 101


def make_pe(sections: Mapping[str, bytes], *, certificate: bytes = b"", checksum: int = 0) -> bytes:
    """A PE32+ EFI application with the sections in this order, each zero-filled in the file to 512 bytes."""
    count = len(sections)
    headers_size = -(-(64 + 24 + 240 + 40 * count) // FILE_ALIGNMENT) * FILE_ALIGNMENT
    table, body, address = b"", b"", SECTION_ALIGNMENT
    for name, data in sections.items():
        raw = data.ljust(-(-len(data) // FILE_ALIGNMENT) * FILE_ALIGNMENT, b"\x00")
        offset = headers_size + len(body)
        table += struct.pack(
            "<8sIIIIIIHHI", name.encode(), len(data), address, len(raw), offset, 0, 0, 0, 0, 0x40000040
        )
        body += raw
        address += -(-max(len(data), 1) // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
    optional = struct.pack("<HBBIIIII", 0x20B, 0, 0, 0, len(body), 0, SECTION_ALIGNMENT, SECTION_ALIGNMENT)
    optional += struct.pack("<QIIHHHHHHIIIIHH", 0, SECTION_ALIGNMENT, FILE_ALIGNMENT, 0, 0, 0, 0, 0, 0, 0, address,
                            headers_size, checksum, 10, 0)  # fmt: skip
    optional += struct.pack("<QQQQII", 0, 0, 0, 0, 0, 16)
    directories = [(0, 0)] * 16
    if certificate:
        directories[4] = (headers_size + len(body), len(certificate))
    optional += b"".join(struct.pack("<II", *one) for one in directories)
    dos = b"MZ".ljust(0x3C, b"\x00") + struct.pack("<I", 64)
    coff = b"PE\x00\x00" + struct.pack("<HHIIIHH", 0x8664, count, 0, 0, 0, len(optional), 0x222)
    return (dos + coff + optional + table).ljust(headers_size, b"\x00") + body + certificate


def make_kernel(text: bytes = b"kernel code") -> bytes:
    return make_pe({".text": text * 50, ".data": b"kernel data" * 9})


def make_uki(
    *,
    kernel: bytes | None = None,
    cmdline: bytes = CMDLINE.encode(),
    initrd: bytes = INITRD,
    uname: bytes = UNAME,
    sbat: bytes = SBAT,
    extra: Mapping[str, bytes] | None = None,
) -> bytes:
    return make_pe(
        {
            ".text": b"stub code" * 77,
            ".sbat": sbat,
            ".sdmagic": b"#### LoaderInfo: systemd-stub 257.1 ####",
            ".cmdline": cmdline,
            ".uname": uname,
            ".linux": make_kernel() if kernel is None else kernel,
            ".initrd": initrd,
            **(extra or {}),
        }
    )


LogEntry = tuple[int, int, bytes, bytes | None]
SEPARATOR, ACTION, VERSION, APPLICATION, IPL, NO_ACTION = 4, 0x80000007, 8, 0x80000003, 13, 3


def firmware_entries() -> list[LogEntry]:
    """(register, type, content, what was hashed: None is the content) as an OVMF writes them."""
    entries: list[LogEntry] = [
        (0, VERSION, "fw 1\x00".encode("utf-16-le"), None),
        (0, 0x8000000A, b"blob", b"firmware volume"),
        (7, 0x80000001, b"SecureBoot variable", None),
        (7, SEPARATOR, bytes(4), None),
        (1, 0x80000002, b"BootOrder", b"\x00\x00"),
        (4, ACTION, b"Calling EFI Application from Boot Option", None),
    ]
    return entries + [(register, SEPARATOR, bytes(4), None) for register in range(7)]


def make_log(
    entries: Sequence[LogEntry], *, banks: Sequence[tuple[int, str]] = ((4, "sha1"), (11, "sha256"), (12, "sha384"))
) -> bytes:
    sizes = b"".join(struct.pack("<HH", number, hashlib.new(name).digest_size) for number, name in banks)
    spec = b"Spec ID Event03\x00" + struct.pack("<IBBBBI", 0, 0, 2, 0, 2, len(banks)) + sizes + b"\x00"
    out = struct.pack("<II20sI", 0, NO_ACTION, bytes(20), len(spec)) + spec
    for register, kind, content, hashed in entries:
        data = content if hashed is None else hashed
        out += struct.pack("<III", register, kind, len(banks))
        for number, name in banks:
            zero = bytes(hashlib.new(name).digest_size)
            out += struct.pack("<H", number) + (zero if kind == NO_ACTION else hashlib.new(name, data).digest())
        out += struct.pack("<I", len(content)) + content
    return out


def make_ovmf(*, kernel_hashes: bool) -> bytes:
    """Firmware of 32 KiB with the tables that SEV-SNP launches read: reset block, metadata, perhaps hash table."""
    size = 32768
    metadata = [(0x1000, 0x1000, 2), (0x2000, 0x1000, 3)] + ([(0x3000, 0x1000, 0x10)] if kernel_hashes else [])
    meta = b"ASEV" + struct.pack("<III", 16 + 12 * len(metadata), 1, len(metadata))
    meta += b"".join(struct.pack("<III", *one) for one in metadata)
    meta_from_end = 4096
    entries = [("dc886566-984a-4798-a75e-5585a7bf67cc", struct.pack("<I", meta_from_end))]
    if kernel_hashes:
        entries.append(("7255371f-3a3b-4b04-927b-1da6efa8d454", struct.pack("<II", 0x3400, 0x400)))
    entries.append(("00f771de-1a7e-4fcb-890e-68c77e2fb44e", struct.pack("<I", 0xFFFFFFF0)))
    table = b"".join(data + struct.pack("<H", len(data) + 18) + uuid.UUID(name).bytes_le for name, data in entries)
    table += struct.pack("<H", len(table) + 18) + uuid.UUID("96b582de-1fb2-45f7-baea-a366c55a082d").bytes_le
    firmware = bytearray(bytes(range(256)) * (size // 256))
    firmware[size - meta_from_end : size - meta_from_end + len(meta)] = meta
    firmware[size - 32 - len(table) : size - 32] = table
    return bytes(firmware)


def make_gpt_disk(partitions: int) -> bytes:
    entries = b"".join(uuid.uuid5(uuid.NAMESPACE_DNS, f"t{n}").bytes_le + bytes(112) for n in range(partitions)).ljust(
        128 * 128, b"\x00"
    )
    header = b"EFI PART" + struct.pack("<IIIIQQQQ16sQIII", 0x10000, 92, 0, 0, 1, 99, 34, 66, bytes(16), 2, 128, 128, 0)
    return bytes(512) + header.ljust(512, b"\x00") + entries + bytes(512 * 8)


def make_cpio(files: Mapping[str, bytes]) -> bytes:
    out = b""
    for name, data, mode in [*((n, d, 0o100644) for n, d in files.items()), ("TRAILER!!!", b"", 0)]:
        raw = name.encode() + b"\x00"
        fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
        head = b"070701" + b"".join(b"%08x" % one for one in fields) + raw
        out += head.ljust(-(-len(head) // 4) * 4, b"\x00") + data.ljust(-(-len(data) // 4) * 4, b"\x00")
    return out.ljust(-(-len(out) // 512) * 512, b"\x00")


BFV_PAGES = 2


def make_tdvf(*, measured: bytes = b"firmware" * 1024, version: int = 1) -> bytes:
    """A file of 64 KiB with TDX metadata: code that is measured, variables and a work area that are not."""
    size, start = 65536, 65536 - 2 * 4096
    descriptor_from_end = 3 * 4096
    records = [
        (start, len(measured), (1 << 32) - 2 * 4096, 4096 * BFV_PAGES, 0, 1),
        (0, 4096, 0xFFF00000, 4096, 1, 0),
        (0, 0, 0x800000, 2 * 4096, 3, 0),
        (0, 0, 0x900000, 4096, 4, 2),  # accepted by the guest later: in no measurement
    ]
    descriptor = b"TDVF" + struct.pack("<III", 16 + 32 * len(records), version, len(records))
    descriptor += b"".join(struct.pack("<IIQQII", *one) for one in records)
    entries = [
        ("00f771de-1a7e-4fcb-890e-68c77e2fb44e", struct.pack("<I", 0)),
        ("e47a6535-984a-4798-865e-4685a7bf8ec2", struct.pack("<I", descriptor_from_end)),
        ("7255371f-3a3b-4b04-927b-1da6efa8d454", struct.pack("<II", 1, 2)),
    ]
    table = b"".join(data + struct.pack("<H", len(data) + 18) + uuid.UUID(name).bytes_le for name, data in entries)
    table += struct.pack("<H", len(table) + 18) + uuid.UUID("96b582de-1fb2-45f7-baea-a366c55a082d").bytes_le
    file = bytearray(size)
    file[start : start + len(measured)] = measured
    file[size - descriptor_from_end : size - descriptor_from_end + len(descriptor)] = descriptor
    file[size - 32 - len(table) : size - 32] = table
    return bytes(file)
