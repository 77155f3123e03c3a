"""python -m image.ovmf: build the firmware, check that two builds are equal, try it, renew its inputs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from image import trial
from image.build import lock
from image.build.errors import BuildError
from image.measure import snp, tdvf
from image.measure.errors import MeasureError
from image.ovmf import boot, build, inputs
from image.ovmf.firmware import SOURCE, TOOLS

_EXIT_REFUSED = 1
_BOOT_LIMIT_S = 240.0
_OUT = Path("build/image-firmware")


def main(arguments: list[str]) -> int:
    """0 on success, 1 with a message on standard error, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m image.ovmf", description="Firmware for SEV-SNP and TDX.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("build", "build what is not built"), ("check", "build twice, compare")):
        command = commands.add_parser(name, help=what)
        command.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    commands.choices["build"].add_argument("--out", type=Path, default=_OUT)
    test = commands.add_parser("test", help="start it in QEMU, without a TEE, and see what it starts")
    test.add_argument("--firmware", type=Path, default=_OUT)
    test.add_argument("--image", type=Path, default=Path("build/image"), help="what make image made")
    commands.add_parser("relock", help="renew the firmware's inputs in image/lock.toml")
    options = parser.parse_args(arguments)
    try:
        return {"build": _build, "check": _check, "test": _test, "relock": _relock}[options.command](options)
    except (BuildError, MeasureError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return _EXIT_REFUSED


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S', time.gmtime())}] {text}", flush=True)


def _build(options: argparse.Namespace) -> int:
    locked = lock.load()
    inputs.have(locked, environ=_environ(), say=_say)
    for one in build.build(locked, options.out, jobs=options.jobs, say=_say):
        print(f"{one.sha256.hex()}  {one.path}")
    firmware = options.out / "AMDSEV.fd"
    if not snp.has_kernel_hashes(firmware):
        raise BuildError(f"{firmware} has no kernel-hashes page: it would start any kernel")
    print(f"MRTD {tdvf.mrtd((options.out / 'INTELTDX.fd').read_bytes()).hex()} (page by page)")
    return 0


def _check(options: argparse.Namespace) -> int:
    locked = lock.load()
    inputs.have(locked, environ=_environ(), say=_say)
    for digest in build.check(locked, jobs=options.jobs, say=_say):
        print(f"identical: {digest.hex()}")
    return 0


def _test(options: argparse.Namespace) -> int:
    for one in boot.trials(options.firmware, options.image):
        seconds = trial.run(one, environ=_environ(), limit_s=_BOOT_LIMIT_S)
        print(f"{one}: {one.shows.decode()!r} after {seconds:.1f} s")
    return 0


def _relock(options: argparse.Namespace) -> int:
    del options
    found = inputs.renew(lock.load().suite, environ=_environ())
    renewed = lock.replace_groups(lock.load(), (SOURCE, TOOLS), found)
    lock.LOCK.write_text(lock.render(renewed), encoding="utf-8")
    return 0


def _environ() -> dict[str, str]:
    """What fetching programs get: the caller's own, in which a proxy may be named."""
    return dict(os.environ)  # noqa: TID251 - composition root


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
