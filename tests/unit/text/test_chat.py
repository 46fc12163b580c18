"""Chat templates render as their authors expect, and messages are checked before they reach one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hiserve.errors import ModelError, RequestError
from hiserve.text.chat import ChatTemplate, check_text, parse_messages
from tests.helpers import tiny_text


def test_messages_and_the_start_of_the_reply_are_rendered() -> None:
    template = ChatTemplate(tiny_text.TEMPLATE, {"bos_token": "<|bos|>"})
    messages = parse_messages([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
    assert template.render(messages) == "<|bos|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"


def test_blocks_are_trimmed_and_helpers_behave_as_in_transformers() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'system' %}{% continue %}{% endif %}\n{{ m | tojson }}\n"
    source += "{% endfor %}\n{{ strftime_now('%Y') | length }}{{ tools is none }}"
    messages = parse_messages([{"role": "system", "content": "x"}, {"role": "user", "content": "<é>"}])
    assert ChatTemplate(source).render(messages) == '{"role": "user", "content": "<é>"}\n4True'


def test_a_template_that_raises_blames_the_request() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render(parse_messages([{"role": "user", "content": "x"}]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append('x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_stays_inside_its_sandbox(source: str) -> None:
    template = ChatTemplate("{% set x %}" + source + "{% endset %}{{ x }}" if "append" in source else source)
    messages = parse_messages([{"role": "user", "content": "x"}])
    with pytest.raises(RequestError, match="refuses"):
        template.render(messages)
    assert len(messages) == 1


def test_a_template_that_is_not_jinja_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("ok\n{% for %}")


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def render_one(folder: Path) -> str:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template.render(parse_messages([{"role": "user", "content": "hi"}]))


def test_the_template_is_found_in_all_its_places(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    write_config(tmp_path, bos_token={"content": "<s>", "lstrip": False}, chat_template="{{ bos_token }}A")
    assert render_one(tmp_path) == "<s>A"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ eos_token is defined }}"}]
    write_config(tmp_path, eos_token=None, chat_template=named)
    assert render_one(tmp_path) == "DFalse"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert render_one(tmp_path) == "J"


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_tokenizer_config_is_a_model_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


def test_text_parts_are_joined_and_other_strings_kept() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = parse_messages([{"role": "developer", "content": parts, "name": "ann", "tool_calls": [], "x": 1}])
    assert messages == [{"role": "system", "content": "one two", "name": "ann"}]


def user(content: Any, **more: Any) -> list[Any]:
    return [{"role": "user", "content": "fine"}, {"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (user(None), "messages[1].content"),
        (user(7), "messages[1].content"),
        (user([]), "messages[1].content"),
        (user(["hi"]), "messages[1].content[0].type"),
        (user([{"type": "text", "text": "a"}, {"type": "image_url"}]), "messages[1].content[1].type"),
        (user([{"type": "text"}]), "messages[1].content[0].text"),
        (user([{"type": "text", "text": 5}]), "messages[1].content[0].text"),
        (user("\ud800"), "messages[1].content"),
        (user([{"type": "text", "text": "a\udfff"}]), "messages[1].content"),
        (user("hi", name="\ud800"), "messages[1].name"),
        (user("hi", tool_calls=[{"id": "1"}]), "messages[1].tool_calls"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(messages)
    assert caught.value.param == param


def test_only_lone_surrogates_are_invalid_text() -> None:
    check_text("a😀\x00\uffff\ue000", "prompt")
    with pytest.raises(RequestError, match="lone surrogate at character 1"):
        check_text("a\udc00", "prompt")
