"""How far this project's arithmetic is from llama.cpp's own: logits and perplexity on the same text.

    python tests/bench/bench_quality.py [--peer NAME=DIR[,rows=N][,repack][,no-flash] ...] [--keep DIR] [--json FILE]

DIR has the libraries of another build of llama.cpp of the same version (`llama_cpp/lib` of another environment, where
llama-cpp-python was installed without native/llama_cpp). The first peer is the one that all others are compared with.
Without peers only this build's variants are compared with one another: they have to agree in every bit. With --keep
what a build was found to compute is kept in DIR, by its library and the request, and not computed again.

A row has the difference from the first peer: root mean square and maximum over the logits of every 16th position, mean
Kullback-Leibler divergence there, the share of positions with the same most probable token, and the perplexity. The
arithmetic is good enough if its distance is no larger than the largest among llama.cpp's own, and its perplexity within
0.1 %. With --exact N the first N tokens are evaluated in double precision too (tests/exact_model.py; minutes).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import llama_cpp
import numpy as np
import numpy.typing as npt

from appliance.bench.environment import describe
from tests.bench.harness import ROOT, pulled_model
from tests.bench.logits import Evaluation, log_softmax, silent, surprise
from tests.exact_model import ExactModel

REVISION = "00d93651590660f629a4c669ded4f5b56ab22eb9"
TEXTS = ("LICENSE", "docs/attestation.md", "docs/vsock.md", "docs/endorsements.md", "docs/families/tdx.md")
WINDOW = 512
EVERY = 16
PERPLEXITY_WITHIN = 0.001
WINDOWS_OF_VARIANTS = 2
INSTALLED = Path(llama_cpp.__file__).parent / "lib"
VARIANTS = ("plain", "avx2", "avx-vnni", "avx512-vnni", "amx-int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one build makes of the text, as logits.evaluate has it."""

    surprise: npt.NDArray[np.float64]
    best: npt.NDArray[np.int64]
    sample: npt.NDArray[np.float32]

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.surprise.mean()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """From one build to another. `perplexity` is the relative difference."""

    rms: float
    largest: float
    divergence: float
    same_best: float
    perplexity: float


def rms(found: Found, reference: Found) -> float:
    difference = found.sample.astype(np.float64) - reference.sample
    return float(np.sqrt((difference**2).mean()))


def distance(found: Found, reference: Found) -> Distance:
    difference = found.sample.astype(np.float64) - reference.sample
    ours, theirs = log_softmax(found.sample), log_softmax(reference.sample)
    return Distance(
        rms=rms(found, reference),
        largest=float(np.abs(difference).max()),
        divergence=float((np.exp(theirs) * (theirs - ours)).sum(axis=1).mean()),
        same_best=float((found.best == reference.best).mean()),
        perplexity=found.perplexity / reference.perplexity - 1,
    )


def text_of_the_project() -> str:
    """Documents of this repository as they were at REVISION."""
    parts = []
    for name in TEXTS:
        command = ["git", "-C", str(ROOT), "show", f"{REVISION}:{name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name} of {REVISION} is not in this clone's history: give another text with --text")
        parts.append(done.stdout)
    return "\n".join(parts)


def tokens_of(model: Path, text: str) -> list[int]:
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
    raw = text.encode()
    buffer = (llama_cpp.llama_token * len(raw))()
    vocabulary = llama_cpp.llama_model_get_vocab(loaded)
    count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), buffer, len(raw), False, False)
    llama_cpp.llama_model_free(loaded)
    return list(buffer[:count])


def variants() -> list[str]:
    """Of this project's kernels, those that this processor has: the one in use first. None in a build without them."""
    kernels = ctypes.CDLL(str(INSTALLED / "libggml-cpu.so.0"))
    if not hasattr(kernels, "attested_variant"):
        raise SystemExit("the installed llama.cpp has none of this project's kernels: there is nothing to compare")
    kernels.attested_variant.restype = ctypes.c_char_p
    kernels.attested_variant_available.restype = ctypes.c_bool
    used: str = kernels.attested_variant().decode()
    others = [name for name in VARIANTS if name not in ("plain", used)]
    return [used, *(name for name in others if kernels.attested_variant_available(name.encode()))]


def evaluated(folder: Path, chosen: Evaluation, library: Path) -> Found:
    """In a process of its own, with the libraries of the folder `library`, unless `folder` has it already."""
    content = json.dumps(asdict(chosen))
    key = hashlib.sha256(content.encode() + (library / "libggml-cpu.so.0").read_bytes()).hexdigest()
    request, out = folder / f"{key}.json", folder / f"{key}.npz"
    if not out.exists():
        request.write_text(content)
        made = folder / f"{key}.new.npz"
        command = [sys.executable, str(Path(__file__).with_name("logits.py")), str(request), str(made)]
        subprocess.run(command, check=True, env={**os.environ, "LLAMA_CPP_LIB_PATH": str(library)})
        made.rename(out)
    with np.load(out) as found:
        return Found(**{name: found[name] for name in ("surprise", "best", "sample")})


