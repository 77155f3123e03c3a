"""`appliance vsock-forward`: what the untrusted host of an enclave runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

import click

from appliance.config.addresses import Address, InheritedSockets, TcpAddress, parse_address
from appliance.errors import BootError
from client_sdk.wire.vsock import CID_ANY, parse_cid


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """`to` is None for a CONNECT proxy, which then lets its clients choose among `places`."""

    listen: tuple[str, ...]
    to: Address | None
    places: tuple[TcpAddress, ...]
    allowed_cids: frozenset[int] | None
    connections: int
    idle_s: float
    grace_s: float


@click.command("vsock-forward")
@click.option("--listen", multiple=True, required=True, help="Address to listen on; may be given several times.")
@click.option("--to", "to", help="Forward every connection there.")
@click.option(
    "--connect-to", "places", multiple=True, help="HOST:PORT that clients may ask for by HTTP CONNECT; repeatable."
)
@click.option("--allow-cid", "cids", multiple=True, help="CID that may connect over vsock; default: every one.")
@click.option("--connections", type=click.IntRange(1, 65536), default=1024, show_default=True, help="At once.")
@click.option("--idle-s", type=click.FloatRange(1, 86400), default=900.0, show_default=True, help="Then it is cut.")
@click.option("--grace-s", type=click.FloatRange(0, 600), default=10.0, show_default=True, help="For the end.")
def vsock_forward(
    listen: tuple[str, ...],
    to: str | None,
    places: tuple[str, ...],
    cids: tuple[str, ...],
    connections: int,
    idle_s: float,
    grace_s: float,
) -> None:
    """Move bytes between this machine and an enclave, on the untrusted host.

    With --to it forwards: HOST:PORT, vsock:CID:PORT, unix:/PATH, or vsock+unix:/PATH:PORT for Firecracker and Cloud
    Hypervisor. With --connect-to it is the enclave's way out: a CONNECT proxy for exactly those places. It sees TLS
    that ends inside the enclave, and is not trusted with anything.
    """
    try:
        job = _Job(
            listen=listen,
            to=_target(to),
            places=tuple(_place(text) for text in places),
            allowed_cids=_cids(cids),
            connections=connections,
            idle_s=idle_s,
            grace_s=grace_s,
        )
        if (job.to is None) == (not job.places):
            raise click.UsageError("give either --to or --connect-to")
        asyncio.run(_forward(job))
    except BootError as error:
        click.echo(f"appliance: {error}", err=True)
        sys.exit(1)


async def _forward(job: _Job) -> None:
    from appliance.listener.sockets import bind_all, inherited_sockets
    from appliance.vsock.connect_proxy import ConnectProxy
    from appliance.vsock.connector import connect
    from appliance.vsock.forwarder import Forwarder, ForwardLimits, Reached

    environ = os.environ  # noqa: TID251 - composition root
    bound = bind_all(job.listen, inherited_sockets(environ, os.getpid()))
    limits = ForwardLimits(connections=job.connections, idle_s=job.idle_s, allowed_cids=job.allowed_cids)

    async def reach(_client: object) -> Reached:
        assert job.to is not None
        return Reached(sock=await connect(job.to))

    try:
        for one in bound:
            one.listen(limits.backlog)
        proxy = ConnectProxy(job.places)
        forwarder = Forwarder([one.sock for one in bound], reach if job.to else proxy.reach, limits)
        asked = _asked_to_stop()
        forwarder.start()
        where = ", ".join(one.url.removeprefix("https://") for one in bound)
        what = str(job.to) if job.to else f"{', '.join(map(str, job.places))} by CONNECT"
        click.echo(f"Forwarding {where} to {what}. Stop with Ctrl-C.", err=True)
        await asked.get()
        stopping = asyncio.ensure_future(forwarder.stop(job.grace_s))
        again = asyncio.ensure_future(asked.get())
        await asyncio.wait((stopping, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not stopping.done():
            stopping.cancel()
            await forwarder.stop(0)  # a second signal ends the wait
    finally:
        for one in bound:
            one.close()


def _asked_to_stop() -> asyncio.Queue[None]:
    """Gets an item for every SIGTERM and SIGINT."""
    asked: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.put_nowait, None)
    return asked


def _target(text: str | None) -> Address | None:
    if text is None:
        return None
    address = parse_address(text)
    if isinstance(address, InheritedSockets) or getattr(address, "cid", None) == CID_ANY:
        raise BootError(f"--to {text!r}: expected one place, such as vsock:CID:PORT")
    return address


def _place(text: str) -> TcpAddress:
    address = parse_address(text)
    if not isinstance(address, TcpAddress):
        raise BootError(f"--connect-to {text!r}: expected HOST:PORT")
    return address


def _cids(texts: tuple[str, ...]) -> frozenset[int] | None:
    try:
        return frozenset(map(parse_cid, texts)) or None
    except ValueError as error:
        raise BootError(f"--allow-cid: {error}") from None
