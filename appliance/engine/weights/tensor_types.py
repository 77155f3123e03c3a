"""Which formats of weights there are, and which of them the arithmetic of this project's kernels is defined for.

Numbers are `enum ggml_type` of ggml.h (llama.cpp of llama-cpp-python 0.3.36).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from appliance.engine.weights.gguf import read_tensors
from appliance.errors import BootError

LLAMA_CPP = "llama.cpp"
"""The arithmetic of everything else: llama.cpp's own, which build, processor and threads may change."""

_COVERED: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    30: "BF16",
}
_INDICES: Mapping[int, str] = {26: "I32"}  # of tensors that are looked things up with, never multiplied by
_FALLBACK: Mapping[int, str] = {
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
_COMPUTABLE: Mapping[int, str] = {**_COVERED, **_INDICES, **_FALLBACK}


def read_tensor_types(fd: int) -> frozenset[int]:
    """Types of the tensors of the GGUF file behind `fd`. Raises BootError for one that nothing computes with."""
    tensors = read_tensors(fd)
    for name, number in tensors.items():
        if number not in _COMPUTABLE:
            raise BootError(
                f"the model's tensor {ascii(name[:64])[1:-1]} has the type {number} of ggml, which neither this "
                f"project's kernels nor llama.cpp can compute with; supported are {', '.join(_COMPUTABLE.values())}"
            )
    return frozenset(tensors.values())


def uncovered(types: Iterable[int]) -> tuple[str, ...]:
    """Names of the types that this project's kernels do not cover, sorted: llama.cpp's own code computes with them."""
    return tuple(sorted(_FALLBACK[number] for number in types if number in _FALLBACK))