def of_peer(text: str, base: Mapping[str, Any]) -> tuple[str, Path, Evaluation]:
    """NAME=DIR[,rows=N][,repack][,no-flash] as (name, folder, what is evaluated how)."""
    name, _, rest = text.partition("=")
    folder, *options = rest.split(",")
    rows = next((int(option.removeprefix("rows=")) for option in options if option.startswith("rows=")), WINDOW)
    unknown = [option for option in options if option not in ("repack", "no-flash", f"rows={rows}")]
    if not name or not Path(folder, "libllama.so").exists() or unknown:
        raise SystemExit(f"--peer {text}: NAME=DIR[,rows=N][,repack][,no-flash], and libllama.so in DIR")
    how = Evaluation(**base, rows=rows, own_weights="repack" in options, flash_attention="no-flash" not in options)
    return name, Path(folder), how


def exact(model: Path, windows: Sequence[Sequence[int]], count: int) -> Found:
    """The first `count` tokens, in whole windows, with exact products."""
    evaluator = ExactModel(model)
    taken = [list(window) for window in windows[: -(-count // WINDOW)]]
    logits = [evaluator.logits(window) for window in taken]
    return Found(
        surprise=np.concatenate([surprise(each, window) for each, window in zip(logits, taken, strict=True)]),
        best=np.concatenate([each.argmax(axis=1) for each in logits]),
        sample=np.concatenate([each[EVERY - 1 :: EVERY] for each in logits]).astype(np.float32),
    )


def beginning(found: Found, of: Found) -> Found:
    """As many positions of `found` as `of` has."""
    size, sample = len(of.surprise), len(of.sample)
    return Found(surprise=found.surprise[:size], best=found.best[: len(of.best)], sample=found.sample[:sample])


def show(name: str, found: Found, reference: Found) -> Distance:
    far = distance(found, reference)
    print(
        f"{name:34} {far.rms:8.4f} {far.largest:8.3f} {far.divergence:11.2e} {far.same_best:7.2%} "
        f"{found.perplexity:10.4f} {far.perplexity:+9.4%}",
        flush=True,
    )
    return far


def compare(ours: Found, peers: Mapping[str, Found]) -> dict[str, Any]:
    """The table, and whether ours is as near to the first peer as the others are."""
    first = next(iter(peers))
    print(f"{'difference from ' + first:34} {'rms':>8} {'max':>8} {'KL':>11} {'top-1':>7} {'perplexity':>10}")
    rows = {name: asdict(show(name, found, peers[first])) for name, found in peers.items()}
    far = show("this build", ours, peers[first])
    widest = max((rms(*pair) for pair in itertools.combinations(peers.values(), 2)), default=0.0)
    own = [found.perplexity for found in peers.values()]
    met = {
        "logits": far.rms <= widest,
        "perplexity": abs(far.perplexity) <= PERPLEXITY_WITHIN,
        "perplexity_between_peers": min(own) <= ours.perplexity <= max(own),
    }
    spread = max(own) / min(own) - 1
    print(f"the peers differ among themselves by up to rms {widest:.4f} and {spread:.4%} of perplexity; met: {met}")
    return {"peers": rows, "ours": asdict(far), "widest_of_peers": widest, "spread_of_peers": spread, "met": met}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF; the demo model where none is given")
    parser.add_argument("--peer", action="append", default=[], help="NAME=DIR[,rows=N][,repack][,no-flash]")
    parser.add_argument("--text", type=Path, help="a text; documents of this repository where none is given")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--exact", type=int, default=0, metavar="N")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    chosen = parsed()
    model = chosen.model or pulled_model()
    text = chosen.text.read_text() if chosen.text else text_of_the_project()
    tokens = tokens_of(model, text)[: chosen.tokens]
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens), WINDOW)]
    base = {"model": str(model), "windows": [window for window in windows if len(window) > 1], "every": EVERY}
    environment, digest = describe(), hashlib.sha256(text.encode()).hexdigest()
    print(f"{environment['cpu']}; {model.name}; {len(tokens)} tokens of a text with SHA-256 {digest}")
    whole: dict[str, Any] = {"environment": environment, "text_sha256": digest, "tokens": len(tokens)}
    peers_chosen = [of_peer(peer, base) for peer in chosen.peer]
    with tempfile.TemporaryDirectory(prefix="bench-quality-") as name:
        folder = chosen.keep or Path(name)
        peers = {label: evaluated(folder, how, library) for label, library, how in peers_chosen}
        used, *others = variants()
        ours = evaluated(folder, Evaluation(**base, variant=used), INSTALLED)
        few = {**base, "windows": windows[:WINDOWS_OF_VARIANTS]}
        for variant in others:
            other = evaluated(folder, Evaluation(**few, variant=variant), INSTALLED)
            same = np.array_equal(other.sample.view(np.uint32), ours.sample[: len(other.sample)].view(np.uint32))
            whole.setdefault("variants", {})[variant] = same
            print(f"variant {variant}: {'every bit as' if same else 'DIFFERS from'} {used}", flush=True)
    if peers:
        whole |= compare(ours, peers)
    if chosen.exact:
        truth = exact(model, windows, chosen.exact)
        print(f"difference from exact products, {len(truth.best)} tokens")
        shown = {"this build": ours, **peers}
        whole["exact"] = {label: asdict(show(label, beginning(found, truth), truth)) for label, found in shown.items()}
    print(json.dumps(whole) if chosen.json is None else f"written to {chosen.json}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
