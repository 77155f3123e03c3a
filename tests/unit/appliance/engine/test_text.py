from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.text import TextAssembler


def run(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    assembler = TextAssembler(stops)
    deltas = []
    for piece in pieces:
        deltas.append(assembler.feed(piece))
        if assembler.stopped:
            break
    deltas.append(assembler.finish())
    return deltas, assembler.stopped


def cut(data: bytes, at: list[int]) -> list[bytes]:
    points = sorted({point % (len(data) + 1) for point in at} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(points)]


def reference(text: str, stops: tuple[str, ...]) -> str:
    """Character by character: the answer ends before the first stop string that is complete, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 family", "日本語のテキスト", "안녕하세요", "naïve café"])
def test_b100_one_byte_per_token(text: str) -> None:
    deltas, _ = run([bytes([byte]) for byte in text.encode()])
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_b100_incomplete_tail_becomes_one_replacement_mark() -> None:
    assert run([b"ok ", "🙂".encode()[:3]]) == (["ok ", "", "\ufffd"], False)


@given(st.binary(max_size=60), st.lists(st.integers(0, 1000), max_size=20))
def test_any_bytes_any_cut_equal_the_whole_decoding(data: bytes, at: list[int]) -> None:
    assert "".join(run(cut(data, at))[0]) == data.decode("utf-8", "replace")


@given(
    st.text("ab🙂", max_size=30),
    st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=20),
)
def test_b120_stop_strings_do_not_depend_on_the_cut(text: str, stops: list[str], at: list[int]) -> None:
    deltas, stopped = run(cut(text.encode(), at), tuple(stops))
    expected = reference(text, tuple(stops))
    assert "".join(deltas) == expected
    assert stopped == (expected != text)


@given(st.text("abc", max_size=30), st.text("abc", min_size=1, max_size=4))
def test_released_text_is_never_taken_back(text: str, stop: str) -> None:
    assembler = TextAssembler((stop,))
    out = ""
    for character in text:
        out += assembler.feed(character.encode())
        assert stop not in out
        assert text.startswith(out)


def test_partial_stop_is_held_then_released() -> None:
    assert run([b"a EN", b"D", b"X"], ("ENDE",)) == (["a ", "", "ENDX", ""], False)
