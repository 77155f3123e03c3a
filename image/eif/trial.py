"""python -m image.eif.trial: boot what an enclave image file holds, in QEMU, up to where only an enclave could go on.

Kernel, command line and ramdisks are read from the file itself. QEMU has no parent instance, so the first process
must stop with exactly that reason: it has run, its modules are loaded, its root file system is there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from image import trial
from image.build.errors import BuildError
from image.measure import eif
from image.measure.errors import MeasureError

STOPS: Final = b"appliance: stopped: no parent instance over vsock"
_LIMIT_S: Final = 300.0


def make_trial(image: eif.Eif, folder: Path) -> trial.Trial:
    """Write the parts to `folder`, the ramdisks as the hypervisor would: one behind the other. Raises OSError."""
    (folder / "kernel").write_bytes(image.kernel)
    with (folder / "initrd").open("wb") as file:
        file.writelines(image.ramdisks)
    return trial.Trial(
        what="ramdisks of the enclave",
        arguments=("-kernel", folder / "kernel", "-initrd", folder / "initrd", "-append", image.cmdline),
        shows=STOPS,
        never=b"Kernel panic",
    )


def main(arguments: list[str]) -> int:
    """0 where it stops as it must, 1 with one line on standard error."""
    file = Path(arguments[0]) if arguments else Path("build/image-eif/appliance.eif")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            one = make_trial(eif.read(file.read_bytes()), Path(scratch))
            seconds = trial.run(one, environ=dict(os.environ), limit_s=_LIMIT_S)  # noqa: TID251
    except (BuildError, MeasureError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    print(f"{one}: {one.shows.decode()!r} after {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
