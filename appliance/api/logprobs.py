"""Log probabilities in OpenAI's two shapes: a list of records for chat, parallel lists for plain completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from appliance.engine.types import TokenLogprob
from appliance.inference.request import Piece


def chat(pieces: Iterable[Piece]) -> dict[str, object]:
    """`choices[].logprobs` of /v1/chat/completions."""
    content = [
        {**_record(entry.token, entry.logprob), "top_logprobs": [_record(*other) for other in entry.top]}
        for piece in pieces
        for entry in piece.logprobs
    ]
    return {"content": content, "refusal": None}


def text(pieces: Iterable[Piece]) -> dict[str, object]:
    """`choices[].logprobs` of /v1/completions. Offsets count the characters of the choice's text, its echo included.

    The first token of an echo has no probability: null, and no alternatives.
    """
    tokens: list[str] = []
    numbers: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for piece in pieces:
        for part, start, entries in (
            (piece.echo, 0, _of_text(piece.echo, piece.echo_logprobs)),
            (piece.text, piece.offset, piece.logprobs),
        ):
            before = b""
            for entry in entries:
                tokens.append(_name(entry.token))
                numbers.append(entry.logprob)
                tops.append(None if entry.logprob is None else _top(entry, entry.logprob))
                offsets.append(start + min(len(before.decode("utf-8", "ignore")), len(part)))
                before += entry.token
    return {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": tops, "text_offset": offsets}


def _of_text(echo: str, entries: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
    """Without the token that the model wants before every prompt, which is no part of its text."""
    rest = b"".join(entry.token for entry in entries[1:])
    return entries[1:] if entries and entries[0].token and rest.decode("utf-8", "replace") == echo else entries


def _record(token: bytes, logprob: float | None) -> dict[str, object]:
    return {"token": _name(token), "logprob": logprob, "bytes": list(token)}


def _top(entry: TokenLogprob, logprob: float) -> dict[str, float]:
    """The alternatives and the token itself, as OpenAI has it: up to one more than asked for."""
    ranked = {_name(token): number for token, number in entry.top}
    return ranked if _name(entry.token) in ranked else {**ranked, _name(entry.token): logprob}


def _name(token: bytes) -> str:
    """The token's text; for a part of a character its bytes, so that two parts never share a name."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
