"""Runs a booted appliance: sockets, listeners, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from appliance.boot.boot import Appliance
from appliance.config.settings import Config, needs_keys
from appliance.listener.sockets import BoundSocket, Inherited, bind_all
from appliance.listener.tls_server import without_tls
from appliance.listener.uvicorn_server import ServerHandle, serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Bound sockets by what is spoken on them: RA-TLS, plain HTTP, plain HTTP with metrics only."""

    attested: Sequence[BoundSocket]
    plain: Sequence[BoundSocket] = ()
    metrics: Sequence[BoundSocket] = ()

    @property
    def all(self) -> tuple[BoundSocket, ...]:
        return (*self.attested, *self.plain, *self.metrics)

    def close(self) -> None:
        for bound in self.all:
            bound.close()


def bind_listeners(config: Config, inherited: Sequence[Inherited] = ()) -> Listeners:
    """Sockets for every configured address, not listening yet: nobody can connect before everything is proven.

    Raises BootError naming the entry; then none is left open.
    """
    groups: list[list[BoundSocket]] = []
    metrics = (config.metrics.listen,) if config.metrics.listen else ()
    try:
        for entries in (config.server.listen, config.server.unsafe_plain_http_listen, metrics):
            groups.append(bind_all(entries, inherited))
        for bound in groups[0]:
            if bound.reachable_by_others:
                needs_keys(bound.url.removeprefix("https://"), keys_file=config.keys.file)
    except BaseException:
        for bound in (bound for group in groups for bound in group):
            bound.close()
        raise
    attested, plain, metrics_sockets = groups
    return Listeners(attested=attested, plain=plain, metrics=metrics_sockets)


async def run(appliance: Appliance, config: Config, listeners: Listeners, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. Answers in flight then end with a receipt; a second signal cuts the grace."""
    handles: list[ServerHandle] = []
    servers = [
        (appliance.app, listeners.attested, appliance.protocol_class),
        (appliance.app, listeners.plain, without_tls(appliance.protocol_class)),
        (appliance.metrics_app, listeners.metrics, appliance.metrics_protocol_class),
    ]
    servers = [server for server in servers if server[1]]
    stopping = False

    def started(handle: ServerHandle) -> None:
        handles.append(handle)
        if stopping:
            handle.stop()  # the signal came while the listeners were starting
        elif len(handles) == len(servers):
            on_ready()

    def stop() -> None:
        nonlocal stopping
        stopping = True
        appliance.service.begin_shutdown()
        for handle in handles:
            if handle.should_exit:
                handle.force_exit = True
            handle.stop()

    backlog = config.limits.backlog
    try:
        async with _signals(stop):
            for bound in listeners.all:
                bound.listen(backlog)
            await asyncio.gather(
                *(
                    serve(
                        app,
                        [bound.sock for bound in sockets],
                        protocol_class,
                        grace_s=config.server.grace_s,
                        backlog=backlog,
                        on_started=started,
                    )
                    for app, sockets, protocol_class in servers
                )
            )
    finally:
        listeners.close()


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
