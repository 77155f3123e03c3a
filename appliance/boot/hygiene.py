"""What this process must not inherit and must not leave behind: foreign code by environment, memory by core dumps."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from appliance.errors import BootError

_UNSAFE_NAMES: Final = frozenset({"LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH"})
_UNSAFE_PREFIXES: Final = ("PYTHON", "GGML_", "LLAMA_")
_PR_GET_DUMPABLE: Final = 3  # prctl(2)
_PR_SET_DUMPABLE: Final = 4


def find_unsafe_environment(names: Iterable[str], *, allowed: frozenset[str]) -> tuple[str, ...]:
    """The sorted names that let another's code or settings into this process and are not in `allowed` (whole names).

    LD_PRELOAD, LD_AUDIT and LD_LIBRARY_PATH load foreign libraries (ld.so(8)); PYTHON*, GGML_* and LLAMA_* change what
    Python and llama.cpp do, past the configuration whose digest receipts carry.
    """
    unsafe = (name for name in names if name in _UNSAFE_NAMES or name.startswith(_UNSAFE_PREFIXES))
    return tuple(sorted(name for name in unsafe if name not in allowed))


def check_environment(names: Iterable[str], *, allowed: frozenset[str], insecure: bool = False) -> tuple[str, ...]:
    """Refuse an unsafe environment (`names` may be the mapping itself: no value is ever read).

    Raises BootError naming the variables; in insecure mode they are returned instead, for the caller's warning.
    """
    unsafe = find_unsafe_environment(names, allowed=allowed)
    if unsafe and not insecure:
        raise BootError(
            f"unsafe environment: {', '.join(unsafe)}. They change what runs here without any trace in the evidence. "
            "Unset them, or allow them by name in the configuration."
        )
    return unsafe


def harden_process() -> None:
    """No core dump and no ptrace of this process: what it holds are prompts and keys. Idempotent; raises BootError.

    RLIMIT_CORE alone is not enough, because a piped core_pattern ignores it (core(5)); an undumpable process is never
    dumped. execve() makes a process dumpable again: every process of ours has to call this itself.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise BootError(f"cannot make the process undumpable: {os.strerror(ctypes.get_errno())}")
    if not is_hardened():
        raise BootError("the kernel did not keep RLIMIT_CORE = 0 and PR_SET_DUMPABLE = 0")


def is_hardened() -> bool:
    """Whether this process can leave no core dump, as the kernel tells it."""
    libc = ctypes.CDLL(None, use_errno=True)
    undumpable: bool = libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0
    return undumpable and resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)


def no_swap_warning(swaps: Path = Path("/proc/swaps")) -> str | None:
    """A warning when the kernel may write memory, prompts included, to a swap area; None when it cannot.

    `swaps` has the format of proc_swaps(5): a heading, then one line per area.
    """
    try:
        areas = swaps.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError as error:
        return f"cannot tell whether swap is on ({error.strerror}): memory may reach a disk"
    active = [line for line in areas if line.strip()]
    if not active:
        return None
    return f"swap is on ({len(active)} area(s)): prompts in memory may reach a disk. Turn it off with `swapoff -a`."
