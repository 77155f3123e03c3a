"""Build twice, in two folders, and compare every byte. diffoscope, where it is installed, explains differences."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from image.build.build import Job, build
from image.build.errors import BuildError
from image.build.lock import Lock, sha256_file

_REPORT_LINES = 60


def check(lock: Lock, job: Job, *, compile_again: bool) -> None:
    """Raises BuildError naming the files that differ. With `compile_again` chroot and compilation happen twice too."""
    job.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.out.parent) as first, tempfile.TemporaryDirectory() as second:
        outs = (Path(first) / "a", Path(second) / "another-folder" / "b")
        for number, out in enumerate(outs):
            out.parent.mkdir(parents=True, exist_ok=True)
            tools = job.tools if number == 0 or not compile_again else Path(second) / "tools"
            build(lock, replace(job, out=out, tools=tools))
        different = compare(*outs)
        for name in different:
            job.say(f"differs: {name}")
            job.say(_explain(outs[0] / name, outs[1] / name))
        if different:
            raise BuildError(f"two builds differ in {len(different)} files: {', '.join(different)}")
        job.say(f"identical: {', '.join(sorted(path.name for path in outs[0].iterdir()))}")


def compare(first: Path, second: Path) -> list[str]:
    """Names of files that only one folder has, or that differ."""
    names = {path.name for folder in (first, second) for path in folder.iterdir()}
    return sorted(name for name in names if _digest(first / name) != _digest(second / name))


def _digest(path: Path) -> bytes | None:
    return sha256_file(path) if path.is_file() else None


def _explain(first: Path, second: Path) -> str:
    if shutil.which("diffoscope") is None:
        return "(diffoscope-minimal is not installed)"
    done = subprocess.run(
        ["diffoscope", "--max-report-size", "20000", str(first), str(second)],
        capture_output=True,
        text=True,
        check=False,
    )
    return "\n".join(done.stdout.splitlines()[:_REPORT_LINES])
