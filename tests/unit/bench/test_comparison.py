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

from tests import tiny_models
from tests.bench import peer_build
from tests.bench.compare_peers import ROWS, Ceiling, Row, alternate, rows_of, settings
from tests.bench.machine import processor
from tests.bench.peer_models import Weights, described
from tests.bench.peer_work import MEASURES, Figures, Prompts, assert_new, pieces
from tests.bench.streams import Server, Timing

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


WEIGHTS = Weights(
    name="w",
    path=Path("w.gguf"),
    form="Q4_1",
    layer_products=100,
    output_products=10,
    bytes_read=70,
    global_bytes=2,
    local_bytes=3,
    window=5,
)
TIMING = Timing(first_s=0.5, last_s=1.5, tokens=11, prompt_tokens=1000, cached=16, digest="")


def test_every_measure_that_is_promised_has_a_row_and_a_target_for_each_format() -> None:
    targets = {name: measure.targets for name, measure in MEASURES.items()}
    as_before = (1.00, 1.00, 1.00)
    prompts = (1.2, 1.1, 1.2)
    assert targets == {
        "1-stream": (1.10, 1.00, 1.05),
        "1-stream-sampled": (1.10, 1.00, 1.05),
        "4-streams": (1.5, 1.3, 1.5),
        "8-streams": (1.8, 1.5, 1.8),
        "16-streams-mixed": (1.5, 1.3, 1.5),
        "behind-1000": (1.5, 1.5, 1.5),
        "behind-3000": (1.5, 1.5, 1.5),
        "new-500": prompts,
        "new-1000": prompts,
        "new-3000": prompts,
        "4-long-prompts": prompts,
        "shared-prefix": as_before,
        "during-prefill": as_before,
    }
    assert {*ROWS} == {*targets, "memory", "own-prefix", "own-lookup"}
    assert sorted(name for piece in pieces(Prompts(20.0)) for name in piece.measures) == sorted(targets)
    assert [MEASURES["8-streams"].target(form) for form in ("Q8_0", "Q4_K_M", "Q6_K")] == [1.8, 1.5, 1.5]


def test_a_share_of_the_peak_is_what_a_figure_costs_over_what_the_cores_do() -> None:
    ceiling = Ceiling(weights=WEIGHTS, read=1000.0, operations=4000.0)
    read, operations = ceiling.shares(MEASURES["behind-1000"], 2.0) or (0.0, 0.0)
    assert read == pytest.approx(2.0 * (70 + 2 * 1024 + 3 * 5) / 1000)
    assert operations == pytest.approx(2.0 * 2 * 110 / 4000)
    read, operations = ceiling.shares(MEASURES["new-1000"], 2.0) or (0.0, 0.0)
    assert read == pytest.approx(2.0 * 70 * 2 / 1000)
    assert operations == pytest.approx(2.0 * 2 * (100 * 1000 + 10) / 4000)
    assert ceiling.shares(MEASURES["during-prefill"], 1.0) is None
    assert replace(ROW, peak=(0.25, 0.5)).peak_shown == "50%i"
    assert replace(ROW, peak=(0.75, 0.5)).peak_shown == "75%b"


def test_what_a_token_costs_is_read_from_the_file() -> None:
    found = described("tiny", tiny_models.path("Q8_0"))
    width, inner, kept = tiny_models.WIDTH, tiny_models.INNER, tiny_models.WIDTH // 4
    assert found.layer_products == 2 * (2 * width * width + 2 * kept * width + 3 * width * inner)
    assert found.output_products == 512 * width
    matrices = (found.layer_products + found.output_products) * 34 // 32
    norms = 4 * width * 4
    assert found.bytes_read == matrices + norms
    assert found.cache_bytes(10) == 10 * 2 * 2 * (2 * kept)


def test_prompts_are_new_from_their_first_words_and_about_as_long_as_asked() -> None:
    prompts = Prompts(19.5)
    one, again, other = (prompts.new(name, 1000) for name in ("1000 1", "1000 1", "1000 2"))
    assert one == again
    assert (one[:7], other[:7]) == ("1000 1:", "1000 2:")
    assert not set(one.split(". ")[:-1]) & set(other.split(". ")[:-1])
    assert one.count(".") == 50
    assert len(set(one.split(". "))) == 51


def test_a_prompt_that_was_kept_is_no_new_one() -> None:
    assert_new(TIMING)
    with pytest.raises(SystemExit, match="17 of 1000"):
        assert_new(replace(TIMING, cached=17))


def test_a_stream_of_one_token_has_no_speed() -> None:
    assert TIMING.decode == 10.0
    with pytest.raises(SystemExit, match="first token"):
        _ = replace(TIMING, tokens=1).decode


def test_one_request_gives_several_rows_and_our_own_comparison() -> None:
    piece = next(piece for piece in pieces(Prompts(20.0)) if "shared-prefix" in piece.measures)
    figures = {"new-1000": 0.5, "behind-1000": 30.0, "shared-prefix": 20.0}
    asked: list[int] = []

    def work(server: Server, number: int) -> Figures:
        asked.append(number)
        return figures

    turns = alternate(work, Server(1, tls=True), Server(2, tls=False), 2)
    ceiling = Ceiling(weights=WEIGHTS, read=1e9, operations=1e9)
    found = {row.name: row for row in rows_of(piece, turns, 0.0, ceiling)}
    assert asked == [0, 0, 1, 1]
    assert set(found) == {*figures, "own-prefix"}
    assert found["own-prefix"].ratio == 40.0
    assert found["own-prefix"].target == 8.0


def test_turns_alternate_and_both_are_asked_the_same() -> None:
    asked: list[tuple[bool, int]] = []

    def work(server: Server, number: int) -> Figures:
        asked.append((server.tls, number))
        return {"x": float(number)}

    turns = alternate(work, Server(1, tls=True), Server(2, tls=False), 3)
    assert asked == [(True, 0), (False, 0), (False, 1), (True, 1), (True, 2), (False, 2)]
    assert turns.of("x") == ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])


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
    counted = b'{"completion_tokens":3,"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}'
    usage = b'data: {"choices":[],"usage":' + counted + b"}\n\n"
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
    assert (timing.tokens, timing.prompt_tokens, timing.cached) == (3, 9, 4)
    assert timing.digest == hashlib.sha256(b"Once upon a").hexdigest()
    assert 0 < timing.first_s <= timing.last_s


def test_the_processor_is_named_with_what_kernels_choose_by() -> None:
    found = processor()
    assert found.name
    assert found.cores == len(
        [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:9] == "processor"]
    )
    assert ("avx2" in found.features) == (" avx2 " in Path("/proc/cpuinfo").read_text())


def test_without_clang_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="apt-get install clang-16 libomp-16-dev"):
        peer_build.compiler()


def test_a_build_is_kept_by_compiler_and_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clang = tmp_path / "clang-16"
    clang.write_text("#!/bin/sh\necho ${CLANG_VERSION}\n")
    clang.chmod(0o755)
    here = processor()
    keys = set()
    for version, where in (("16.0.6", here), ("16.0.7", here), ("16.0.6", replace(here, name="another"))):
        monkeypatch.setenv("CLANG_VERSION", version)
        keys.add(peer_build.key(str(clang), where))
    assert len(keys) == 3
    assert all(key.startswith("clang-16-") for key in keys)
