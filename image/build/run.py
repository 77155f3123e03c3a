"""Start other programs: with a fixed environment, their output kept for the message of a failure."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from image.build.errors import BuildError

_TAIL_LINES = 25


def run(
    command: Sequence[str | Path],
    *,
    environ: Mapping[str, str],
    cwd: Path | None = None,
    stdin: bytes = b"",
) -> bytes:
    """What the program printed. Raises BuildError with the end of what it said, where it fails or is missing."""
    arguments = [str(part) for part in command]
    try:
        done = subprocess.run(arguments, env=dict(environ), cwd=cwd, input=stdin, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise BuildError(f"{arguments[0]} is not installed ({error.strerror})") from error
    if done.returncode != 0:
        said = (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace").strip().splitlines()
        raise BuildError("\n".join([f"{arguments[0]} failed (status {done.returncode}):", *said[-_TAIL_LINES:]]))
    return done.stdout


def environment(source_date_epoch: int) -> dict[str, str]:
    """Of every program that makes output: nothing of the caller's shell gets in."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/nonexistent",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(source_date_epoch),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
