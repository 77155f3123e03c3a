"""The simulated appliance on a real socket: TLS 1.3 with the exporter, HTTP/1.1, one thread per connection.

Honest by default. A test overrides one thing: `options` of the next answers, `edit_response` of what goes over the
wire, `edit_bundle` of the attestation; or it restarts the appliance with new keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from OpenSSL import SSL

from appliance.listener.certificates import CertificateRotator
from client_sdk.appraisal.verifier import ChannelFacts
from client_sdk.receipts.verify import Exchange
from client_sdk.wire import digests, names
from client_sdk.wire.attestation import AttestationRequest
from client_sdk.wire.stream import encode_base64url
from tests.simulators.insecure_appliance import Connection, InsecureAppliance, Options, same


@dataclass(frozen=True, kw_only=True)
class SeenRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int


LATER_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Response:
    """`chunks` are sent with chunked coding; `cut` closes the connection instead of ending it. `trailing` follows the
    answer at once, `later` when the client has had time to read it."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    chunks: tuple[bytes, ...] | None = None
    cut: bool = False
    pause_s: float = 0.0
    trailing: bytes = b""
    later: bytes = b""

    def without(self, name: str) -> Response:
        return replace(self, headers=tuple(item for item in self.headers if item[0] != name))

    def having(self, name: str, value: str) -> Response:
        return replace(self, headers=(*self.headers, (name, value)))

    def header(self, name: str) -> str:
        return dict(self.headers)[name]


class _Hung(Exception):
    """The connection is to be closed without an answer."""


class _Simulator(InsecureAppliance):
    raw_body: bytes = b""

    def _head(self, body: bytes, *rest: Any) -> Exchange:
        return super()._head(self.raw_body, *rest)


@dataclass
class _Live:
    number: int
    tls: SSL.Connection
    sock: socket.socket
    spki: bytes
    state: Connection | None = None


