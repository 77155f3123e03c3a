"""Log probabilities in OpenAI's two shapes: a list of records for chat, parallel lists for plain completions."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.engine.types import TokenLogprob
from appliance.exchange import Piece


def chat(pieces: Iterable[Piece]) -> dict[str, object]:
    """`choices[].logprobs` of /v1/chat/completions."""
    content = [
        {**_record(entry.token, entry.logprob), "top_logprobs": [_record(*other) for other in entry.top]}
        for piece in pieces
        for entry in piece.logprobs
    ]
    return {"content": content, "refusal": None}


def text(pieces: Iterable[Piece]) -> dict[str, object]:
    """`choices[].logprobs` of /v1/completions. Offsets count the characters of the choice's text."""
    tokens: list[str] = []
    numbers: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for piece in pieces:
        before = b""
        for entry in piece.logprobs:
            tokens.append(_name(entry.token))
            numbers.append(entry.logprob)
            tops.append(_top(entry))
            offsets.append(piece.offset + min(len(before.decode("utf-8", "ignore")), len(piece.text)))
            before += entry.token
    return {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": tops, "text_offset": offsets}


def _record(token: bytes, logprob: float) -> dict[str, object]:
    return {"token": _name(token), "logprob": logprob, "bytes": list(token)}


def _top(entry: TokenLogprob) -> dict[str, float]:
    """The alternatives and the token itself, as OpenAI has it: up to one more than asked for."""
    ranked = {_name(token): logprob for token, logprob in entry.top}
    return ranked if _name(entry.token) in ranked else {**ranked, _name(entry.token): entry.logprob}


def _name(token: bytes) -> str:
    """The token's text; for a part of a character its bytes, so that two parts never share a name."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
