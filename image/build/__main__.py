"""python -m image.build: relock, fetch, build, check, settings-disk. `make` names them; root is needed to build."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from image import service
from image.build import fetch, lock, relock, settings_disk
from image.build.build import Job, build
from image.build.check import check
from image.build.contents import SUITE
from image.build.errors import BuildError
from image.build.run import run

_PROJECT = Path(__file__).parents[2]
_ENVIRON = dict(os.environ)  # noqa: TID251 - composition root
_FIRST_EPOCH = 1764374400


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str]) -> int:
    """0 on success, 1 with one message on standard error, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m image.build", description="Build the image from locked inputs.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("relock", help="renew image/lock.toml")
    commands.add_parser("fetch", help="fetch every locked input into image/cache/")
    for name, text in (("build", "build the image"), ("check", "build twice, in two folders, and compare")):
        one = commands.add_parser(name, help=text)
        one.add_argument("--out", type=Path, default=_PROJECT / "build/image")
        one.add_argument("--tools", type=Path, default=_PROJECT / "build/image-tools")
        one.add_argument("--store", type=Path, default=service.default_store(_ENVIRON), help="model store")
        one.add_argument("--commit", default="HEAD", help="whose code is in the image")
        one.add_argument("--model", default="smollm2-135m-instruct")
        if name == "check":
            one.add_argument("--compile-again", action="store_true", help="also compile twice, in two chroots")
    disk = commands.add_parser("settings-disk", help="check operator settings and write them as a disk")
    disk.add_argument("settings", type=Path)
    disk.add_argument("disk", type=Path)
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (BuildError, OSError) as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    return 0


def _commit(name: str) -> str:
    """The commit to build, by its digest; says so where the working tree has other code."""
    git = ["git", "-C", str(_PROJECT), "-c", "safe.directory=*"]
    found = run([*git, "rev-parse", "--verify", f"{name}^{{commit}}"], environ=_ENVIRON).decode().strip()
    inside = ("appliance", "client_sdk", "image/build", "image/init", "native/llama_cpp")
    changed = run([*git, "status", "--porcelain", "--", *inside], environ=_ENVIRON)
    if changed:
        say("Changes that are not committed are not in the image")
    return found


def _run(options: argparse.Namespace) -> None:
    if options.command == "settings-disk":
        settings_disk.write(options.settings, options.disk)
    elif options.command == "relock":
        before = lock.Lock(suite=SUITE, source_date_epoch=_FIRST_EPOCH, inputs=())
        if lock.LOCK.is_file():
            before = lock.load()
        after = relock.relock(before, project=_PROJECT, environ=_ENVIRON)
        lock.LOCK.write_text(lock.render(after), encoding="utf-8")
        say(f"image/lock.toml: {len(after.inputs)} inputs")
    elif options.command == "fetch":
        held = lock.load()
        own = tuple(one for one in held.inputs if one.kind != "dsc")  # the firmware's source comes with make ovmf
        fetch.fetch(held, own, environ=_ENVIRON, say=say)
    else:
        if os.geteuid() != 0:
            raise BuildError(
                "building takes root: packages are unpacked with their owners, and programs run in a chroot"
            )
        job = Job(
            project=_PROJECT,
            commit=_commit(options.commit),
            out=options.out.resolve(),
            tools=options.tools.resolve(),
            store=options.store.resolve(),
            model=options.model,
            environ=_ENVIRON,
            say=say,
        )
        if options.command == "build":
            build(lock.load(), job)
        else:
            check(lock.load(), job, compile_again=options.compile_again)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