@dataclass
class WiredAppliance:
    options: Options = field(default_factory=Options)
    edit_response: Callable[[Response], Response] = same
    edit_bundle: Callable[[bytes], bytes] = same
    attestation_response: Response | None = None
    receipt_in_header: bool = True
    pending_fetches: int = 0
    hang_up_on_inference: bool = False
    seen: list[SeenRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._live: list[_Live] = []
        self._threads: list[threading.Thread] = []
        self._receipts: dict[str, bytes] = {}
        self._claims: dict[bytes, bytes] = {}
        self.connections = 0
        self._boot("appliance")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"https://127.0.0.1:{self.port}"
        self._spawn(self._accept)

    def __enter__(self) -> WiredAppliance:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join(5)

    @property
    def inference(self) -> list[SeenRequest]:
        return [seen for seen in self.seen if seen.method == "POST" and seen.path != names.PATH_ATTESTATION]

    @property
    def attestations(self) -> list[AttestationRequest]:
        return [AttestationRequest.parse(seen.body) for seen in self.seen if seen.path == names.PATH_ATTESTATION]

    def restart(self, label: str, *, drop: bool = True) -> None:
        """New keys, new boot; the connections of the old one are closed."""
        with self._lock:
            self._boot(label)
        if drop:
            self.drop_connections()

    def drop_connections(self) -> None:
        with self._lock:
            live, self._live = self._live, []
        for connection in live:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _boot(self, label: str) -> None:
        self.simulator = _Simulator(label)
        self._claims.clear()
        rotator = CertificateRotator(self.simulator.tls_private, now=time.time, random_bytes=os.urandom)
        self._context = rotator.context()
        self._spki = self.simulator.spki

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                live = _Live(self.connections, SSL.Connection(self._context, sock), sock, self._spki)
                self._live.append(live)
            self._spawn(self._serve, live)

    def _serve(self, live: _Live) -> None:
        live.tls.set_accept_state()
        with contextlib.suppress(SSL.Error, OSError, _Hung):
            live.tls.do_handshake()
            buffer = b""
            while True:
                while b"\r\n\r\n" not in buffer:
                    buffer += live.tls.recv(65536)
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                method, path, _ = first.split(" ")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                length = int(headers.get("content-length", "0"))
                while len(buffer) < length:
                    buffer += live.tls.recv(65536)
                body, buffer = buffer[:length], buffer[length:]
                request = SeenRequest(method=method, path=path, headers=headers, body=body, connection=live.number)
                self.seen.append(request)
                self._send(live, self._route(request, live))
        with contextlib.suppress(SSL.Error, OSError):
            live.tls.shutdown()
        live.sock.close()

    def _send(self, live: _Live, response: Response) -> None:
        lines = [f"HTTP/1.1 {response.status} X", *(f"{name}: {value}" for name, value in response.headers)]
        if response.chunks is None:
            head = "\r\n".join([*lines, f"content-length: {len(response.body)}", "", ""]).encode("latin-1")
            live.tls.sendall(head + response.body + response.trailing)
            if response.later:
                time.sleep(LATER_S)
                live.tls.sendall(response.later)
            return
        live.tls.sendall("\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode("latin-1"))
        for chunk in response.chunks:
            live.tls.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            time.sleep(response.pause_s)
        if response.cut:
            raise _Hung
        live.tls.sendall(b"0\r\n\r\n" + response.trailing)

    def _route(self, request: SeenRequest, live: _Live) -> Response:
        with self._lock:
            self.simulator.now = time.time()
            if request.path == names.PATH_ATTESTATION:
                return self._attest(request, live)
            if request.method == "GET":
                return self.edit_response(self._get(request.path))
            if self.hang_up_on_inference:
                raise _Hung
            return self.edit_response(self._infer(request, live))

    def _attest(self, request: SeenRequest, live: _Live) -> Response:
        if self.attestation_response is not None:
            return self.attestation_response
        asked = AttestationRequest.parse(request.body)
        exported = live.tls.export_keying_material(b"Attestation", 32, asked.nonce)
        connection = Connection(channel=ChannelFacts(spki=live.spki, exported=exported))
        if asked.have is not None and asked.have in self._claims:
            binder = digests.channel_binder(live.spki, exported)
            live.state = replace(connection, attestation=asked.have, binder=binder)
            bundle = self.simulator.continued(asked.nonce, connection, asked.have)
        else:
            live.state = self.simulator.attested(asked.nonce, connection)
            assert live.state.attestation is not None
            self._claims[live.state.attestation] = asked.nonce
            bundle = self.simulator.bundle(asked.nonce, connection)
        return Response(headers=(("content-type", names.MEDIA_CBOR),), body=self.edit_bundle(bundle))

    def _get(self, path: str) -> Response:
        json_type = ("content-type", names.MEDIA_JSON)
        if not path.startswith(names.PATH_RECEIPTS):
            return Response(headers=(json_type,), body=b'{"object":"list","data":[]}')
        if self.pending_fetches > 0:
            self.pending_fetches -= 1
            return Response(status=409, headers=(json_type,), body=b"{}")
        receipt = self._receipts.get(path.removeprefix(names.PATH_RECEIPTS))
        if receipt is None:
            return Response(status=404, headers=(json_type,), body=b"{}")
        return Response(headers=(("content-type", names.MEDIA_COSE),), body=receipt)

    def _infer(self, request: SeenRequest, live: _Live) -> Response:
        assert live.state is not None
        fields = json.loads(request.body)
        self.simulator.raw_body = request.body
        nonce = bytes.fromhex(request.headers[names.HEADER_INFERENCE_NONCE])
        if fields.get("stream"):
            stream = self.simulator.stream(fields, live.state, route=request.path, nonce=nonce, options=self.options)
            assert stream.head.receipt_id is not None
            headers = (
                ("content-type", "text/event-stream; charset=utf-8"),
                (names.HEADER_RECEIPT_ID, stream.head.receipt_id.hex()),
            )
            return Response(headers=headers, chunks=tuple(block.raw for block in stream.blocks))
        answer = self.simulator.answer(fields, live.state, route=request.path, nonce=nonce, options=self.options)
        assert answer.exchange.receipt_id is not None
        receipt_id = answer.exchange.receipt_id.hex()
        self._receipts[receipt_id] = answer.receipt
        response = Response(
            status=self.options.http_status,
            headers=(("content-type", names.MEDIA_JSON), (names.HEADER_RECEIPT_ID, receipt_id)),
            body=answer.body,
        )
        if not self.receipt_in_header:
            return response
        return response.having(names.HEADER_EXECUTION_RECEIPT, encode_base64url(answer.receipt).decode())
