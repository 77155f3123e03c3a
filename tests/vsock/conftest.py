"""The two programs over every way that is not TCP: unix sockets and an emulated hybrid vsock here, real AF_VSOCK inside
the guest that `make vsock-test` boots."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from client_sdk import Policy
from tests.e2e import programs
from tests.e2e.programs import SLOW, environment, make_policy, wait_for
from tests.simulators.hybrid_muxer import HybridMuxer

IN_GUEST = os.environ.get("VSOCK_TEST_GUEST") == "1"
WAYS = ("vsock",) if IN_GUEST else ("unix", "hybrid")
MODEL = os.environ.get("VSOCK_TEST_MODEL") or programs.MODEL
PORT, PLAIN_PORT = 5000, 5001
START_LIMIT_S = 120.0 * SLOW
# Pinned, and short: some of the peers here stall on purpose.
SETTINGS = {"APPLIANCE_LIMITS_HANDSHAKE_S": str(4 * SLOW)}


@dataclass
class Program:
    """A running `appliance ...`, whose log says `ready` once it serves."""

    log: Path
    arguments: Sequence[str]
    ready: str = r"Serving .*Stop with"
    environ: Mapping[str, str] = field(default_factory=dict)

    def __enter__(self) -> Program:
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "appliance", *self.arguments]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment({**SETTINGS, **self.environ})
            )
        self.found = wait_for(self._serving, limit_s=START_LIMIT_S, what=f"{self.arguments[0]} serves")
        return self

    def _serving(self) -> re.Match[str] | None:
        assert self.process.poll() is None, self.output()
        return re.search(self.ready, self.output(), re.DOTALL)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise

    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One appliance: `url` for its clients, `plain_url` of its listener without TLS, `to` for a forwarder."""

    way: str
    url: str
    plain_url: str
    to: str
    program: Program


def serve_arguments(*listen: str, plain: str = "") -> list[str]:
    arguments = ["serve", "--model", MODEL, "--attester", "insecure"]
    for entry in listen:
        arguments += ["--listen", entry]
    return [*arguments, *(["--unsafe-plain-http-listen", plain] if plain else [])]


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> str:
    """The model is in the store; the guest sees the store of the host, and cannot write to it."""
    if not IN_GUEST:
        request.getfixturevalue("smollm2")
    return MODEL


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v")


@pytest.fixture(scope="session")
def policy_file(directory: Path, model: str) -> Path:
    both = ("--model", model, "--attester", "insecure", "--listen", "unix:/a", "--unsafe-plain-http-listen", "unix:/b")
    return make_policy(directory / "policy", both, SETTINGS)


@pytest.fixture(scope="session")
def policy(policy_file: Path) -> Policy:
    return Policy.load(policy_file)


@pytest.fixture(scope="session", params=WAYS)
def place(request: pytest.FixtureRequest, directory: Path, model: str) -> Iterator[Place]:
    """An appliance that is reached in this way and in no other."""
    way = request.param
    with ExitStack() as stack:
        if way == "vsock":
            program = stack.enter_context(
                Program(directory / "vsock.log", serve_arguments(f"vsock:{PORT}", plain=f"vsock:{PLAIN_PORT}"))
            )
            yield Place(
                way=way,
                url=f"vsock://1:{PORT}",
                plain_url=f"vsock://1:{PLAIN_PORT}",
                to=f"vsock:1:{PORT}",
                program=program,
            )
            return
        inner, plain = directory / f"{way}.sock", directory / f"{way}.plain"
        arguments = serve_arguments(f"unix:{inner}", plain=f"unix:{plain}")
        program = stack.enter_context(Program(directory / f"{way}.log", arguments))
        if way == "unix":
            yield Place(
                way=way, url=f"unix://{inner}", plain_url=f"unix://{plain}", to=f"unix:{inner}", program=program
            )
            return
        muxer = stack.enter_context(HybridMuxer(directory / "v.sock", {PORT: inner, PLAIN_PORT: plain}))
        yield Place(
            way=way,
            url=f"vsock+unix://{muxer.path}:{PORT}",
            plain_url=f"vsock+unix://{muxer.path}:{PLAIN_PORT}",
            to=f"vsock+unix:{muxer.path}:{PORT}",
            program=program,
        )


@pytest.fixture
def forwarded(place: Place, tmp_path: Path) -> Iterator[str]:
    """The URL of a forwarder on TCP in front of the appliance."""
    arguments = ["vsock-forward", "--listen", "127.0.0.1:0", "--to", place.to]
    with Program(tmp_path / "forward.log", arguments, ready=r"Forwarding (127\.0\.0\.1:\d+) to") as forwarder:
        yield f"https://{forwarder.found[1]}"
