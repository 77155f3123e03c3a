"""Process hygiene, in processes of its own: hardening cannot be undone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from appliance.boot.hygiene import check_environment, find_unsafe_environment, no_swap_warning
from appliance.errors import BootError

UNSAFE = ("GGML_NLOOP", "LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "LLAMA_ARG_MODEL", "PYTHONPATH", "PYTHONSTARTUP")
HARMLESS = ("HOME", "LANG", "LD_BIND_NOW", "MY_LD_PRELOAD", "PATH", "XDG_DATA_HOME", "python")


class Unreadable(Mapping[str, str]):
    """An environment whose values are secrets: reading one fails the test."""

    def __iter__(self) -> Iterator[str]:
        return iter((*UNSAFE, *HARMLESS))

    def __len__(self) -> int:
        return len(UNSAFE) + len(HARMLESS)

    def __getitem__(self, name: str) -> str:
        raise AssertionError("a value was read")


def test_b179_production_refuses_and_names_every_variable() -> None:
    with pytest.raises(BootError) as caught:
        check_environment(Unreadable(), allowed=frozenset())
    for name in UNSAFE:
        assert name in str(caught.value)
    for name in ("HOME", "LD_BIND_NOW", "XDG_DATA_HOME"):
        assert name not in str(caught.value)


def test_insecure_mode_lists_them() -> None:
    assert check_environment(Unreadable(), allowed=frozenset(), insecure=True) == UNSAFE


def test_only_whole_names_are_allowed() -> None:
    assert find_unsafe_environment(UNSAFE, allowed=frozenset({"PYTHON", "PYTHON*", "LD_PRELOAD"})) == tuple(
        name for name in UNSAFE if name != "LD_PRELOAD"
    )
    assert check_environment(UNSAFE, allowed=frozenset(UNSAFE)) == ()
    assert check_environment(HARMLESS, allowed=frozenset()) == ()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_hardened_process_can_leave_no_core() -> None:
    done = run(
        "import os, resource\n"
        "from appliance.boot.hygiene import harden_process, is_hardened\n"
        "assert not is_hardened()\n"
        "harden_process(); harden_process()\n"
        "assert is_hardened()\n"
        "assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)\n"
        "os.close(os.memfd_create('still works'))\n"
        "os.kill(os.getpid(), 11)\n"
    )
    assert done.returncode == -11, done.stderr


def test_exec_undoes_it_so_every_process_hardens_itself() -> None:
    done = run(
        "import subprocess, sys\n"
        "from appliance.boot.hygiene import harden_process\n"
        "harden_process()\n"
        "code = 'from appliance.boot.hygiene import harden_process, is_hardened; '\\\n"
        "       'print(is_hardened()); harden_process(); print(is_hardened())'\n"
        "print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout)\n"
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_swap_is_told(tmp_path: Path) -> None:
    swaps = tmp_path / "swaps"
    heading = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    swaps.write_text(heading)
    assert no_swap_warning(swaps) is None
    swaps.write_text(heading + "/dev/vdb partition 1048572 0 -2\n")
    assert "1 area" in (no_swap_warning(swaps) or "")
    assert "cannot tell" in (no_swap_warning(tmp_path / "none") or "")
