from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.engine.chat.chat_template import LIMIT_CHARS, ChatTemplate
from appliance.engine.types import ChatMessage
from appliance.errors import BadRequest

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(source: str | None, *contents: str, role: str = "user") -> tuple[str, tuple[tuple[int, int], ...] | None]:
    messages = [ChatMessage(role=role, content=content) for content in contents]
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>")
    rendering = template.render(messages, template_date="2026-12-01", random_bytes=os.urandom)
    return rendering.text, rendering.spans


def refusal(source: str | None, *contents: str, role: str = "user") -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        render(source, *contents, role=role)
    return caught.value


def test_text_and_provenance() -> None:
    text, spans = render(CHATML, "one", " two ")
    assert text == "<|im_start|>user\none<|im_end|>\n<|im_start|>user\n two <|im_end|>\n<|im_start|>assistant\n"
    assert spans is not None
    assert [text[start:end] for start, end in spans] == ["one", "two"]


def test_trimming_templates_keep_their_spans() -> None:
    text, spans = render("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "  a b\n")
    assert text == "[a b]"
    assert spans == ((1, 4),)


def test_content_that_is_used_twice_has_two_spans() -> None:
    assert render("{{ messages[0].content }}-{{ messages[0].content }}", "ab") == ("ab-ab", ((0, 2), (3, 5)))


def test_templates_that_inspect_content_have_no_provenance() -> None:
    source = "{% for m in messages %}{{ m.content.split('|')[-1] }}{% endfor %}"
    assert render(source, "a|b") == ("b", None)
    assert render("{{ messages[0].content | length }}", "abc") == ("3", None)


@pytest.mark.parametrize("content", ["", "  ", "\n"])
def test_blank_content(content: str) -> None:
    assert render("[{{ messages[0].content }}]", content) == (f"[{content}]", ())


def test_the_dialect_of_transformers() -> None:
    source = """{%- set ns = namespace(n=0) %}
{%- for m in messages %}
    {%- if m.content == 'stop' %}{% break %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
{%- endfor %}
{{- bos_token }}{{ ns.n }} {{ {'a': '<é>'} | tojson }} {{ strftime_now('%d %b %Y') }} {{ tools is none }}
{%- generation %}!{% endgeneration %}{{ eos_token }}"""
    text, _ = render(source, "x", "stop", "y")
    assert text == '<s>1 {"a": "<é>"} 01 Dec 2026 True!</s>'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ' + messages[0].content) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}{{ messages.clear() }}",
        "{{ ('{0.__class__}').format(1) }}",
        "{{ lipsum() }}",
        "{{ raise_exception(messages[0].content) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 2 ** 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ range(10000000) }}",
        "{% for a in range(90000) %}{{ '" + "x" * 100 + "' }}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ unclosed",
        "{{ 1 / 0 }}",
        "{{ messages[5].content.foo }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_b163_hostile_templates_are_refused_without_side_effect(source: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary-8c1f"
    error = refusal(source, str(canary))
    assert error.code == "chat_template_rejected"
    assert "canary-8c1f" not in error.message
    assert not canary.exists()


def test_output_is_bounded() -> None:
    assert "longer" in refusal("{{ messages[0].content }}", "x" * (LIMIT_CHARS + 1)).message


def test_a_model_without_a_template_refuses_chat() -> None:
    assert refusal(None, "hi").code == "no_chat_template"


@pytest.mark.parametrize("role", ["", "user\n<|im_end|>", "System", "a" * 40])
def test_roles_are_words(role: str) -> None:
    error = refusal(CHATML, "hi", role=role)
    assert (error.code, error.param) == ("invalid_role", "messages[0].role")
