"""Chat templates render as their authors expect, from every place they may be in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from hiserve.errors import ConfigError, ContextLengthError, ModelError, RequestError
from hiserve.models.model_config import find_model
from hiserve.text.conversation import Call, Conversation, Result, Text, Turn
from hiserve.text.template.chat_template import ChatTemplate
from tests.helpers import chats, tiny_text


def chat_of(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return chats.chat_of(messages, **fields)


USER = {"role": "user", "content": "x"}
NANO = ChatTemplate.load(find_model("hiserve-nano"))
assert NANO is not None
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"n": {"type": "integer"}}}}}


def test_messages_and_the_start_of_the_reply_are_rendered() -> None:
    template = ChatTemplate(tiny_text.TEMPLATE, {"bos_token": "<|bos|>"})
    chat = chat_of({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"})
    assert template.render(chat) == "<|bos|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"


def test_blocks_are_trimmed_and_helpers_behave_as_in_transformers() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'system' %}{% continue %}{% endif %}\n{{ m | tojson }}\n"
    source += "{% endfor %}\n{{ strftime_now('%Y') | length }}{{ tools is none }}"
    chat = chat_of({"role": "system", "content": "x"}, {"role": "user", "content": "<é>"})
    assert ChatTemplate(source).render(chat) == '{"role": "user", "content": "<é>"}\n4True'


def test_a_template_that_raises_blames_the_request() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render(chat_of(USER))
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
    chat = chat_of(USER)
    with pytest.raises(RequestError, match="refuses"):
        template.render(chat)
    assert len(chat.messages) == 1


def test_a_template_that_is_not_jinja_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("ok\n{% for %}")


def write_config(folder: Path, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def render_one(folder: Path) -> str:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template.render(chat_of(USER))


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


def test_a_file_of_the_operator_takes_the_place_of_the_models_template(tmp_path: Path) -> None:
    write_config(tmp_path, bos_token="<s>", chat_template="model")
    override = tmp_path / "mine.jinja"
    override.write_text("{{ bos_token }}mine")
    template = ChatTemplate.load(tmp_path, override)
    assert template is not None
    assert template.render(chat_of(USER)) == "<s>mine"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not text"])
def test_a_file_of_the_operator_that_cannot_be_read_is_a_configuration_error(
    tmp_path: Path, content: bytes | None
) -> None:
    override = tmp_path / "mine.jinja"
    if content is not None:
        override.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--chat-template .*mine\.jinja.* cannot be read") as caught:
        ChatTemplate.load(tmp_path, override)
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize("value", [7, {"a": 1}, [7], [{"name": "default"}], [{"template": "x"}]])
def test_a_template_of_another_type_is_a_model_error(tmp_path: Path, value: Any) -> None:
    write_config(tmp_path, chat_template=value)
    with pytest.raises(ModelError, match="chat_template"):
        ChatTemplate.load(tmp_path)


def test_a_template_for_tools_is_used_when_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write_config(tmp_path, chat_template=named)
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert (template.render(chat_of(USER)), template.render(chat_of(USER, tools=[TOOL]))) == ("D", "T")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("F")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(chat_of(USER, tools=[TOOL])) == "F"


def test_a_template_file_that_is_no_text_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        ChatTemplate.load(tmp_path)


def test_tools_documents_and_variables_reach_the_template() -> None:
    source = "{{ tools[0].function.name }} {{ documents[0].text }} {{ style }} {{ add_generation_prompt }}"
    chat = chat_of(
        USER, tools=[TOOL], documents=[{"text": "doc"}], template_kwargs={"style": "short"}, add_generation_prompt=False
    )
    assert ChatTemplate(source).render(chat) == "find doc short False"
    assert ChatTemplate("{{ tools }} {{ documents }} {{ style is defined }}").render(chat_of(USER)) == "None None False"


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "range",
        "chat_template",
        "raise_exception",
    ],
)
def test_a_variable_may_not_take_the_place_of_what_is_given(name: str) -> None:
    template = ChatTemplate("{{ messages | length }}", {"bos_token": "<s>"})
    with pytest.raises(RequestError, match=f"may not set {name}") as caught:
        template.render(chat_of(USER, template_kwargs={name: "x"}))
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_a_continued_message_ends_the_prompt_where_it_ends() -> None:
    template = ChatTemplate(tiny_text.TEMPLATE, {"bos_token": "<|bos|>"})
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    chat = chat_of(USER, {"role": "assistant", "content": "I \ue002 think "}, **continued)
    assert template.render(chat) == "<|bos|><|user|>x<|end|><|assistant|>I \ue002 think "
    trimming = ChatTemplate(tiny_text.TRIMMING_TEMPLATE, {"bos_token": ""})
    assert trimming.render(chat_of({"role": "user", "content": " a "}, **continued)) == "<|user|>a "
    with pytest.raises(RequestError, match="does not show the last message") as caught:
        ChatTemplate("{{ messages[0].content }}").render(chat_of(USER, USER, **continued))
    assert caught.value.param == "continue_final_message"


def test_marks_for_training_are_passed_over() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render(chat_of(USER)) == "x"


def test_a_prompt_that_cannot_fit_the_context_is_refused_while_it_grows() -> None:
    template = ChatTemplate("{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(ContextLengthError, match="more than 1000 characters") as caught:
        template.render(chat_of(USER), max_chars=1000)
    assert caught.value.param == "messages"


def test_a_lone_surrogate_that_comes_by_a_template_is_refused() -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        ChatTemplate("{{ '\\ud800' }}").render(chat_of(USER))


def test_the_embedded_model_shows_tools_calls_and_results() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    chat = chat_of(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
        tools=[TOOL],
    )
    tools, made = NANO.render(chat).split("<|user|>x")
    assert tools.startswith(f"<|bos|><|system|>Tools:\n{json.dumps(TOOL['function'])}\nCall:\n<tool_call>")
    called = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
    assert made == f"<|end|><|assistant|>{called}<|end|><|tool|>found<|end|><|assistant|>"


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=9)), min_size=1, max_size=6
    )
)
def test_chats_of_the_embedded_model_without_tools_have_the_prompt_that_it_was_trained_with(
    turns: list[tuple[str, str]],
) -> None:
    shown = "".join(f"<|{role}|>{content}<|end|>" for role, content in turns)
    messages = [{"role": role, "content": content} for role, content in turns]
    assert NANO.render(chat_of(*messages)) == f"<|bos|>{shown}<|assistant|>"


# In the manner of several families: tools as JSON, calls and results, reasoning, a macro, a namespace.
AGENT = """
{%- macro shown(text) %}{{ text | trim }}{% endmacro %}
{%- set ns = namespace(results=0, last=messages | length - 1) %}
{{- bos_token }}
{%- if tools %}
    {{- '[TOOLS]' + tools | string + '[/TOOLS]' }}
    {%- for tool in tools %}{{ '\n' ~ tool | tojson }}
        {%- for name, value in tool.function.parameters.properties | dictsort %} {{ name }}:{{ value.type }},{% endfor %}
    {%- endfor %}
{%- endif %}
{%- for document in documents or [] %}<doc {{ loop.index }}>{{ document.text }}</doc>{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- set ns.results = ns.results + 1 %}
        {{- '[RESULT ' ~ ns.results ~ ' of ' + message.tool_call_id + ']' + message.content }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[CALL]' + call.function.name + call.function.arguments | tojson(indent=2) | indent(4, first=true) }}
        {%- endfor %}
    {%- else %}
        {{- '<' + message['role'] | upper + '>' + shown(message['content']) }}
        {%- if message.reasoning_content is defined and style != 'brief' %}({{ message.reasoning_content }}){% endif %}
    {%- endif %}
    {%- if loop.index0 == ns.last %}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<ASSISTANT>{% if style is defined %}{{ style }}{% endif %}{% endif %}
"""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"documents": [{"text": "a"}, {"text": "b"}], "template_kwargs": {"style": "brief"}},
        {"tools": [TOOL], "template_kwargs": {"style": "full"}, "add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_conversations_with_tools_are_rendered_as_transformers_does(fields: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"where": "Zürich", "n": 2}'}}
    chat = chat_of(
        {"role": "system", "content": " Be kind. "},
        {"role": "user", "content": "<é> 🙂"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "Here: it is", "reasoning_content": "hm"},
        **fields,
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        conversations=[chat.messages],
        tools=chat.tools,
        documents=chat.documents,
        chat_template=AGENT,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **chat.template_kwargs,
        **tokens,
    )
    assert ChatTemplate(AGENT, tokens).render(chat) == expected


STRICT = tiny_text.TEMPLATE.replace(
    "{%- for message in messages -%}",
    "{%- for message in messages -%}{%- if message.role == 'system' and not loop.first -%}"
    "{{ raise_exception('the system message comes first') }}{%- endif -%}",
)
HOISTING = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}|{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}|{% endfor %}"
)


@pytest.mark.parametrize("source", [tiny_text.TEMPLATE, STRICT, HOISTING])
def test_a_later_system_turn_keeps_its_place(source: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<|bos|>"})
    turns = [("system", "first"), ("user", "ask"), ("system", "later"), ("system", "too"), ("assistant", "said")]
    turns += [("system", "last"), ("user", "bye")]
    texts = [content for _, content in turns]
    shown = [template.render(chat_of(*({"role": role, "content": text} for role, text in turns[:number])))
             for number in (4, 5, 7)]  # fmt: skip
    assert [shown[-1].index(text) for text in texts] == sorted(shown[-1].index(text) for text in texts)
    bare = [text.removesuffix("<|assistant|>") for text in shown]
    assert bare[1].startswith(bare[0])
    assert bare[2].startswith(bare[1]), "what came before is not changed"
    assert ("<system-reminder>\nlater\n</system-reminder>" in shown[-1]) == (source != tiny_text.TEMPLATE)
    first = template.render(chat_of(*({"role": role, "content": text} for role, text in turns[:2])))
    assert "reminder" not in first


MARKING = "{% for m in messages %}{{ m.role }}:{{ '[failed] ' if m.is_error }}{{ m.content }}|{% endfor %}"


@pytest.mark.parametrize(
    ("template", "failed"),
    [
        (NANO, "<|tool|>Error: gone<|end|>"),
        (ChatTemplate(HOISTING), "tool:Error: gone|"),
        (ChatTemplate(MARKING), "tool:[failed] gone|"),
        (ChatTemplate(HOISTING, tool_source=MARKING), "tool:[failed] gone|"),
    ],
)
def test_a_call_that_failed_is_told_to_the_model_once(template: ChatTemplate, failed: str) -> None:
    """By the template, or else by a word before the result; a call that did not fail is as it was."""

    def shown(*, is_error: bool) -> str:
        asked = Turn("user", (Text("Where?"),)), Turn("assistant", (Text(""), Call("123456789", "find", "{}")))
        told = Turn("tool", (Result("123456789", "gone", is_error),))
        again = Turn("tool", (Result("123456789", "here"),))
        return template.render(Conversation(turns=(*asked, told, again), tools=[TOOL]))

    assert shown(is_error=True).count(failed) == 1
    word = "[failed] " if "failed" in failed else "Error: "
    assert shown(is_error=False) == shown(is_error=True).replace(word, "")
