"""Seeded random weights in every format: those that the proof of a build uses."""

from appliance.engine.llama_cpp.proof_weights import FORMATS, Draw, matrix

__all__ = ["FORMATS", "Draw", "matrix"]
