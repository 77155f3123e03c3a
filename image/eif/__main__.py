"""python -m image.eif: write the enclave image file from the built root file system and model store."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from image import service, tree
from image.build import chroot, fetch, lock
from image.build.errors import BuildError
from image.eif import build, kernel
from image.measure import eif
from image.measure.errors import MeasureError

_EXIT_REFUSED = 1
_BUILD = Path("build")


def main(arguments: list[str]) -> int:
    """0 on success, 1 with one line on standard error, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m image.eif", description="Enclave image file for AWS Nitro.")
    parser.add_argument("--root", type=Path, default=_BUILD / "image/root.tar", help="root file system (tar)")
    parser.add_argument("--store", type=Path, default=service.default_store(os.environ))  # noqa: TID251
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its name in the store")
    parser.add_argument("--version", required=True)
    parser.add_argument("--out", type=Path, default=_BUILD / "image-eif/appliance.eif")
    parser.add_argument("--kernel", type=Path, help="a bzImage instead of the image's own kernel")
    parser.add_argument("--kernel-release", help="its release")
    parser.add_argument("--module", type=Path, action="append", default=[], help="its modules, in the order to load")
    try:
        return _write(parser.parse_args(arguments))
    except (BuildError, MeasureError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return _EXIT_REFUSED


def _kernel(options: argparse.Namespace, locked: lock.Lock) -> kernel.Kernel:
    """The kernel that was given, else the image's own out of its package."""
    if options.kernel is not None:
        if options.kernel_release is None:
            raise BuildError("--kernel needs --kernel-release, which the metadata names")
        return kernel.given(options.kernel, options.module, options.kernel_release)
    fetch.fetch(locked, locked.group("kernel", "tools"), environ=dict(os.environ), say=print)  # noqa: TID251
    epoch = locked.source_date_epoch
    tools = chroot.prepare(locked.group("tools"), tools=_BUILD / "image-tools", source_date_epoch=epoch)
    (package,) = locked.group("kernel")
    with tempfile.TemporaryDirectory() as scratch:
        return kernel.take(package, tools, Path(scratch))


def _write(options: argparse.Namespace) -> int:
    locked = lock.load()
    parts_of_kernel = _kernel(options, locked)
    model = service.read_store(options.store, options.model)
    parts = build.Parts(
        kernel=parts_of_kernel.image,
        kernel_version=parts_of_kernel.release,
        modules=parts_of_kernel.modules,
        root=tree.read_tar(options.root),
        model=model,
        model_names=(options.model,),
    )
    epoch = locked.source_date_epoch
    image = build.assemble(parts, version=options.version, epoch=epoch)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_name(f".{options.out.name}.part")
    with partial.open("wb") as file:
        eif.write_to(image, file)
    partial.rename(options.out)
    config = service.configuration(build.FOLDER / "enclave.toml", (options.model,))
    models = options.out.with_name("models.toml")
    service.write_models(config, models, store=options.store, environ=dict(os.environ))  # noqa: TID251
    print(f"{options.out}: {options.out.stat().st_size} bytes")
    for number, value in enumerate(image.pcrs()):
        print(f"PCR{number} {value.hex()}")
    for name, digest in build.weight_digests(image).items():
        print(f"sha256 {digest.hex()}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
