"""The model of a comparison, from the catalogue or a file, as it is or in another format; what a token of it costs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf

from appliance.models.catalogue import CATALOGUE
from appliance.models.manifest import ModelFacts
from appliance.models.store import ModelStore, default_store_root
from tests.bench.harness import ROOT, environment
from tests.bench.peer_build import cache_directory

_FILE_TYPES = {3: "Q4_1", 7: "Q8_0", 15: "Q4_K_M"}
# Gemma 3: five layers that look back 512 tokens, then one that looks back to the beginning.
_GLOBAL_LAYERS = {"gemma3": 6}

_REQUANTISE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize, params.nthread = 7, True, 1
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model in a store. Counts are of one token: multiply-adds of the layers and of the output matrix.

    `bytes_read` are the weights that an evaluation reads, `global_bytes` and `local_bytes` the keys and values that a
    token adds in layers that look back to the beginning, and in those that look back `window` tokens.
    """

    name: str
    path: Path
    form: str
    layer_products: int
    output_products: int
    bytes_read: int
    global_bytes: int
    local_bytes: int
    window: int

    def cache_bytes(self, context: int) -> int:
        """Of keys and values that a token reads behind `context` others."""
        return context * self.global_bytes + min(context, self.window) * self.local_bytes


def chosen(name_or_file: str, *, requantised: bool) -> Weights:
    """The model, installed: one of the catalogue into the user's store, any other file into the benchmarks' own.

    From then on this process, and the appliances that it starts, have the store in which it lies. Raises SystemExit
    for a name that is not known, and where terms were not agreed to yet.
    """
    given = Path(name_or_file)
    is_file = given.suffix == ".gguf" or given.is_file()
    if not is_file:
        given = _pulled(name_or_file)
    if requantised:
        given = _requantised(given)
    if not is_file and not requantised:
        return described(name_or_file, given)
    digest = hashlib.sha256(given.read_bytes()).hexdigest()
    name = f"bench-{digest[:16]}"
    os.environ["XDG_DATA_HOME"] = str(cache_directory() / "data")
    store = ModelStore(default_store_root(os.environ["XDG_DATA_HOME"], None))
    if name not in store.names():
        size = given.stat().st_size
        store.add(given, ModelFacts(name=name, sha256=bytes.fromhex(digest), size=size, licence="", source=given.name))
    return described(name, store.verify(name).paths[0])


def described(name: str, path: Path) -> Weights:
    reader = gguf.GGUFReader(str(path))

    def number(key: str) -> int:
        field = reader.fields.get(key)
        return 0 if field is None else int(field.contents())

    architecture = str(reader.fields["general.architecture"].contents())
    products = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors if len(tensor.shape) == 2}
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    output = "output.weight" if "output.weight" in sizes else "token_embd.weight"
    layers = number(f"{architecture}.block_count")
    heads = number(f"{architecture}.attention.head_count")
    kept = number(f"{architecture}.attention.head_count_kv") or heads
    width = number(f"{architecture}.embedding_length")
    keys = number(f"{architecture}.attention.key_length") or width // heads
    values = number(f"{architecture}.attention.value_length") or keys
    period = _GLOBAL_LAYERS.get(architecture, 1)
    row = 2 * kept * (keys + values)  # of halves
    file_type = number("general.file_type")
    return Weights(
        name=name,
        path=path,
        form=_FILE_TYPES.get(file_type, gguf.LlamaFileType(file_type).name),
        layer_products=sum(count for tensor, count in products.items() if tensor.startswith("blk.")),
        output_products=products[output],
        bytes_read=sum(size for tensor, size in sizes.items() if tensor.startswith("blk.") or tensor == output),
        global_bytes=layers // period * row,
        local_bytes=(layers - layers // period) * row,
        window=number(f"{architecture}.attention.sliding_window"),
    )


def _pulled(name: str) -> Path:
    store = ModelStore(default_store_root(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME")))
    if name not in store.names():
        if name in CATALOGUE and CATALOGUE[name].terms is not None:
            raise SystemExit(f"it has terms to agree to: appliance models pull {name}")
        command = [sys.executable, "-m", "appliance", "models", "pull", name]
        if subprocess.run(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
            raise SystemExit(f"no GGUF file and no model that the store or the catalogue has: {name}")
    return store.verify(name).paths[0]


def _requantised(source: Path) -> Path:
    """The same model in Q8_0, in the cache."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    made = cache_directory() / "models" / f"{digest[:16]}-q8_0.gguf"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        partial = made.with_suffix(".partial")
        command = [sys.executable, "-c", _REQUANTISE, str(source), str(partial)]
        quiet = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        if quiet.returncode:
            raise SystemExit(f"llama.cpp cannot requantise {source.name}:\n{quiet.stderr[-2000:]}")
        partial.rename(made)
    return made
