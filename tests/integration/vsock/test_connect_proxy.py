"""The way out of an enclave: named places only, TLS end to end, no redirect elsewhere."""

from __future__ import annotations

import asyncio
import datetime
import http.server
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from appliance.attestation.endorsements.fetch import Fetcher, FetchFailed
from appliance.config.addresses import TcpAddress, parse_address
from appliance.vsock.connect_proxy import ConnectProxy
from tests.integration.vsock.conftest import Peer, Running, StartForwarder, echo, rest

DOCUMENT = b"an endorsement " * 1000


@dataclass
class Site:
    """An HTTPS server on "localhost" with a certificate of its own authority, which `tls` trusts."""

    port: int
    tls: ssl.SSLContext
    location: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"https://localhost:{self.port}{path}"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    pem = self_signed(tmp_path)
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_cert_chain(pem)
    there = ssl.create_default_context(cafile=str(pem))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler := type("Handler", (_Handler,), {}))
    server.socket = here.wrap_socket(server.socket, server_side=True)
    found = Site(port=server.server_port, tls=there)
    handler.site = found  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield found
    server.shutdown()
    server.server_close()
    thread.join(10)


class _Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        self.site.asked.append((self.path, self.headers["host"]))
        if self.path.startswith("/redirect"):
            self.send_response(302)
            self.send_header("location", self.site.location)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        known = self.path == "/document"
        self.send_response(200 if known else 404)
        self.send_header("content-length", str(len(DOCUMENT)))
        self.end_headers()
        self.wfile.write(DOCUMENT)

    def log_message(self, *_: object) -> None:
        pass


def self_signed(directory: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = directory / "site.pem"
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(certificate.public_bytes(Encoding.PEM) + private)
    return path


def proxy(forward: StartForwarder, directory: Path, *places: str) -> tuple[Running, str]:
    """A running proxy for `places`, and its address."""
    allowed = [address for text in places if isinstance(address := parse_address(text), TcpAddress)]
    address = f"unix:{directory}/proxy"
    return forward(address, ConnectProxy(allowed).reach, reach_s=2.0), address


@pytest.fixture
def fetcher(forward: StartForwarder, tmp_path: Path, site: Site) -> Fetcher:
    _, address = proxy(forward, tmp_path, f"localhost:{site.port}")
    return Fetcher(proxy=parse_address(address), tls=site.tls, timeout_s=10.0)


async def test_a_document_is_fetched_with_tls_end_to_end(fetcher: Fetcher, site: Site) -> None:
    assert await fetcher.get(site.url("/document")) == DOCUMENT
    assert site.asked == [("/document", f"localhost:{site.port}")]


async def test_the_certificate_is_checked_in_the_enclave(fetcher: Fetcher, site: Site) -> None:
    """A proxy that answers itself, or connects elsewhere, has no certificate for the name."""
    strangers = replace(fetcher, tls=ssl.create_default_context())
    with pytest.raises(FetchFailed, match="CERTIFICATE_VERIFY_FAILED"):
        await strangers.get(site.url("/document"))
    assert site.asked == []


async def test_only_listed_places_are_reached(forward: StartForwarder, tmp_path: Path, site: Site) -> None:
    running, address = proxy(forward, tmp_path, f"localhost:{site.port}")
    fetcher = Fetcher(proxy=parse_address(address), tls=site.tls, timeout_s=10.0)
    for url in (
        f"https://127.0.0.1:{site.port}/document",
        f"https://localhost:{site.port + 1}/",
        "https://example.com/",
    ):
        with pytest.raises(FetchFailed, match="the proxy answered 403"):
            await fetcher.get(url)
    deadline = time.monotonic() + 10
    while running.stats.unreachable < 3 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)  # the proxy counts after it has answered, in a thread of its own
    assert (running.stats.unreachable, site.asked) == (3, [])


async def test_redirects_stay_on_their_host(fetcher: Fetcher, site: Site) -> None:
    site.location = "/document"
    assert await fetcher.get(site.url("/redirect")) == DOCUMENT
    for elsewhere in ("https://example.com/document", f"https://localhost:{site.port + 1}/document", "//example.com/"):
        site.location = elsewhere
        with pytest.raises(FetchFailed, match="redirects to another host"):
            await fetcher.get(site.url("/redirect"))
    site.location = f"http://localhost:{site.port}/document"
    with pytest.raises(FetchFailed, match="only https"):
        await fetcher.get(site.url("/redirect"))
    site.location = "/redirect"
    with pytest.raises(FetchFailed, match="more than 3 redirects"):
        await fetcher.get(site.url("/redirect"))


