"""Unified kernel images: what firmware, systemd-stub and Linux measure while one boots, as a list of events.

The rules are those of systemd-stub 257 (src/boot/stub.c, uki.c) and of Linux 6.12 (drivers/firmware/efi/libstub). An
image with another stub, or with a section whose treatment is not written down here, is refused: a guess would become a
reference.

- The stub measures into PCR 11, for each section in its fixed order: the name with its NUL, then the content.
- It starts the kernel inside through the firmware's loader, which measures it into PCR 4 like the image itself.
- Linux measures into PCR 9 its load options (the command line in UTF-16 with its NUL), then the initrd. The stub adds
  archives to the initrd when there is an .osrel, .ucode, .profile, .pcrpkey or .pcrsig section; such images are
  refused. An empty .osrel (ukify --os-release=) is no section.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from image.measure import pe
from image.measure.errors import MeasureError

STUB_VERSIONS = frozenset({257})
# The order in which the stub measures, less the sections refused below; .dtb is for other architectures.
_ORDER = (".linux", ".cmdline", ".initrd", ".uname", ".sbat")
_NEEDED = (".linux", ".cmdline", ".initrd")
_STUB_OWN = frozenset({".text", ".rodata", ".data", ".bss", ".sdmagic", ".reloc"})
_SBAT_STUB = re.compile(rb"^systemd-stub,1,[^,\n]*,systemd,([0-9]{1,4}),", re.MULTILINE)
_PRINTABLE = re.compile(r"[\x20-\x7e]+")

ACTION_BOOT = b"Calling EFI Application from Boot Option"
ACTION_EXIT = b"Exit Boot Services Invocation"
ACTION_EXITED = b"Exit Boot Services Returned with Success"
SEPARATOR = bytes(4)

PCR_APPLICATIONS, PCR_LINUX, PCR_STUB = 4, 9, 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One measurement into PCR `register`: `what` was measured, in words, and its digest."""

    register: int
    what: str
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Uki:
    """`sections` holds the measured ones by name, as they are in memory; `cmdline` is what the kernel gets."""

    image: pe.Image
    kernel: pe.Image
    sections: Mapping[str, bytes]
    cmdline: str
    stub_version: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", MappingProxyType(dict(self.sections)))


def parse(data: bytes) -> Uki:
    """Parse a unified kernel image. Raises MeasureError where its measurements are not known for certain."""
    image = pe.parse(data, "unified kernel image")
    sections: dict[str, bytes] = {}
    for section in image.sections:
        if section.name in _STUB_OWN:
            continue
        if section.name not in _ORDER:
            raise MeasureError(
                f"unified kernel image: what is measured with a section {section.name!r} is not known here"
            )
        if section.name in sections:
            raise MeasureError(f"unified kernel image: two sections {section.name}")
        sections[section.name] = image.content(section)
    for name in _NEEDED:
        if not sections.get(name):
            raise MeasureError(f"unified kernel image: no section {name}")
    return Uki(
        image=image,
        kernel=pe.parse(sections[".linux"], "kernel in the unified kernel image"),
        sections=sections,
        cmdline=parse_cmdline(sections[".cmdline"]),
        stub_version=_stub_version(sections.get(".sbat", b"")),
    )


def parse_cmdline(content: bytes) -> str:
    """The command line as the kernel gets it: the stub strips it. Raises MeasureError on what it would rewrite."""
    try:
        text = content.decode("ascii").strip(" \t\r\n\x00")
    except UnicodeDecodeError:
        raise MeasureError("the command line is not ASCII") from None
    if _PRINTABLE.fullmatch(text) is None:
        raise MeasureError("the command line is empty or has control characters")
    return text


def _stub_version(sbat: bytes) -> int:
    found = _SBAT_STUB.search(sbat)
    version = int(found[1]) if found else 0
    if version not in STUB_VERSIONS:
        named = f"systemd-stub {version}" if version else "no systemd-stub that says its version"
        known = ", ".join(str(one) for one in sorted(STUB_VERSIONS))
        raise MeasureError(f"unified kernel image: {named}; the rules are known for {known}")
    return version


def image_event(uki: Uki, algorithm: str) -> Event:
    """The firmware starts the image."""
    return Event(
        register=PCR_APPLICATIONS,
        what="unified kernel image (Authenticode)",
        digest=pe.authenticode(uki.image, algorithm),
    )


def inner_events(uki: Uki, algorithm: str) -> tuple[Event, ...]:
    """What the stub, the firmware for it, and Linux measure once the image runs, in order."""
    events: list[Event] = []
    for name in _ORDER:
        if name in uki.sections:
            events.append(_hashed(PCR_STUB, f"name of section {name}", name.encode() + b"\x00", algorithm))
            events.append(_hashed(PCR_STUB, f"section {name}", uki.sections[name], algorithm))
    events.append(
        Event(register=PCR_APPLICATIONS, what="kernel (Authenticode)", digest=pe.authenticode(uki.kernel, algorithm))
    )
    load_options = (uki.cmdline + "\x00").encode("utf-16-le")
    events.append(_hashed(PCR_LINUX, "command line (UTF-16)", load_options, algorithm))
    events.append(_hashed(PCR_LINUX, "initrd", uki.sections[".initrd"], algorithm))
    return tuple(events)


def action(register: int, content: bytes, algorithm: str) -> Event:
    """An event of the firmware whose digest is that of its text."""
    what = "separator" if content == SEPARATOR else f'"{content.decode("ascii")}"'
    return _hashed(register, what, content, algorithm)


def _hashed(register: int, what: str, content: bytes, algorithm: str) -> Event:
    return Event(register=register, what=what, digest=hashlib.new(algorithm, content).digest())
