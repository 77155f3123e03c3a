"""Runs a booted appliance: sockets, listeners, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable

from appliance.attestation.listener import ServerHandle, serve
from appliance.boot import Appliance
from appliance.config import Config, parse_listen
from appliance.errors import BootError

_BACKLOG = 512


def bind_sockets(entries: tuple[str, ...]) -> list[socket.socket]:
    """TCP sockets bound to HOST:PORT entries, not listening yet: nobody can connect before everything is proven.

    Raises BootError naming the entry; then none is left open.
    """
    for entry in entries:
        parse_listen(entry)  # all of them, before the first socket exists
    opened: list[socket.socket] = []
    try:
        for entry in entries:
            host, port = parse_listen(entry)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            opened.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that IDNA refuses
        for sock in opened:
            sock.close()
        reason = (isinstance(error, OSError) and error.strerror) or "this is no address of this machine"
        raise BootError(f"cannot listen on {entry}: {reason}") from error
    return opened


async def run(appliance: Appliance, config: Config, sockets: list[socket.socket], on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. Answers in flight then end with a receipt; a second signal cuts the grace."""
    handles: list[ServerHandle] = []
    metrics_sockets = bind_sockets((config.metrics.listen,)) if config.metrics.listen else []
    expected = 1 + bool(metrics_sockets)
    stopping = False

    def started(handle: ServerHandle) -> None:
        handles.append(handle)
        if stopping:
            handle.stop()  # the signal came while the listeners were starting
        elif len(handles) == expected:
            on_ready()

    def stop() -> None:
        nonlocal stopping
        stopping = True
        appliance.service.begin_shutdown()
        for handle in handles:
            if handle.should_exit:
                handle.force_exit = True
            handle.stop()

    async with _signals(stop):
        _listen([*sockets, *metrics_sockets])
        grace_s = config.server.grace_s
        serving = [serve(appliance.app, sockets, appliance.protocol_class, grace_s=grace_s, on_started=started)]
        if metrics_sockets:
            serving.append(
                serve(
                    appliance.metrics_app,
                    metrics_sockets,
                    appliance.metrics_protocol_class,
                    grace_s=grace_s,
                    on_started=started,
                )
            )
        await asyncio.gather(*serving)


def _listen(sockets: list[socket.socket]) -> None:
    """Start to listen. Two processes may bind one port while neither listens: the later one learns it here, as a
    BootError."""
    for sock in sockets:
        try:
            sock.listen(_BACKLOG)
        except OSError as error:
            host, port = sock.getsockname()[:2]
            raise BootError(f"cannot listen on {host}:{port}: {error.strerror}") from error


@contextlib.asynccontextmanager
async def _signals(stop: Callable[[], None]) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
