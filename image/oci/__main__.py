"""python -m image.oci: write the container image from the built root file system and model store."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from image import service, tree
from image.build import chroot, fetch, lock
from image.build.chroot import Chroot
from image.build.errors import BuildError
from image.oci import build, layout

_EXIT_REFUSED = 1
_BUILD = Path("build")


def main(arguments: list[str]) -> int:
    """0 on success, 1 with one line on standard error, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m image.oci", description="OCI image layout, without an engine.")
    parser.add_argument("--root", type=Path, default=_BUILD / "image/root.tar", help="root file system (tar)")
    parser.add_argument("--store", type=Path, default=service.default_store(os.environ))  # noqa: TID251
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its name in the store")
    parser.add_argument("--version", required=True)
    parser.add_argument("--out", type=Path, default=_BUILD / "image-oci/appliance-oci.tar")
    try:
        return _write(parser.parse_args(arguments))
    except (BuildError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return _EXIT_REFUSED


def _write(options: argparse.Namespace) -> int:
    locked = lock.load()
    fetch.fetch(locked, locked.group("tools"), environ=dict(os.environ), say=print)  # noqa: TID251
    tools = chroot.prepare(
        locked.group("tools"), tools=_BUILD / "image-tools", source_date_epoch=locked.source_date_epoch
    )
    model = service.read_store(options.store, options.model)
    parts = build.Parts(root=tree.read_tar(options.root), model=model, model_names=(options.model,))
    digest = build.build(
        parts,
        options.out,
        version=options.version,
        epoch=locked.source_date_epoch,
        compress=lambda tar, to: _gzip(tools, tar, to),
    )
    layout.read_manifest(options.out)
    config = service.configuration(build.FOLDER / "container.toml", (options.model,))
    models = options.out.with_name("models.toml")
    service.write_models(config, models, store=options.store, environ=dict(os.environ))  # noqa: TID251
    print(f"{options.out}: {options.out.stat().st_size} bytes")
    print(f"manifest sha256:{digest.hex()}")
    return 0


def _gzip(tools: Chroot, tar: Path, to: Path) -> None:
    """By the tools chroot's gzip, whose version is locked; without name and time."""
    to.write_bytes(tools.bound(tar.parent, "/build/layers").run(["gzip", "-nc", f"/build/layers/{tar.name}"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
