"""Put an enclave image file together from the image's own parts.

Ramdisk 1 boots: the first process and the modules it loads (PCR0, PCR1). Ramdisk 2 is the root file system with the
appliance, its configuration for enclaves, and ramdisk 3 the model store (PCR0, PCR2). The kernel unpacks all three into
one tree. An enclave has no disk, so the weights are in memory twice while it boots, and once afterwards.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from image import service, tree
from image.build.errors import BuildError
from image.eif import newc
from image.eif.init import MODULES, OWN_OPTIONS
from image.init.cmdline import FIXED
from image.measure import cpio, eif
from image.tree import Entry

FOLDER: Final = Path(__file__).parent
CONFIGURATION: Final = f"{service.CONFIGURATION_FOLDER}/enclave.toml"
# reboot=k is how an enclave tells its hypervisor that it ends; it has no PCI bus and no keyboard to look for.
CMDLINE: Final = " ".join((*FIXED, *OWN_OPTIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`modules` in the order in which they are loaded, uncompressed and signed; `model` relative to the store."""

    kernel: bytes
    kernel_version: str
    modules: Sequence[tuple[str, bytes]]
    root: Sequence[Entry]
    model: Sequence[Entry]
    model_names: Sequence[str]


def assemble(parts: Parts, *, version: str, epoch: int) -> eif.Eif:
    """The enclave image, in memory; `epoch` is its one time. Raises BuildError or MeasureError."""
    built = datetime.datetime.fromtimestamp(epoch, datetime.UTC).isoformat()
    ramdisks = (
        boot_entries(parts.modules),
        root_entries(parts.root, parts.model_names),
        service.store_entries(parts.model),
    )
    return eif.Eif(
        kernel=parts.kernel,
        cmdline=CMDLINE,
        ramdisks=tuple(_ramdisk(entries, epoch) for entries in ramdisks),
        metadata=eif.make_metadata("attested-inference", version, parts.kernel_version, built),
    )


def boot_entries(modules: Sequence[tuple[str, bytes]]) -> tuple[Entry, ...]:
    """The ramdisk that boots. Numbers before the names keep the order in which modules are loaded."""
    folder = str(MODULES).lstrip("/")
    return tree.ordered(
        [
            tree.text("init", (FOLDER / "init.py").read_bytes(), 0o755),
            *(tree.folder(name) for name in ("dev", "proc", "sys")),
            tree.character_device("dev/console", 5, 1),
            tree.character_device("dev/null", 1, 3, 0o666),
            tree.folder(str(Path(folder).parent)),
            tree.folder(folder),
            *(
                tree.text(f"{folder}/{number:02d}-{name}", content, 0o444)
                for number, (name, content) in enumerate(modules)
            ),
        ]
    )


def root_entries(root: Sequence[Entry], model_names: Sequence[str]) -> tuple[Entry, ...]:
    """The root file system with the enclave's configuration in it. Raises BuildError where it brings its own /init."""
    if any(entry.name in ("init", "enclave") for entry in root):
        raise BuildError("the root file system has /init or /enclave, which would replace those of the first ramdisk")
    own = service.configuration(FOLDER / "enclave.toml", model_names)
    return tree.ordered([*root, tree.text(CONFIGURATION, own, 0o444)])


def weight_digests(image: eif.Eif) -> Mapping[str, bytes]:
    """SHA-256 of each file in the model's ramdisk, by name: what a plan's nitro.weights may list."""
    return cpio.file_digests(image.ramdisks[-1])


def _ramdisk(entries: Sequence[Entry], epoch: int) -> bytes:
    out = io.BytesIO()
    newc.write(entries, out, epoch=epoch)
    return out.getvalue()
