"""Start the appliance, watch it, end it. What it prints stays here: the console gets lines of init's own making."""

from __future__ import annotations

import os
import selectors
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from image.init.cmdline import printable
from image.init.errors import Stop

UID: Final = 900
CONFIG: Final = "/etc/appliance/appliance.toml"
PYTHON: Final = "/usr/bin/python3.13"
REFUSAL: Final = b"appliance: "
READY: Final = b"Serving "
"""How lines of `appliance serve` begin: its one line of a refusal, and the one when it listens."""
_GRACE_S: Final = 20.0
_LINE_LIMIT_BYTES: Final = 4096
_REASON_LIMIT: Final = 300
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_EVENT = struct.Struct("qqHHi")  # struct input_event on 64-bit machines
_EV_KEY, _KEY_POWER = 1, 116


@dataclass(slots=True)
class Output:
    """The service's standard error, line by line; of it a refusal and the fact of being ready are kept, no more."""

    refusal: str = ""
    ready: bool = False
    _pending: bytes = b""

    def feed(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._pending = self._pending[-_LINE_LIMIT_BYTES:]
        for line in lines:
            if line.startswith(REFUSAL):
                text = line.removeprefix(REFUSAL).decode("utf-8", "replace")
                self.refusal = "".join(c if c.isprintable() else "?" for c in text)[:_REASON_LIMIT]
            elif line.startswith(READY):
                self.ready = True


def command(attester: str, models: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """The service's argument vector."""
    arguments = [PYTHON, "-s", "-m", "appliance", "serve", "--config", CONFIG, "--attester", attester]
    arguments += [part for name in models for part in ("--model", name)]
    return arguments + [part for address in addresses for part in ("--listen", address)]


def installed(store: Path) -> tuple[str, ...]:
    """The names of the models in a store, sorted: all of them are served. Raises Stop where there is none."""
    names = tuple(sorted(path.stem for path in (store / "manifests").glob("*.json")))
    if not names:
        raise Stop("the model disk holds no model")
    return names


def power_buttons(sys: Path = Path("/sys/class/input"), dev: Path = Path("/dev/input")) -> list[Path]:
    """Event devices of power buttons: how a host asks a machine to end."""
    found = []
    for folder in sorted(sys.glob("event*")) if sys.is_dir() else []:
        name = folder / "device/name"
        if name.is_file() and "Power Button" in name.read_text(encoding="utf-8", errors="replace"):
            found.append(dev / folder.name)
    return found


def is_pressed(data: bytes) -> bool:
    """Whether these input events have a press of the power key among them."""
    whole = len(data) - len(data) % _EVENT.size
    return any(event[2:] == (_EV_KEY, _KEY_POWER, 1) for event in _EVENT.iter_unpack(data[:whole]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What else happens while the service runs: `on_ready` once, `on_tick` again and again, after `tick_s` seconds."""

    on_ready: Callable[[], None]
    on_tick: Callable[[], float]
    tick_s: float


def supervise(process: subprocess.Popen[bytes], buttons: Sequence[Path], watch: Watch) -> str:
    """Wait for the end of the service, or of the machine; returns why, as one line. The service has ended then."""
    assert process.stderr is not None
    output, reason = Output(), ""
    with selectors.DefaultSelector() as selector:
        ended = os.pidfd_open(process.pid)
        selector.register(ended, selectors.EVENT_READ, "ended")
        selector.register(process.stderr, selectors.EVENT_READ, "output")
        for button in buttons:
            selector.register(os.open(button, os.O_RDONLY | os.O_NONBLOCK), selectors.EVENT_READ, "button")
        announced, tick_at = False, time.monotonic() + watch.tick_s
        while process.poll() is None:
            reason = reason or _events(selector, process, output, max(0.0, tick_at - time.monotonic()))
            if output.ready and not announced:
                announced = True
                watch.on_ready()
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + watch.on_tick()
            reap_others(process.pid)
        _drain(process.stderr.fileno(), output)
        os.close(ended)
    process.stderr.close()
    if reason:
        return reason
    how = f"status {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
    return output.refusal or f"the service ended by itself ({how})"


def _events(
    selector: selectors.BaseSelector, process: subprocess.Popen[bytes], output: Output, timeout_s: float
) -> str:
    """Handle what is there; the reason where the machine was asked to end. The service has ended then."""
    for key, _ in selector.select(timeout_s):
        if key.data == "output":
            data = os.read(key.fd, _LINE_LIMIT_BYTES)
            output.feed(data)
            if not data:
                selector.unregister(key.fileobj)
        elif key.data == "button" and is_pressed(os.read(key.fd, _EVENT.size * 64)):
            end(process)
            return "the power button was pressed"
    return ""


def _drain(descriptor: int, output: Output) -> None:
    os.set_blocking(descriptor, False)
    try:
        while data := os.read(descriptor, _LINE_LIMIT_BYTES):
            output.feed(data)
    except BlockingIOError:
        pass
    output.feed(b"\n")


def end(process: subprocess.Popen[bytes], grace_s: float = _GRACE_S) -> None:
    """Ask the service to end, as an operator would; after `grace_s` seconds do not ask."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def reap_others(service: int) -> None:
    """Collect children that are not ours but became ours when their parent ended: init's duty."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == service:
            return
        os.waitpid(found.si_pid, 0)


def environment(home: str, extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the service. `extra` are settings of the appliance."""
    return {"PATH": "/usr/bin", "HOME": home, "LC_ALL": "C.UTF-8", "COLUMNS": "200", "NO_COLOR": "1", **extra}


def start(
    arguments: Sequence[str], *, uid: int, home: str, before: Callable[[], None], extra: Mapping[str, str] = _NOTHING
) -> subprocess.Popen[bytes]:
    """Start the service as user `uid` with an environment of its own, `extra` in it. Raises Stop."""
    try:
        return subprocess.Popen(
            arguments,
            env=environment(home, extra),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            user=uid,
            group=uid,
            extra_groups=[],
            umask=0o077,
            close_fds=True,
            start_new_session=True,
            preexec_fn=before,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Stop(f"the service cannot be started: {printable(str(error))}") from error
