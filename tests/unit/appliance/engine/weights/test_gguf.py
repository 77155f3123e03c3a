from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.weights.gguf import facts_of, parse_metadata, parse_tensors, tokenizer_digest
from appliance.engine.weights.tensor_types import read_tensor_types, uncovered
from appliance.errors import BootError
from client_sdk.wire import cbor


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: object) -> bytes:
    """Type code and encoding of a value: str, int (u32), float (f32), bool or a list of these."""
    match item:
        case bool():
            return struct.pack("<IB", 7, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case list():
            inner = [value(each) for each in item]
            kind = inner[0][:4] if inner else struct.pack("<I", 4)
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(item)) + b"".join(each[4:] for each in inner)
    raise TypeError(type(item))


MINIMAL: dict[str, object] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "<|end|>"],
    "tokenizer.ggml.scores": [0.5, -1.0, 0.0],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


def gguf(pairs: dict[str, object] | None = None, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    chosen = MINIMAL if pairs is None else pairs
    body = b"".join(string(key) + value(item) for key, item in chosen.items())
    return magic + struct.pack("<IQQ", version, 0, len(chosen)) + body


GOOD: bytes = gguf()


def test_metadata_and_facts() -> None:
    metadata = parse_metadata(GOOD)
    assert metadata == MINIMAL
    facts = facts_of(metadata)
    assert facts.architecture == "llama"
    assert facts.training_context_length == 64
    chosen = {
        key: item for key, item in MINIMAL.items() if key.startswith("tokenizer.") and key != "tokenizer.chat_template"
    }
    assert facts.tokenizer_digest == hashlib.sha256(cbor.encode(chosen)).digest()
    assert facts.chat_template_digest == hashlib.sha256(b"{{ messages[0].content }}").digest()


def test_a_configured_template_replaces_the_models_and_only_its_digest() -> None:
    plain, replaced = facts_of(parse_metadata(GOOD)), facts_of(parse_metadata(GOOD), chat_template="other")
    assert replaced.chat_template == "other"
    assert replaced.chat_template_digest == hashlib.sha256(b"other").digest()
    assert replaced.tokenizer_digest == plain.tokenizer_digest


def test_a_model_without_a_template_has_no_digest_of_one() -> None:
    pairs = {key: item for key, item in MINIMAL.items() if key != "tokenizer.chat_template"}
    assert facts_of(parse_metadata(gguf(pairs))).chat_template_digest is None


def test_version_2_reads_alike() -> None:
    assert parse_metadata(gguf(version=2)) == parse_metadata(GOOD)


def with_tensors(*tensors: tuple[str, int], dimensions: int = 2) -> bytes:
    """A file that describes tensors (name, type) and has no data."""
    described = b"".join(
        string(name) + struct.pack("<I", dimensions) + bytes(8 * dimensions) + struct.pack("<IQ", kind, 0)
        for name, kind in tensors
    )
    return GOOD[:8] + struct.pack("<Q", len(tensors)) + GOOD[16:] + described


def test_tensors_and_their_types() -> None:
    assert parse_tensors(with_tensors(("a.weight", 3), ("b.weight", 0))) == {"a.weight": 3, "b.weight": 0}
    assert parse_tensors(GOOD) == {}


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (with_tensors(("a", 0), ("a", 0)), "two tensors have one name"),
        (with_tensors(("a", 0), dimensions=5), "a tensor of 5 dimensions"),
        (with_tensors(("a", 0))[:-1], "runs past its end"),
    ],
)
def test_malformed_descriptions_of_tensors(data: bytes, what: str) -> None:
    with pytest.raises(BootError, match=what):
        parse_tensors(data)


def file_of(path: Path, data: bytes) -> int:
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY)


def test_a_type_that_nothing_computes_with_is_refused_by_name(tmp_path: Path) -> None:
    fd = file_of(tmp_path / "model.gguf", with_tensors(("blk.0.attn_q.weight", 3), ("blk.0.odd.weight", 36)))
    try:
        with pytest.raises(
            BootError, match=r"tensor blk\.0\.odd\.weight has the type 36 of ggml.*supported are F32, F16"
        ):
            read_tensor_types(fd)
    finally:
        os.close(fd)


def test_types_without_kernels_are_served_and_named(tmp_path: Path) -> None:
    fd = file_of(tmp_path / "model.gguf", with_tensors(("a", 12), ("b", 0), ("c", 21), ("d", 26)))
    try:
        types = read_tensor_types(fd)
    finally:
        os.close(fd)
    assert uncovered(types) == ("IQ3_S",)
    assert uncovered(types - {21}) == ()


def huge(offset: int) -> bytes:
    return GOOD[:offset] + struct.pack("<Q", 2**63) + GOOD[offset + 8 :]


ONE = {"general.architecture": "llama"}
HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf(magic=b"GGJT"), "wrong magic"),
        (gguf(version=1), "version 1"),
        (gguf(version=3 << 24), "version"),
        (huge(8), "tensors"),
        (huge(16), "metadata pairs"),
        (huge(24), "bytes in one string"),
        (HEAD + struct.pack("<I", 13), "unknown metadata type 13"),
        (HEAD + struct.pack("<IB", 7, 2), "neither 0 nor 1"),
        (HEAD + struct.pack("<IIQ", 9, 8, 2**40), "array elements"),
        (HEAD + struct.pack("<IIQ", 9, 8, 3) + b"\xff" * 8, "past its end"),
        (HEAD + struct.pack("<IIQ", 9, 4, 100), "past its end"),
        (HEAD + struct.pack("<IIQ", 9, 9, 1) * 6, "malformed"),
        (HEAD + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5, "nested deeper"),
        (HEAD + struct.pack("<IQ", 8, 1) + b"\xff", "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (string("k") + value(1)) * 2, "twice"),
        (b"", "past its end"),
    ],
)
def test_b165_malformed_metadata_is_named(data: bytes, message: str) -> None:
    with pytest.raises(BootError, match=message):
        parse_metadata(data)


@pytest.mark.parametrize("key", ["general.architecture", "llama.context_length"])
def test_needed_keys(key: str) -> None:
    pairs = {name: item for name, item in MINIMAL.items() if name != key}
    with pytest.raises(BootError, match=key.replace("llama", ".*")):
        facts_of(parse_metadata(gguf(pairs)))
    with pytest.raises(BootError):
        facts_of(parse_metadata(gguf(MINIMAL | {key: [1]})))


def test_a_score_that_is_no_number_has_no_digest() -> None:
    with pytest.raises(BootError, match="no digest"):
        tokenizer_digest({"tokenizer.ggml.scores": [float("nan")]})


@settings(max_examples=300)
@given(st.data())
def test_mutated_headers_parse_or_raise_boot_error(data: st.DataObject) -> None:
    mutated = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(mutated)))
    try:
        facts_of(parse_metadata(bytes(mutated[:cut])))
    except BootError:
        pass


@given(st.binary(max_size=300))
def test_arbitrary_bytes_after_the_magic(data: bytes) -> None:
    try:
        parse_metadata(b"GGUF\x03\x00\x00\x00" + data)
    except BootError:
        pass
