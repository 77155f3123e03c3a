"""Sockets of every kind, bound and opened; and what is said when one cannot be had."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.config.addresses import (
    HybridAddress,
    InheritedSockets,
    TcpAddress,
    UnixAddress,
    VsockAddress,
    parse_address,
)
from appliance.errors import BootError
from appliance.listener.sockets import bind, bind_all, inherited_sockets
from client_sdk.wire.vsock import CID_ANY


def test_each_form_of_an_address_reads_back() -> None:
    forms = {
        "127.0.0.1:0": TcpAddress(host="127.0.0.1", port=0),
        "[::1]:8443": TcpAddress(host="::1", port=8443),
        "vsock:5000": VsockAddress(cid=CID_ANY, port=5000),
        "vsock:3:4294967294": VsockAddress(cid=3, port=4294967294),
        "unix:/run/a.sock": UnixAddress(path="/run/a.sock"),
        "vsock+unix:/run/v.sock:5000": HybridAddress(path="/run/v.sock", port=5000),
        "systemd": InheritedSockets(name=""),
        "systemd:web": InheritedSockets(name="web"),
    }
    for text, address in forms.items():
        assert parse_address(text) == address
        assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        *["vsock:", "vsock:abc", "vsock:0", "vsock:-1", "vsock:4294967295", "vsock:4294967296", "vsock: 1", "vsock:٣"],
        *["vsock:4294967295:1", "vsock:4294967296:1", "vsock:0:1", "vsock::1", "vsock:1:2:3", "vsock:" + "9" * 5000],
        *["unix:", "unix:a.sock", "unix:/run/", "unix:/a\0b", "unix:/a\nb", "unix:/" + "x" * 99],
        *["vsock+unix:/a", "vsock+unix:/a:0", "vsock+unix:a:1", "systemd:", "systemd:a:b", "systemd:a b"],
        *["", ":1", "host", "host:", "h:65536", "h:-1", "h: 1", "h:1 ", "h:٣", "h:" + "9" * 5000, "h:+1", "[]:1"],
    ],
)
def test_b099_a_bad_address_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(BootError, match=re.escape(f"address {text!r}")):
        parse_address(text)


def test_b099_a_vsock_cid_of_another_machine_is_explained() -> None:
    with pytest.raises(BootError, match=r"cannot listen on vsock:7:5000: .*(CID of this machine|has no vsock)"):
        bind(VsockAddress(cid=7, port=5000))


def test_b099_a_vsock_port_in_use_is_explained() -> None:
    first = bind(VsockAddress(cid=CID_ANY, port=54_321))
    with first.sock, pytest.raises(BootError, match="cannot listen on vsock:54321: Address already in use"):
        bind(VsockAddress(cid=CID_ANY, port=54_321))


def test_a_unix_socket_appears_when_it_listens_and_goes_when_it_closes(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    (bound,) = bind_all((f"unix:{path}",))
    assert bound.url == f"unix://{path}"
    assert not path.exists()
    bound.listen(5)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    bound.close()
    assert list(tmp_path.iterdir()) == []


def test_a_unix_socket_in_use_is_refused_and_stays_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    (first,) = bind_all((f"unix:{path}",))
    first.listen(5)
    with pytest.raises(BootError, match="Address already in use"):
        bind_all((f"unix:{path}",))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    first.close()


def test_of_two_that_bound_one_path_the_later_to_listen_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    code = f"from appliance.listener.sockets import bind_all\nbound = bind_all(('unix:{path}',))[0]\n"
    code += "print('bound', flush=True)\ninput()\nbound.listen(5)\n"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "bound\n"
        (mine,) = bind_all((f"unix:{path}",))
        mine.listen(5)
        _, errors = other.communicate("\n", timeout=20)
    assert other.returncode == 1
    assert "Address already in use" in errors
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    mine.close()


def test_a_socket_that_a_dead_process_left_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "left"))
    left.close()
    (bound,) = bind_all((f"unix:{tmp_path}/left",))
    bound.listen(5)
    bound.close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(BootError, match="no socket lies there"):
        bind_all((f"unix:{tmp_path}/file",))
    assert (tmp_path / "file").read_text() == "precious"


def test_closing_leaves_the_socket_that_took_the_place_meanwhile(tmp_path: Path) -> None:
    (bound,) = bind_all((f"unix:{tmp_path}/a",))
    bound.listen(5)
    (tmp_path / "a").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "a"))
        bound.close()
        assert (tmp_path / "a").exists()


def test_guest_initiated_connections_arrive_beside_the_socket_of_the_machine(tmp_path: Path) -> None:
    bound = bind(parse_address(f"vsock+unix:{tmp_path}/v.sock:8003"))
    bound.listen(5)
    assert [path.name for path in tmp_path.iterdir()] == ["v.sock_8003"]
    bound.close()


# systemd

_CHILD = """
import os, socket, sys
from appliance.listener.sockets import bind_all, inherited_sockets
from appliance.errors import BootError
os.environ["LISTEN_PID"] = str(os.getpid())
try:
    found = inherited_sockets(os.environ, os.getpid())
    for entry in sys.argv[1:]:
        bound = bind_all((entry,), found)
        print(entry, [os.get_inheritable(one.sock.fileno()) for one in bound], [one.url for one in bound])
        for one in bound:
            one.listen(7)
except BootError as error:
    print("refused:", error)
"""


def activated(sockets: list[int], names: str, *entries: str) -> str:
    """What a child prints that gets these descriptors as 3, 4, ... as systemd passes them."""
    shuffle = "".join(f"os.dup2({fd}, {50 + n}); " for n, fd in enumerate(sockets))
    shuffle += "".join(f"os.dup2({50 + n}, {3 + n}); " for n in range(len(sockets)))
    code = f"import os; {shuffle}\nexec({_CHILD!r})"
    environ = {**os.environ, "LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": names}
    done = subprocess.run(
        [sys.executable, "-c", code, *entries],
        pass_fds=sockets,
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sockets_of_systemd_are_taken_by_name_or_all(tmp_path: Path) -> None:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "a"))
    unix.listen()
    with unix, socket.create_server(("127.0.0.1", 0)) as inet:
        printed = activated([unix.fileno(), inet.fileno()], "first:web", "systemd:web", "systemd", "systemd:other")
        port = inet.getsockname()[1]
    assert f"systemd:web [False] ['https://127.0.0.1:{port}']" in printed
    assert f"systemd [False, False] ['unix://{tmp_path}/a', 'https://127.0.0.1:{port}']" in printed
    assert "refused: cannot listen on systemd:other: systemd passed no such socket" in printed


def test_what_systemd_passed_must_be_listening_stream_sockets(tmp_path: Path) -> None:
    with socket.socket() as idle, socket.socket(type=socket.SOCK_DGRAM) as datagram, (tmp_path / "f").open("w") as file:
        idle.bind(("127.0.0.1", 0))
        for bad, words in ((idle, "no listening stream"), (datagram, "no listening stream"), (file, "no socket")):
            assert f"refused: systemd passed descriptor 3, which is {words}" in activated(
                [bad.fileno()], "x", "systemd"
            )


def test_what_was_meant_for_another_process_is_left_alone() -> None:
    assert inherited_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "9"}, 2) == []
    assert inherited_sockets({}, 2) == []
    with pytest.raises(BootError, match="LISTEN_FDS"):
        inherited_sockets({"LISTEN_PID": "2", "LISTEN_FDS": "many"}, 2)
