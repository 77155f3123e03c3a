"""PID 1. Whatever ends the machine is one line on the console, "appliance: stopped: " and why; then power off."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from image.init import cmdline, disks, machine, network, service, settings
from image.init.errors import Stop

STATE: Final = Path("/run/appliance")
MODELS: Final = Path("/srv/models")
_NO_RENEWAL_S: Final = 86400.0


def say(text: str) -> None:
    """One line on the console."""
    with Path("/dev/console").open("w", encoding="ascii", errors="replace") as console:
        console.write(f"appliance: {text}\r\n")


def uptime_s() -> str:
    return Path("/proc/uptime").read_text(encoding="ascii").split()[0]


def prepare_model(options: cmdline.Options) -> int:
    """Read the model disk whole, so that verity has checked every byte; returns the bytes of the models. Raises Stop.

    The root disk was read whole before any of it ran, by the initrd.
    """
    if options.model_blocks is not None:
        machine.read_whole(Path("/dev/mapper/model"), options.model_blocks * disks.BLOCK_BYTES, "model")
    return sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file())


def operator_settings() -> settings.Settings:
    """From the one disk that begins with their first line. Raises Stop."""
    found = disks.find_settings(Path("/sys/block"), Path("/dev"))
    if found is None:
        raise Stop("no disk holds operator settings (docs: image/README.md)")
    return settings.parse(found)


def write_keys(chosen: settings.Settings) -> None:
    STATE.mkdir(mode=0o700)
    path = STATE / "keys.json"
    path.write_bytes(settings.key_file(chosen))
    path.chmod(0o600)
    for owned in (STATE, path):
        os.chown(owned, service.UID, service.UID)


def run() -> str:
    """The life of the machine; returns why it ends. Raises Stop, OSError."""
    say(f"init after {uptime_s()} s")
    machine.prepare()
    options = cmdline.parse(Path("/proc/cmdline").read_text(encoding="utf-8", errors="replace"))
    machine.check_processor(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    model_bytes = prepare_model(options)
    machine.check_memory(Path("/proc/meminfo").read_text(encoding="ascii"), model_bytes)
    chosen = operator_settings()
    write_keys(chosen)
    held = network.start(os.urandom(4))  # noqa: TID251 - composition root
    given = machine.hand_over(service.UID)
    say(f"service after {uptime_s()} s, {_memory()}; given: {' '.join(given) or 'no device'}")
    process = service.start(
        service.command(options.attester, service.installed(MODELS), settings.listen_addresses(chosen)),
        uid=service.UID,
        home=str(STATE),
        before=machine.unprivileged(),
        extra=settings.environment(chosen),
    )

    def ready() -> None:
        say(f"ready after {uptime_s()} s, {_memory()}")

    def renew() -> float:
        return _NO_RENEWAL_S if held is None else network.renew(*held)

    watch = service.Watch(on_ready=ready, on_tick=renew, tick_s=_NO_RENEWAL_S if held is None else held[2].lease_s / 2)
    return service.supervise(process, service.power_buttons(), watch)


def _memory() -> str:
    return machine.memory_in_use(Path("/proc/meminfo").read_text(encoding="ascii"))


def main() -> None:
    """Never returns: whatever happens, the machine ends."""
    try:
        reason = run()
    except Stop as stop:
        reason = str(stop)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    finally:
        if sys.exc_info()[0] is not None:
            say("stopped: init itself failed")
            time.sleep(1)
            machine.power_off()
    say(f"stopped: {reason}")
    time.sleep(1)  # for a serial line to pass it on
    machine.power_off()


if __name__ == "__main__":
    main()
