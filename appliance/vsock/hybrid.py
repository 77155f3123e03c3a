"""The host's end of a hybrid vsock: a unix socket on which one line chooses the guest's port."""

from __future__ import annotations

import asyncio
import socket

from client_sdk.wire.vsock import HybridRefused, HybridReply, connect_line


async def choose_port(sock: socket.socket, port: int) -> None:
    """Connect `sock`, a fresh connection to the virtual machine's unix socket, to the guest's `port`.

    Raises HybridRefused where nobody listens or the other end speaks something else. Time limits are the caller's.
    """
    loop = asyncio.get_running_loop()
    reply = HybridReply(port)
    try:
        await loop.sock_sendall(sock, connect_line(port))
        while not reply.feed(await loop.sock_recv(sock, 1)):
            pass
    except HybridRefused:
        raise
    except ConnectionError:
        reply.feed(b"")  # a reset is the same refusal as an end
