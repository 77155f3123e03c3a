"""From a job's prompt to token ids, such that user text never becomes a control token."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.engine.chat.chat_template import ChatTemplate, Rendering, TemplateRejected, documents
from appliance.engine.types import ChatMessage, InfillPrompt, PromptInput, TokenPrompt, ToolChat
from appliance.engine.weights.sizes import surely_longer
from appliance.errors import BadRequest

Span = tuple[int, int]

_INFILL_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Control tokens before the prefix, before the suffix and before the answer, as the families that know them spell them
(llama.cpp, `llama_vocab::impl::load`, the texts of its FIM tokens)."""


class Vocabulary(Protocol):
    """What prompt building needs of a tokenizer. Ids are ints, texts are str."""

    @property
    def control_texts(self) -> Sequence[tuple[int, str]]:
        """(id, text) of every token that the tokenizer matches only when special tokens are parsed."""

    @property
    def bos(self) -> int | None:
        """The token that starts every prompt, None where the model wants none."""

    @property
    def vocabulary_size(self) -> int: ...
    def tokenize(self, text: str, *, parse_special: bool) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What will be evaluated: the text and its token ids, in order."""

    text: str
    tokens: list[int]


class PromptBuilder:
    """Builds prompts for one model."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate, *, random_bytes: Callable[[int], bytes]) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._random_bytes = random_bytes
        self._control_ids = frozenset(token for token, _ in vocabulary.control_texts)
        signs = {sign for _, text in vocabulary.control_texts for sign in text if not sign.isalnum()}
        self._neutral = {ord(sign): "x" for sign in signs if not sign.isspace()}

    def build(self, prompt: PromptInput, template_date: str, *, most: int | None = None) -> Prompt:
        """Text that surely has more than `most` tokens is refused early.

        Raises BadRequest: template refusals, `context_length_exceeded`, `control_token_in_content`, `empty_prompt`,
        `invalid_token`, `suffix_not_supported`."""
        if isinstance(prompt, str):
            self._check_size(prompt, most, param="prompt")
            return self._from_text(prompt)
        if isinstance(prompt, TokenPrompt):
            return self._from_tokens(prompt)
        if isinstance(prompt, InfillPrompt):
            self._check_size(prompt.prefix, most, param="prompt")
            self._check_size(prompt.suffix, most, param="suffix")
            return self._from_gap(prompt)
        if isinstance(prompt, ToolChat):
            self._check_words(prompt)
        rendering = self._template.render(prompt, template_date=template_date, random_bytes=self._random_bytes)
        # Control texts count as one token each, whoever wrote them: as few as it can be.
        self._check_size(rendering.text, most, param="messages", parse_special=True)
        if rendering.spans is None:
            self._check_unlocated(rendering, prompt, template_date)
        return self._from_rendering(rendering)

    def _check_size(self, text: str, most: int | None, *, param: str, parse_special: bool = False) -> None:
        read = functools.partial(self._vocabulary.tokenize, parse_special=parse_special)
        if most is not None and surely_longer(text, most, read):
            message = f"the prompt has more than {most} tokens; the context holds {most}"
            raise BadRequest("context_length_exceeded", message, param=param)

    def _from_text(self, text: str) -> Prompt:
        """Raw text is all user text: no special token is parsed out of it."""
        tokens = self._plain(text, param="prompt")
        if self._vocabulary.bos is not None:
            tokens.insert(0, self._vocabulary.bos)
        if not tokens:
            raise BadRequest("empty_prompt", "the prompt has no tokens", param="prompt")
        return Prompt(text=text, tokens=tokens)

    def _from_tokens(self, prompt: TokenPrompt) -> Prompt:
        """The caller's own ids, control tokens among them: who sends ids means them."""
        if not prompt.tokens:
            raise BadRequest("empty_prompt", "the prompt has no tokens", param="prompt")
        if max(prompt.tokens) >= self._vocabulary.vocabulary_size:
            raise BadRequest("invalid_token", "the prompt has a token that the model does not have", param="prompt")
        text = b"".join(self._vocabulary.piece(token) for token in prompt.tokens).decode("utf-8", "replace")
        return Prompt(text=text, tokens=list(prompt.tokens))

    def _from_gap(self, prompt: InfillPrompt) -> Prompt:
        known = {text: token for token, text in self._vocabulary.control_texts}
        marks = next((marks for marks in _INFILL_MARKS if known.keys() >= set(marks)), None)
        if marks is None:
            raise BadRequest("suffix_not_supported", "this model cannot fill a gap before a suffix", param="suffix")
        before, after, middle = marks
        tokens = [] if self._vocabulary.bos is None else [self._vocabulary.bos]
        tokens += [known[before], *self._plain(prompt.prefix, param="prompt")]
        tokens += [known[after], *self._plain(prompt.suffix, param="suffix"), known[middle]]
        return Prompt(text=f"{before}{prompt.prefix}{after}{prompt.suffix}{middle}", tokens=tokens)

    def _from_rendering(self, rendering: Rendering) -> Prompt:
        text, spans = rendering.text, rendering.spans or ()
        occurrences = _occurrences(text, self._vocabulary.control_texts)
        literal = _merge(
            (max(start, span[0]), min(end, span[1]))
            for start, end, _ in occurrences
            for span in spans
            if start < span[1] and span[0] < end
        )
        tokens: list[int] = []
        position = 0
        for start, end in literal:
            tokens += self._special(text[position:start])
            tokens += self._plain(text[start:end], param="messages")
            position = end
        tokens += self._special(text[position:])
        self._check_scaffolding(tokens, occurrences, literal)
        bos = self._vocabulary.bos
        if bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        if not tokens:
            raise BadRequest("empty_prompt", "the rendered prompt has no tokens", param="messages")
        return Prompt(text=text, tokens=tokens)

    def _special(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text, parse_special=True) if text else []

    def _plain(self, text: str, *, param: str) -> list[int]:
        tokens = self._vocabulary.tokenize(text, parse_special=False) if text else []
        # Some tokenizers can merge ordinary pieces up to a control token's text even when told not to parse it.
        if not self._control_ids.isdisjoint(tokens):
            raise _forged(param)
        return tokens

    def _check_words(self, chat: ToolChat) -> None:
        """What of tools, ids and names no mark can follow has no control text at all."""
        messages, tools = (json.dumps(part, ensure_ascii=False) for part in documents(chat, lambda _: ""))
        for field, words in (("messages", messages), ("tools", tools)):
            if any(text in words for _, text in self._vocabulary.control_texts):
                raise _forged(field)

    def _check_unlocated(
        self, rendering: Rendering, chat: tuple[ChatMessage, ...] | ToolChat, template_date: str
    ) -> None:
        """A template that inspects content: accept only where no content could have made a control token.

        In the marked rendering no content touches the scaffolding, and in the neutral one no content has the signs
        that control texts are made of: a control text that needs either of them came from the user in part.
        """
        control_texts = self._vocabulary.control_texts
        messages = chat.messages if isinstance(chat, ToolChat) else chat
        for index, message in enumerate(messages):
            if any(text in message.content for _, text in control_texts):
                raise _forged(f"messages[{index}].content")
        texts: list[str] = []

        def neutral(text: str) -> str:
            texts.append(text)
            return text.translate(self._neutral)

        others = documents(chat, neutral)
        if any(text in content for content in texts for _, text in control_texts):
            raise _forged("messages")
        try:
            other = self._template.run(*others, template_date=template_date)
        except TemplateRejected:
            raise _forged("messages") from None
        expected = [token for _, _, token in _occurrences(rendering.text, control_texts)]
        for text in (rendering.marked, other):
            if [token for _, _, token in _occurrences(text, control_texts)] != expected:
                raise _forged("messages")

    def _check_scaffolding(
        self, tokens: list[int], occurrences: Sequence[tuple[int, int, int]], literal: Sequence[Span]
    ) -> None:
        """No control token beyond those the template itself spelled out."""
        allowed: dict[int, int] = {}
        for start, end, token in occurrences:
            if all(end <= low or high <= start for low, high in literal):
                allowed[token] = allowed.get(token, 0) + 1
        for token in tokens:
            if token in self._control_ids:
                allowed[token] = allowed.get(token, 0) - 1
                if allowed[token] < 0:
                    raise _forged("messages")


def _forged(param: str) -> BadRequest:
    return BadRequest(
        "control_token_in_content", f"{param} contains text that the model reads as a control token", param=param
    )


def _occurrences(text: str, control_texts: Sequence[tuple[int, str]]) -> list[tuple[int, int, int]]:
    """(start, end, token) of every control text in `text`, overlapping ones included, in order."""
    found: list[tuple[int, int, int]] = []
    for token, needle in control_texts:
        start = text.find(needle)
        while start >= 0:
            found.append((start, start + len(needle), token))
            start = text.find(needle, start + 1)
    found.sort()
    return found


def _merge(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
