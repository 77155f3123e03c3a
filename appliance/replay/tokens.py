"""Find the first token in which an answer differs from its replay. A receipt has a commitment to the tokens, not them.

The text of the answer says where to look; what was sampled there is found by opening the commitment with what it can
have been: the replay's tokens with one of them exchanged, or the rest of the text in the tokenizer's own words. An id
that opens it is certain. Where nothing opens it, the place is where the texts part, and the id stays unknown.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.engine.base import Engine
from appliance.engine.types import GenerationJob, PromptReady, SamplingParams, TokenPrompt
from appliance.errors import BadRequest
from appliance.replay.run import Job
from appliance.replay.verdict import Difference

_SHOWN_CHARACTERS = 40
_BEFORE = 3
"""Tokens before the place where texts part, from which on the rest of the text is read into tokens again."""
_INCOMPLETE = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What an answer says of one choice: the commitment to its tokens, their number, and its text where it is known.

    `key` opens the commitment (`digests.inner_key`).
    """

    choice: int
    commitment: bytes
    count: int
    key: bytes
    text: str | None


class Speller:
    """Tokens and text of the model at hand, through the engine that serves."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._serial = 0
        self.vocabulary_size = engine.model.vocabulary_size

    async def text(self, tokens: Sequence[int]) -> str:
        """What the tokens say; an incomplete character at the end is U+FFFD."""
        return (await self._ready(TokenPrompt(tokens=tuple(tokens)))).prompt_text if tokens else ""

    async def tokens(self, text: str) -> list[int]:
        """The text in tokens as the tokenizer reads it, without what the model wants before a prompt.

        Empty for text that no prompt may have, such as that of control tokens.
        """
        try:
            ids = _unpacked((await self._ready(text)).token_ids) if text else []
        except BadRequest:
            return []
        return ids[1:] if ids and not (await self.text(ids[:1])) else ids

    async def _ready(self, prompt: TokenPrompt | str) -> PromptReady:
        self._serial += 1
        job = GenerationJob(
            job_id=hashlib.sha256(b"replay" + self._serial.to_bytes(8, "big")).digest()[:16],
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0, max_tokens=0),
            template_date="1970-01-01",
            evaluate=False,
        )
        found: PromptReady | None = None
        async for event in self._engine.generate(job):
            if isinstance(event, PromptReady):
                found = event
        assert found is not None, "every accepted job begins with it"
        return found


async def locate(claimed: Claimed, job: Job, speller: Speller) -> Difference:
    """The first token of a choice that is not the replay's, with both values."""
    replayed = _unpacked(job.tokens)
    at = None if claimed.text in (None, job.text) else await _parted(claimed.text or "", replayed, speller)
    original = await _opened(claimed, replayed, at, speller)
    if original is not None:
        pairs = zip(original, replayed, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(original), len(replayed)))
        there = await _token(original[at : at + 1], speller)
        return _difference(claimed, at, there, await _token(replayed[at : at + 1], speller))
    if claimed.text is None or at is None:
        counts = {"tokens": claimed.count}, {"tokens": len(replayed)}
        return Difference(what="tokens", place={"choice": claimed.choice}, answer=counts[0], replay=counts[1])
    begun = (await speller.text(replayed[:at])).rstrip(_INCOMPLETE)
    rest = claimed.text[len(begun) : len(begun) + _SHOWN_CHARACTERS]
    there = {"token_id": None, "text": rest}
    return _difference(claimed, at, there, await _token(replayed[at : at + 1], speller))


def _difference(claimed: Claimed, at: int, there: object, here: object) -> Difference:
    return Difference(what="token", place={"choice": claimed.choice, "token": at}, answer=there, replay=here)


async def _token(tokens: Sequence[int], speller: Speller) -> object:
    """None where there is no token: one of the two had ended."""
    return {"token_id": tokens[0], "text": await speller.text(tokens)} if tokens else None


async def _parted(text: str, replayed: Sequence[int], speller: Speller) -> int:
    """The first token of the replay after which its text is no beginning of `text`, which is another one.

    Where all of it is one, `text` goes on behind: in place of the end token, or behind the last one.
    """
    low, high = 0, len(replayed)
    while low < high:
        middle = (low + high) // 2
        begun = (await speller.text(replayed[: middle + 1])).rstrip(_INCOMPLETE)
        if text.startswith(begun):
            low = middle + 1
        else:
            high = middle
    ended = low == len(replayed) > 0 and not await speller.text(replayed[-1:])
    return low - 1 if ended else low


# -- opening the commitment --------------------------------------------------------------------------------------------


async def _opened(claimed: Claimed, replayed: Sequence[int], at: int | None, speller: Speller) -> list[int] | None:
    """The tokens that the commitment is to, where they can be found. `at` is where the texts part."""
    if claimed.count <= len(replayed) and _opens(claimed, replayed[: claimed.count]):
        return list(replayed[: claimed.count])
    if claimed.text is None:
        return None
    near = range(at, max(-1, at - _BEFORE), -1) if at is not None else (len(replayed),)
    for place in dict.fromkeys((*near, 0)):
        begun = (await speller.text(replayed[:place])).rstrip(_INCOMPLETE)
        if not claimed.text.startswith(begun):
            continue
        rest = await speller.tokens(claimed.text[len(begun) :])
        head = [*replayed[:place], *rest]
        if len(head) == claimed.count and _opens(claimed, head):
            return head
        if len(head) == claimed.count - 1:  # the end token has no text
            last = _exchanged(claimed, head, (), speller.vocabulary_size)
            if last is not None:
                return [*head, last]
        if len(replayed) == claimed.count and place < len(replayed):
            one = _exchanged(claimed, replayed[:place], replayed[place + 1 :], speller.vocabulary_size)
            if one is not None:
                return [*replayed[:place], one, *replayed[place + 1 :]]
    return None


def _opens(claimed: Claimed, tokens: Sequence[int]) -> bool:
    return hmac.compare_digest(hmac.digest(claimed.key, _packed(tokens), "sha256"), claimed.commitment)


def _exchanged(claimed: Claimed, before: Sequence[int], behind: Sequence[int], vocabulary_size: int) -> int | None:
    """The token between `before` and `behind` with which the commitment opens."""
    begun, rest = hmac.new(claimed.key, _packed(before), "sha256"), _packed(behind)
    return next((id_ for id_ in range(vocabulary_size) if _closed(begun, id_, rest) == claimed.commitment), None)


def _closed(begun: hmac.HMAC, token: int, rest: bytes) -> bytes:
    grown = begun.copy()
    grown.update(token.to_bytes(4, "little") + rest)
    return grown.digest()


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _unpacked(ids: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(ids) // 4}I", ids))
