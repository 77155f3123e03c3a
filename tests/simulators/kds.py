"""A vendor's service on loopback (AMD's or Intel's, by its documents): TLS of its own, and lies on request."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

Lie = Callable[[http.server.BaseHTTPRequestHandler], None]


class KeyService:
    """`documents` and `headers` are what it has, by path without query; `lie` answers in their place.

    `asked` has what was asked for, in order.
    """

    def __init__(self, directory: Path) -> None:
        self.documents: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.lie: Lie | None = None
        self.asked: list[str] = []
        identity = write_identity(directory / "kds.pem")
        self.tls = ssl.create_default_context(cafile=str(identity))
        here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        here.load_cert_chain(identity)
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.socket = here.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.port = self._server.server_port
        self.url = f"https://localhost:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Handler(http.server.BaseHTTPRequestHandler):
    service: KeyService

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.service.asked.append(self.path)
        if self.service.lie is not None:
            with contextlib.suppress(OSError):
                self.service.lie(self)
            return
        status = 200 if path in self.service.documents else 404
        answer(self, status, self.service.documents.get(path, b""), **self.service.headers.get(path, {}))

    def log_message(self, *_: object) -> None:
        pass


def answer(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"content-length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@contextlib.contextmanager
def running(directory: Path) -> Iterator[KeyService]:
    service = KeyService(directory)
    try:
        yield service
    finally:
        service.close()


def write_identity(path: Path) -> Path:
    """Certificate and key of "localhost", self-signed: who trusts the file trusts whoever has it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    extensions: tuple[Any, ...] = (
        x509.SubjectAlternativeName([x509.DNSName("localhost")]),
        x509.BasicConstraints(ca=True, path_length=0),
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM) + private)
    return path
