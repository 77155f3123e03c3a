"""A model of two layers in every weight format: random, seeded, a few megabytes, the same bytes on every machine.

`path("Q4_K")` is a file in the user's cache, written the first time. The architecture is llama's, rows are of 512 and
1,024 weights, so that every format can hold every matrix. The tokenizer is a byte-level BPE with some English words.
What it says is noise.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt

from appliance.models.manifest import ModelFacts
from appliance.models.store import ModelStore
from tests.tiny_weights import FORMATS, Draw, matrix

WIDTH, INNER, HEADS, KV_HEADS, LAYERS, CONTEXT = 512, 1024, 8, 2, 2, 8192
VOCABULARY: Final = 512
_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = (
    "the of and to in is that it was for on are as with his they at be this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more write go see number no way could people my than "
    "first water been call who oil its now find long down day did get come made may part over new sound take only "
    "little work place year live back give most very after things our just name good sentence man think say great where"
)
SHA256: Final[Mapping[str, str]] = MappingProxyType({
    "Q4_0": "018183316427d590ec6da3f814a1ac9587d4320194a9ea6c31d24ebe8dbc724f",
    "Q4_1": "06468283cee4e98c6b5396b1e7df67b64c0bd0661359ff570a6be90e2d03d6a9",
    "Q5_0": "7c074d2a22bc13cce2a075b7b064940416b0219a60683362b96f13b4287c4bd2",
    "Q5_1": "fc2d9b13d73fe1e6c957a22175fed6a6b4060f01130c252685d6d4ac097e288a",
    "Q8_0": "6f30f89fad6f6e9d52a79f9d77d89c02f1c8721ca96d1ed65a726b2bab0ac351",
    "Q2_K": "6de4e0fe9a4568fb7a9586959062ee4dda3b4e33f40ac3de9b858b3e6428f2b6",
    "Q3_K": "4cf9f1fb59c890988fc3af9eb0796de18bae7a8c74df7ff24197d7da61ee7ca6",
    "Q4_K": "cf55c2fa1bcf99e79e08c96fd8069db615ecff53fbf7caee4cbf962caffc641f",
    "Q5_K": "383216765fa63dfbb4a50e8d9e17afa3bc3d04c6e0ea6ab12c574ee4912dc13a",
    "Q6_K": "64d124fe4344b5373b836e70fa6a5f30f3836d66e8f9292ed6acbf27ee5f54d5",
    "IQ4_NL": "f639661e60a583a2037d1c3bbd5b90dc2e9f4198f9a5a877a7aba1214300f6fa",
    "F16": "1417f1585a4241c2c7416c7fdb8bc56734f02a8269f4d954b4e4ffc32ce2038e",
    "BF16": "d40b19d6a7023de5d8c7ab476d7dcf34fabe5d8193f80569b972359c82247463",
    "F32": "10be7f7611e5b64f442bb1c836afa76942730d13942806b478383a72f6f33de0",
})  # fmt: skip


def path(form: str) -> Path:
    """The model in one of FORMATS, from the user's cache; its digest is checked, and every tensor's type."""
    base = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(base) if base else Path.home() / ".cache") / "attested-inference-tests" / "tiny"
    made = cache / f"{SHA256[form]}.gguf"
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"{form}.{os.getpid()}.partial"
        write(form, partial)
        partial.rename(made)
    assert hashlib.sha256(made.read_bytes()).hexdigest() == SHA256[form], f"{made} has other bytes"
    return made


def installed(form: str, store: ModelStore) -> str:
    """Put the model into a store; returns the name that `appliance serve --model` takes."""
    name = f"tiny-{form.lower().replace('_', '-')}"
    if name not in store.names():
        content = path(form).read_bytes()
        facts = ModelFacts(
            name=name,
            sha256=bytes.fromhex(SHA256[form]),
            size=len(content),
            licence="none",
            source="tests/tiny_models.py",
        )
        store.install([content], facts, expect=len(content))
    return name


def write(form: str, target: Path) -> None:
    kind = gguf.GGMLQuantizationType[form]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_name(f"tiny {form}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(2.0**-17)
    writer.add_vocab_size(VOCABULARY)
    _add_tokenizer(writer)
    for name, rows, columns in _matrices():
        writer.add_tensor(name, matrix(form, name, rows, columns), raw_dtype=kind)
    for name, around in _norms():
        writer.add_tensor(name, _norm(name, around))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_types(form: str, model: Path) -> None:
    """Every matrix of the file is of that format, and everything else of single floats."""
    wanted = {name: form for name, _, _ in _matrices()} | {name: "F32" for name, _ in _norms()}
    assert {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(str(model)).tensors} == wanted


def _matrices() -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns)."""
    yield "token_embd.weight", VOCABULARY, WIDTH
    yield "output.weight", VOCABULARY, WIDTH
    kept = WIDTH * KV_HEADS // HEADS
    for block in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", kept, WIDTH),
            ("attn_v", kept, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):
            yield f"blk.{block}.{name}.weight", rows, columns


def _norms() -> Iterator[tuple[str, int]]:
    """(name, what its weights are around). The last one makes some tokens likelier than others."""
    yield "output_norm.weight", 4
    for block in range(LAYERS):
        yield f"blk.{block}.attn_norm.weight", 1
        yield f"blk.{block}.ffn_norm.weight", 1


def _norm(name: str, around: int) -> npt.NDArray[np.float32]:
    return np.ldexp(Draw(name).integers(192, 320, WIDTH).astype(np.float32) * around, -8).astype(np.float32)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens, merges = _vocabulary()
    control, normal = 3, 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in _CONTROL_TOKENS else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)


def _vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: the bytes as GPT-2 spells them, then beginnings of common words, each grown by a letter."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = dict.fromkeys(printable) | dict.fromkeys(byte for byte in range(256) if byte not in printable)
    shift = 256 - len(printable)
    alphabet = {
        byte: chr(byte) if byte in printable else chr(256 + at - len(printable)) for at, byte in enumerate(spelled)
    }
    assert len(alphabet) == 256
    assert shift == 68
    tokens = [*_CONTROL_TOKENS, *(alphabet[byte] for byte in range(256))]
    merges: list[str] = []
    space = alphabet[ord(" ")]
    for word in _WORDS.split():
        for end in range(2, len(word) + 2):
            grown = (space + word)[:end]
            if grown not in tokens and len(tokens) < VOCABULARY:
                tokens.append(grown)
                merges.append(f"{grown[:-1]} {grown[-1]}")
    assert len(tokens) == VOCABULARY
    return tokens, merges


def main() -> None:
    """Print where the model lies that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    print(path(parser.parse_args().form))


if __name__ == "__main__":
    main()
