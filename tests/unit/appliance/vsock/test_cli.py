"""`appliance vsock-forward` in a process of its own: refusals, signals, bytes."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.appliance.cli.test_main import appliance, refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--listen", "vsock:abc", "--to", "unix:/a"), ["'abc' is no vsock port"]),
        (("--listen", "127.0.0.1:0", "--to", "vsock:5000"), ["expected one place, such as vsock:CID:PORT"]),
        (("--listen", "127.0.0.1:0", "--to", "vsock:4294967295:1"), ["is reserved"]),
        (("--listen", "127.0.0.1:0", "--to", "systemd"), ["expected one place"]),
        (("--listen", "127.0.0.1:0", "--connect-to", "unix:/a"), ["expected HOST:PORT"]),
        (("--listen", "127.0.0.1:0", "--to", "unix:/a", "--allow-cid", "x"), ["--allow-cid", "no vsock CID"]),
        (("--listen", "203.0.113.7:1", "--to", "unix:/a"), ["cannot listen on 203.0.113.7:1"]),
        (("--listen", "systemd", "--to", "unix:/a"), ["systemd passed no such socket"]),
    ],
)
def test_b099_what_is_wrong_is_one_line(arguments: tuple[str, ...], words: list[str]) -> None:
    refused(appliance("vsock-forward", *arguments), *words)


@pytest.mark.parametrize("arguments", [(), ("--to", "unix:/a", "--connect-to", "a:1"), ("--connections", "0")])
def test_usage_errors_are_exit_2(arguments: tuple[str, ...]) -> None:
    listen = ("--listen", "127.0.0.1:0") if arguments else ()
    assert appliance("vsock-forward", *listen, *arguments).returncode == 2


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Path]:
    """Echoes one connection."""
    path = tmp_path / "peer"
    listener = socket.create_server(str(path), family=socket.AF_UNIX)

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield path
    thread.join(10)
    listener.close()


@pytest.mark.parametrize("signals", [1, 2])
def test_it_forwards_until_it_is_told_to_stop(peer: Path, signals: int) -> None:
    """One signal waits for the connection that is open; the second one does not."""
    command = [sys.executable, "-m", "appliance", "vsock-forward", "--listen", "127.0.0.1:0", "--to", f"unix:{peer}"]
    grace = ["--grace-s", "0.2" if signals == 1 else "600"]
    with subprocess.Popen([*command, *grace], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(rf"Forwarding (127\.0\.0\.1):(\d+) to unix:{peer}\. Stop with Ctrl-C\.\n", line)
        assert found, line
        with socket.create_connection((found[1], int(found[2])), 10) as client:
            client.sendall(b"through")
            assert client.recv(7) == b"through"
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)
                process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
            assert process.stderr.read() == ""
