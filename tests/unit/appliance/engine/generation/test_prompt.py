"""Prompt building over a toy tokenizer: one token per character, control tokens where special text is parsed."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.chat.chat_template import ChatTemplate
from appliance.engine.generation.prompt import Prompt, PromptBuilder
from appliance.engine.types import ChatMessage, InfillPrompt, MadeCall, PromptInput, TokenPrompt, ToolChat
from appliance.engine.weights.sizes import PART_CHARACTERS
from appliance.errors import BadRequest

START, END, BOS = 1_000_001, 1_000_002, 1_000_003
CONTROL = ((START, "<|s|>"), (END, "<|e|>"), (BOS, "<bos>"))
PLAIN = "{% for m in messages %}{{ '<|s|>' + m.role + ' ' + m.content + '<|e|>' }}{% endfor %}<|s|>"


class Toy:
    control_texts: tuple[tuple[int, str], ...] = CONTROL
    vocabulary_size = 2_000_000

    def __init__(self, bos: int | None = None) -> None:
        self.bos = bos

    def piece(self, token: int) -> bytes:
        return chr(token).encode() if token < 1_000_000 else b""

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        tokens: list[int] = []
        at = 0
        while at < len(text):
            match = next((item for item in CONTROL if parse_special and text.startswith(item[1], at)), None)
            tokens.append(match[0] if match else ord(text[at]))
            at += len(match[1]) if match else 1
        return tokens


class Merging(Toy):
    """Some tokenizers build a control token out of plain pieces although they were told not to parse it."""

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return super().tokenize(text, parse_special=True)


def build(source: str, *contents: str, bos: int | None = None, toy: Toy | None = None) -> Prompt:
    builder = PromptBuilder(
        toy or Toy(bos), ChatTemplate(source, bos_text="<bos>", eos_text=""), random_bytes=os.urandom
    )
    return builder.build(tuple(ChatMessage(role="user", content=content) for content in contents), "2026-12-01")


class Counting(Toy):
    """Counts the characters it has read."""

    read = 0

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        self.read += len(text)
        return super().tokenize(text, parse_special=parse_special)


HUGE = "a" * (3 * PART_CHARACTERS)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (HUGE, "prompt"),
        (InfillPrompt(prefix=HUGE, suffix="b"), "prompt"),
        (InfillPrompt(prefix="b", suffix=HUGE), "suffix"),
        ((ChatMessage(role="user", content=HUGE),), "messages"),
        (ToolChat(messages=(ChatMessage(role="user", content=HUGE),), tools="[]"), "messages"),
    ],
    ids=["text", "prefix", "suffix", "chat", "tools"],
)
def test_a_huge_prompt_is_refused_by_its_beginning(prompt: PromptInput, param: str) -> None:
    """Reading megabytes holds up everybody else, and what is too long is known long before."""
    toy = Counting()
    builder = PromptBuilder(toy, ChatTemplate(PLAIN, bos_text="", eos_text=""), random_bytes=os.urandom)
    with pytest.raises(BadRequest) as caught:
        builder.build(prompt, "2026-12-01", most=100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    assert toy.read == PART_CHARACTERS


def test_a_long_text_of_few_tokens_is_read_to_its_end() -> None:
    """Many control texts are many characters and few tokens, those cut at the end of a part among them."""
    turns = PART_CHARACTERS // len("<|s|>user <|e|>") * 4
    builder = PromptBuilder(Toy(), ChatTemplate(PLAIN, bos_text="", eos_text=""), random_bytes=os.urandom)
    chat = tuple(ChatMessage(role="user", content="") for _ in range(turns))
    whole = builder.build(chat, "2026-12-01")
    assert builder.build(chat, "2026-12-01", most=len(whole.tokens)) == whole


def controls(prompt: Prompt) -> list[int]:
    return [token for token in prompt.tokens if token > 1_000_000]


def test_ordinary_messages_are_tokenised_in_one_piece() -> None:
    prompt = build(PLAIN, "hello")
    assert prompt.tokens == Toy().tokenize(prompt.text, parse_special=True)


pieces = st.lists(st.sampled_from(["<|s|>", "<|e|>", "<bos>", "<|", "s|>", "e", "|>", " ", "x"]), max_size=8)


@given(st.lists(pieces.map("".join), min_size=1, max_size=3))
def test_b127_no_user_text_makes_a_control_token(contents: list[str]) -> None:
    prompt = build(PLAIN, *contents)
    assert controls(prompt) == [START, END] * len(contents) + [START]
    spelled = {START: "<|s|>", END: "<|e|>", BOS: "<bos>"}
    assert "".join(spelled.get(token) or chr(token) for token in prompt.tokens) == prompt.text


def test_b127_control_text_across_the_border_of_user_text() -> None:
    source = "<|{{ messages[0].content }}|>"
    prompt = build(source, "s")
    assert prompt.text == "<|s|>"
    assert controls(prompt) == []


@pytest.mark.parametrize(
    ("source", "content", "param"),
    [
        ("{{ messages[0].content.split('#')[-1] }}", "a#<|e|>", "messages[0].content"),
        ("{{ messages[0].content.split('#')[-1] }}<|e|>", "x#<|e|>", "messages[0].content"),
        ("{{ messages[0].content | replace('#', '') }}{{ messages[0].content | length }}<|", "<|e#|>", "messages"),
        ("<|{{ messages[0].content.split('#')[-1] }}", "a#s|>", "messages"),
    ],
)
def test_templates_that_inspect_content(source: str, content: str, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        build(source, content)
    assert (caught.value.code, caught.value.param) == ("control_token_in_content", param)
    assert "<|e|>" not in caught.value.message


def test_templates_that_inspect_harmless_content_work() -> None:
    prompt = build("<|s|>{{ messages[0].content.split('#')[-1] }}<|e|>", "a#b")
    assert controls(prompt) == [START, END]


def test_tokenizers_that_merge_up_to_control_tokens_are_caught() -> None:
    with pytest.raises(BadRequest) as caught:
        build(PLAIN, "<|e|>", toy=Merging())
    assert caught.value.code == "control_token_in_content"


def test_bos_exactly_once() -> None:
    assert build("{{ bos_token }}x", "y", bos=BOS).tokens == [BOS, ord("x")]
    assert build("x", "y", bos=BOS).tokens == [BOS, ord("x")]
    assert build("x", "y").tokens == [ord("x")]


def test_raw_prompts_are_all_user_text() -> None:
    template = ChatTemplate(None, bos_text="", eos_text="")
    prompt = PromptBuilder(Toy(BOS), template, random_bytes=os.urandom).build("<|e|>", "2026-12-01")
    assert prompt.tokens == [BOS, *map(ord, "<|e|>")]
    with pytest.raises(BadRequest) as caught:
        PromptBuilder(Toy(), template, random_bytes=os.urandom).build("", "2026-12-01")
    assert caught.value.code == "empty_prompt"


class Filling(Toy):
    control_texts = (*CONTROL, (1_000_011, "<fim_prefix>"), (1_000_012, "<fim_suffix>"), (1_000_013, "<fim_middle>"))


def raw(prompt: PromptInput, toy: Toy) -> Prompt:
    builder = PromptBuilder(toy, ChatTemplate(None, bos_text="", eos_text=""), random_bytes=os.urandom)
    return builder.build(prompt, "2026-12-01")


def test_token_prompts_are_evaluated_as_they_are() -> None:
    prompt = raw(TokenPrompt(tokens=(START, 104, 105)), Toy(BOS))
    assert (prompt.tokens, prompt.text) == ([START, 104, 105], "hi")
    for tokens, code in (((), "empty_prompt"), ((2_000_000,), "invalid_token")):
        with pytest.raises(BadRequest) as caught:
            raw(TokenPrompt(tokens=tokens), Toy())
        assert (caught.value.code, caught.value.param) == (code, "prompt")


def test_a_gap_is_marked_by_control_tokens_that_the_texts_cannot_forge() -> None:
    prompt = raw(InfillPrompt(prefix="a<fim_suffix>", suffix="b"), Filling(BOS))
    assert controls(prompt) == [BOS, 1_000_011, 1_000_012, 1_000_013]
    assert prompt.tokens[2:-3] == [*map(ord, "a<fim_suffix>")]
    assert prompt.text == "<fim_prefix>a<fim_suffix><fim_suffix>b<fim_middle>"
    with pytest.raises(BadRequest) as caught:
        raw(InfillPrompt(prefix="a", suffix="b"), Toy())
    assert (caught.value.code, caught.value.param) == ("suffix_not_supported", "suffix")


TOLD = "{{ tools | tojson }}<|s|>{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}<|e|>{% endfor %}"
INSPECTING = "{% for t in tools %}{{ t.function.description.split('#')[-1] }}<|e|>{% endfor %}"


def told(source: str, *, description: str = "A tool.", argument: str = "x", **names: str) -> Prompt:
    tools = [{"type": "function", "function": {"name": names.get("name", "f"), "description": description}}]
    call = MadeCall(call_id=names.get("call_id", "1"), name="f", arguments=json.dumps({argument: argument}))
    builder = PromptBuilder(Toy(), ChatTemplate(source, bos_text="<bos>", eos_text=""), random_bytes=os.urandom)
    message = ChatMessage(role="assistant", content="hi", calls=(call,))
    return builder.build(ToolChat(messages=(message,), tools=json.dumps(tools)), "2026-12-01")


def test_b127_what_tools_and_calls_say_never_becomes_a_control_token() -> None:
    prompt = told(TOLD, description="It says <|e|>.", argument="<|s|>")
    assert controls(prompt) == [START, END]
    assert prompt.text.count("<|e|>") == 2
    assert prompt.text.count("<|s|>") == 3


@pytest.mark.parametrize("field", ["name", "call_id"])
def test_b127_names_and_ids_have_no_control_text(field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        told(TOLD, **{field: "a<|e|>"})
    assert caught.value.code == "control_token_in_content"


def test_b127_templates_that_inspect_tools() -> None:
    assert controls(told(INSPECTING, description="a#b")) == [END]
    with pytest.raises(BadRequest) as caught:
        told(INSPECTING, description="a#<|s|>")
    assert caught.value.code == "control_token_in_content"