async def test_documents_are_bounded_and_must_be_there(fetcher: Fetcher, site: Site) -> None:
    with pytest.raises(FetchFailed, match="more than 100 bytes"):
        await replace(fetcher, limit_bytes=100).get(site.url("/document"))
    with pytest.raises(FetchFailed, match="HTTP 404"):
        await fetcher.get(site.url("/absent"))
    for url in ("http://localhost/", "https://user@localhost/", "https://", "https://[/", "ftp://x/"):
        with pytest.raises(FetchFailed):
            await fetcher.get(url)


async def test_a_proxy_that_does_not_answer_is_given_up(tmp_path: Path, site: Site) -> None:
    silent = Peer(lambda sock: sock.recv(1 << 16) and sock.recv(1), tmp_path / "silent")
    with silent, pytest.raises(FetchFailed, match=r"within 0\.3 s"):
        await Fetcher(proxy=parse_address(silent.address), tls=site.tls, timeout_s=0.3).get(site.url("/"))
    other = Peer(lambda sock: sock.recv(1 << 16) and sock.sendall(b"SSH-2.0-x\r\n\r\n"), tmp_path / "other")
    with other, pytest.raises(FetchFailed, match="the proxy"):
        await Fetcher(proxy=parse_address(other.address), tls=site.tls, timeout_s=3.0).get(site.url("/"))
    with pytest.raises(FetchFailed, match="cannot connect to unix:"):
        await Fetcher(proxy=parse_address(f"unix:{tmp_path}/none"), tls=site.tls).get(site.url("/"))


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET http://localhost:1/ HTTP/1.1\r\n\r\n", b"405"),
        (b"CONNECT localhost:1 HTTP/2.0\r\n\r\n", b"400"),
        (b"CONNECT localhost HTTP/1.1\r\n\r\n", b"400"),
        (b"CONNECT vsock:5000 HTTP/1.1\r\n\r\n", b"403"),
        (b"CONNECT unix:/run/x HTTP/1.1\r\n\r\n", b"403"),
        (b"CONNECT localhost:99999 HTTP/1.1\r\n\r\n", b"400"),
        (b"CONNECT localhost.:1 HTTP/1.1\r\n\r\n", b"403"),
        (b"CONNECT loc\xe4lhost:1 HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"CONNECT localhost:1 HTTP/1.1\r\n" + b"x: y\r\n" * 2000, b"431"),
        (b"CONNECT localhost:1 HTTP/1.1\r\n\r\n", b"502"),
    ],
)
def test_what_the_proxy_answers_to_the_rest(
    forward: StartForwarder, tmp_path: Path, request_head: bytes, status: bytes
) -> None:
    running, _ = proxy(forward, tmp_path, "localhost:1")
    with running.connect() as client:
        client.sendall(request_head)
        try:
            assert client.recv(64).split(b" ")[1] == status
        except ConnectionResetError:
            assert status == b"431"  # it hung up with the rest unread


def test_half_a_request_has_its_time_limit(forward: StartForwarder, tmp_path: Path) -> None:
    running, _ = proxy(forward, tmp_path, "localhost:1")
    with running.connect() as client:
        client.sendall(b"CONNECT local")
        assert rest(client) == b""
    with running.connect() as client:
        client.sendall(b"CONNECT local")
        client.shutdown(socket.SHUT_WR)
        assert rest(client) == b""
    assert running.stats.unreachable == 2


def test_bytes_behind_the_request_are_not_lost(forward: StartForwarder, tmp_path: Path) -> None:
    with Peer(echo) as peer:
        running, _ = proxy(forward, tmp_path, peer.address)
        with running.connect() as client:
            client.sendall(f"CONNECT {peer.address} HTTP/1.1\r\n\r\nearly".encode())
            client.shutdown(socket.SHUT_WR)
            assert rest(client) == b"HTTP/1.1 200 Connection established\r\n\r\nearly"
