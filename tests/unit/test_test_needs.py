"""What `make test` does about programs that this system does not have: it names them, and goes on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/test_needs.sh"


def run(tmp_path: Path, *arguments: str, there: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The script, where PATH leads to what it needs itself and to programs named `there`, and nowhere else."""
    for name in ("bash", "dirname", "python3"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    for name in there:
        (tmp_path / name).touch(mode=0o755)
    environ = {"PATH": str(tmp_path), "NO_INSTALL": "1"}
    command = [str(tmp_path / "bash"), str(SCRIPT), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_what_is_missing_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    done = run(tmp_path, there=("openssl", "umoci"))
    assert (done.returncode, done.stdout) == (0, "")
    named = done.stderr.partition("apt-get install")[2].split()
    for package in ("swtpm", "libtss2-dev", "fuse3", "cpio", "skopeo", "nodejs"):
        assert package in named
    assert "openssl" not in named


def test_a_software_tpm_takes_all_of_its_parts(tmp_path: Path) -> None:
    done = run(tmp_path, "--has-tpm", there=("swtpm",))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
