from __future__ import annotations

import hashlib
import importlib.util
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.gguf import facts_of, parse_metadata, tokenizer_digest
from appliance.errors import BootError
from client_sdk.wire import cbor

_spec = importlib.util.spec_from_file_location("gguf_files", Path(__file__).with_name("gguf_files.py"))
assert _spec is not None
assert _spec.loader is not None
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

GOOD: bytes = build.file()


def test_metadata_and_facts() -> None:
    metadata = parse_metadata(GOOD)
    assert metadata == build.MINIMAL
    facts = facts_of(metadata)
    assert facts.architecture == "llama"
    assert facts.training_context_length == 64
    chosen = {
        key: item
        for key, item in build.MINIMAL.items()
        if key.startswith("tokenizer.") and key != "tokenizer.chat_template"
    }
    assert facts.tokenizer_digest == hashlib.sha256(cbor.encode(chosen)).digest()
    assert facts.chat_template_digest == hashlib.sha256(b"{{ messages[0].content }}").digest()


def test_a_configured_template_replaces_the_models_and_only_its_digest() -> None:
    plain, replaced = facts_of(parse_metadata(GOOD)), facts_of(parse_metadata(GOOD), chat_template="other")
    assert replaced.chat_template == "other"
    assert replaced.chat_template_digest == hashlib.sha256(b"other").digest()
    assert replaced.tokenizer_digest == plain.tokenizer_digest


def test_a_model_without_a_template_has_no_digest_of_one() -> None:
    pairs = {key: item for key, item in build.MINIMAL.items() if key != "tokenizer.chat_template"}
    assert facts_of(parse_metadata(build.file(pairs))).chat_template_digest is None


def test_version_2_reads_alike() -> None:
    assert parse_metadata(build.file(version=2)) == parse_metadata(GOOD)


def huge(offset: int) -> bytes:
    return GOOD[:offset] + struct.pack("<Q", 2**63) + GOOD[offset + 8 :]


ONE = {"general.architecture": "llama"}
HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + build.string("k")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (build.file(magic=b"GGJT"), "wrong magic"),
        (build.file(version=1), "version 1"),
        (build.file(version=3 << 24), "version"),
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
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (build.string("k") + build.value(1)) * 2, "twice"),
        (b"", "past its end"),
    ],
)
def test_b165_malformed_metadata_is_named(data: bytes, message: str) -> None:
    with pytest.raises(BootError, match=message):
        parse_metadata(data)


@pytest.mark.parametrize("key", ["general.architecture", "llama.context_length"])
def test_needed_keys(key: str) -> None:
    pairs = {name: item for name, item in build.MINIMAL.items() if name != key}
    with pytest.raises(BootError, match=key.replace("llama", ".*")):
        facts_of(parse_metadata(build.file(pairs)))
    with pytest.raises(BootError):
        facts_of(parse_metadata(build.file(build.MINIMAL | {key: [1]})))


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
