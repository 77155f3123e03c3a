"""The kernel's command line, as a closed list: an option that is not known here stops the boot.

The host can add options without moving PCR 4 and 11 (SMBIOS type 11, boot options, add-ons). What it adds shows in PCR
9 and 12; here it does not get past init, whatever it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from image.init.errors import Stop

ATTESTERS: Final = ("auto", "nitro", "sev-snp", "tdx", "tpm2")
FIXED: Final = (
    "console=ttyS0",
    "panic=-1",
    "oops=panic",
    "lockdown=confidentiality",
    "module.sig_enforce=1",
    "init_on_alloc=1",
    "init_on_free=1",
    "slab_nomerge",
    "vsyscall=none",
    "no_timer_check",  # an emulator on a busy machine fails the check, and then has no timer
)
"""Options of the kernel that every image has, each exactly once."""
_LOGLEVEL = re.compile(r"loglevel=[0-7]")
_OWN = re.compile(r"appliance\.([a-z_]+)=(\S*)")
_HEX = re.compile(r"[0-9a-f]{64}")
_BLOCKS = re.compile(r"[1-9][0-9]{0,11}")
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`attester` is one of ATTESTERS. Hashes are 64 hex digits, blocks have 4096 bytes.

    The four are None where the image has no disks of its own (an enclave's ramdisk).
    """

    attester: str
    root_hash: str | None
    root_blocks: int | None
    model_hash: str | None
    model_blocks: int | None


def render(options: Options) -> str:
    """The command line for the image; `parse` reads it back."""
    words = [*FIXED, "loglevel=4"]
    words += [f"appliance.{name}={value}" for name, value in _named(options) if value is not None]
    return " ".join(words)


def _named(options: Options) -> tuple[tuple[str, str | int | None], ...]:
    return (
        ("attester", options.attester),
        ("root_hash", options.root_hash),
        ("root_blocks", options.root_blocks),
        ("model_hash", options.model_hash),
        ("model_blocks", options.model_blocks),
    )


def parse(text: str) -> Options:
    """Raises Stop naming what is unknown, missing, or there twice. `loglevel` may come several times."""
    own: dict[str, str] = {}
    fixed: set[str] = set()
    for word in text.split():
        if _LOGLEVEL.fullmatch(word):
            continue
        found = _OWN.fullmatch(word)
        if found is not None and found[1] in Options.__slots__:
            if found[1] in own:
                raise Stop(f"the command line has appliance.{found[1]} twice")
            own[found[1]] = found[2]
        elif word not in FIXED:
            raise Stop(f"unknown command line option {printable(word)!r}")
        elif word in fixed:
            raise Stop(f"the command line has {word} twice")
        else:
            fixed.add(word)
    missing = [word for word in FIXED if word not in fixed]
    if missing:
        raise Stop(f"the command line lacks {missing[0]}")
    return _options(own)


def _options(own: dict[str, str]) -> Options:
    if own.get("attester") not in ATTESTERS:
        raise Stop(f"appliance.attester must be one of {', '.join(ATTESTERS)}")
    disks = [name for name in Options.__slots__ if name != "attester"]
    given = [name for name in disks if name in own]
    if given and given != disks:
        raise Stop("the command line names only some of root and model disk, hash and blocks")
    for name in given:
        pattern = _HEX if name.endswith("_hash") else _BLOCKS
        if pattern.fullmatch(own[name]) is None:
            raise Stop(f"the command line has a bad appliance.{name}")
    return Options(
        attester=own["attester"],
        root_hash=own.get("root_hash"),
        root_blocks=int(own["root_blocks"]) if given else None,
        model_hash=own.get("model_hash"),
        model_blocks=int(own["model_blocks"]) if given else None,
    )


def printable(text: str) -> str:
    """For one line on the console: plain characters, cut to length. The host may have written it."""
    return "".join(character if character.isascii() and character.isprintable() else "?" for character in text[:_SHOWN])
