"""The arithmetic of the comparison with llama-server, and how its answers are read: no servers here."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.compare_peers import MEASURES, ROWS, Row, alternate, settings
from tests.bench.peer import find_server
from tests.bench.streams import Server

ROW = Row(name="x", unit="tokens/s", target=1.1, ours=[10.0, 11.0, 12.0], theirs=[9.0, 10.0, 30.0], busy_cores=0.0)


def test_a_ratio_is_of_the_medians() -> None:
    assert ROW.ratio == 1.1
    assert ROW.met
    assert not replace(ROW, target=1.11).met


def test_no_speed_counts_where_the_output_differs() -> None:
    assert not replace(ROW, same_output=False).met


def test_memory_may_be_theirs_and_an_allowance() -> None:
    row = replace(ROW, target=1.0, ours=[855.0], theirs=[556.0], allowance=300.0)
    assert row.met
    assert not replace(row, ours=[857.0]).met


def test_every_measure_that_is_promised_has_a_row() -> None:
    targets = {name: target for name, (_, _, target) in MEASURES.items()}
    assert targets == {
        "1-stream": 1.00,
        "4-streams": 1.05,
        "8-streams": 1.10,
        "16-streams-mixed": 1.10,
        "shared-prefix": 1.00,
        "during-prefill": 1.00,
    }
    assert {*ROWS} == {*targets, "memory", "own-prefix", "own-lookup"}


def test_turns_alternate_and_both_are_asked_the_same() -> None:
    asked: list[tuple[bool, int]] = []

    def work(server: Server, number: int) -> float:
        asked.append((server.tls, number))
        return float(number)

    turns = alternate(work, Server(1, tls=True), Server(2, tls=False), 3)
    assert asked == [(True, 0), (False, 0), (False, 1), (True, 1), (True, 2), (False, 2)]
    assert turns.ours == turns.theirs == [0.0, 1.0, 2.0]


def test_settings_are_taken_back() -> None:
    before = dict(os.environ)
    with settings("2", ENGINE_SPECULATION="off"):
        assert os.environ["APPLIANCE_ENGINE_THREADS"] == "2"
        assert os.environ["APPLIANCE_ENGINE_SPECULATION"] == "off"
    assert dict(os.environ) == before


def chunked(*blocks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(block), block) for block in (*blocks, b""))


def event(text: str, **more: object) -> bytes:
    frame = {"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}
    return b"data: " + json.dumps(frame, separators=(",", ":")).encode() + b"\n\n"


def test_a_stream_is_timed_and_read_through_its_chunks_and_comments() -> None:
    usage = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
    answer = chunked(event("Once") + b": p padding\n\n", event(" upon"), event(" a"), usage, b"data: [DONE]\n\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        timing = Server(listener.getsockname()[1], tls=False).stream("Hi", 3)
        thread.join()
    assert timing.tokens == 3
    assert timing.digest == hashlib.sha256(b"Once upon a").hexdigest()
    assert 0 < timing.first_s <= timing.last_s


def test_the_binary_is_found_past_its_launcher_and_its_links_are_made(tmp_path: Path) -> None:
    binaries, scripts = tmp_path / "package" / "bin", tmp_path / "bin"
    binaries.mkdir(parents=True)
    scripts.mkdir()
    (scripts / "llama-server").write_text("#!python")
    (binaries / "llama-server").write_bytes(b"\x7fELF")
    (binaries / "libx.so.1.2").write_bytes(b"")
    (binaries / "_symlinks.json").write_text(json.dumps({"libx.so": "libx.so.1", "libx.so.1": "libx.so.1.2"}))
    for _ in range(2):
        found = find_server(tmp_path)
        assert found == binaries / "llama-server"
        assert os.access(found, os.X_OK)
        assert (binaries / "libx.so").resolve() == binaries / "libx.so.1.2"
    with pytest.raises(SystemExit, match="no llama-server"):
        find_server(scripts)
