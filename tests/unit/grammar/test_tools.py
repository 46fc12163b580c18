"""Grammars of tool calls: what is drawn from one reads back as calls whose arguments are valid."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from hiserve.core.request import FinishReason, Grammar, SamplingParams
from hiserve.errors import RequestError
from hiserve.grammar import bounds
from hiserve.grammar import tools as grammar_of_tools
from hiserve.grammar.tools import MAX_KEPT, ToolGrammar, ToolGrammars
from hiserve.text.abilities import Abilities
from hiserve.text.conversation import Conversation, ToolChoice
from hiserve.text.reader.buffer import Event, Kind, called
from hiserve.text.reader.formats import BY_NAME
from hiserve.text.reader.reader import Reader, ReplyStart
from hiserve.text.template.chat_template import ChatTemplate
from tests.helpers import tiny_text
from tests.helpers.chats import chat_of
from tests.helpers.reply_formats import NAMES, SIZES, TEMPLATES, marks_of, read, template_of, token_bytes, tokenizer_of
from tests.helpers.tool_grammars import PARAMETERS, abilities_of, allowed_by, drawn, end_of, vocabulary_of
from tests.helpers.widening import in_turn

HI = {"role": "user", "content": "Hi"}
FUNCTIONS = ("look", "ns__find-it.v2")
CHOICES = [ToolChoice(True), ToolChoice(True, ("look",)), ToolChoice(False, ("look",)), ToolChoice()]
HELD = NAMES
SAID = "<|channel|>commentary<|message|>"
TAGGED = [name for name in HELD if BY_NAME[name].arguments == "tagged"]
UNTYPED = [name for name in TAGGED if not BY_NAME[name].key_type]  # the text of a value tells its type


def tool(name: str = "look", parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def made_of(
    name: str, *given: dict[str, Any], by_token: bool = True, choice: ToolChoice = CHOICES[0], **fields: Any
) -> ToolGrammar:
    strict = tuple(each["function"]["name"] for each in given if each["function"].get("strict"))
    chat = chat_of([HI], tools=list(given), choice=msgspec.structs.replace(choice, strict=strict), **fields)
    made = ToolGrammars(abilities_of(name, by_token=by_token)).of(chat)
    assert made is not None
    return made


def takes(name: str, made: ToolGrammar, text: str, *, by_token: bool = True) -> bool:
    """Whether a text is a whole reply."""
    tokenizer, vocabulary = tokenizer_of(name, by_token=by_token), vocabulary_of(name, by_token=by_token)
    grammar, said = made.grammar, tokenizer.encode(text, add_special_tokens=False).tolist()
    if BY_NAME[name].header[0]:
        grammar = Grammar.of(grammar.kind, grammar.text, "<|end|><|start|>assistant", "<|channel|>analysis<|message|>")
    matcher = vocabulary.compile(grammar)
    for index, token in enumerate(said):
        if token not in allowed_by(matcher, len(tokenizer.vocab)):
            return False
        if matcher.advance([token]) is not None:
            return index == len(said) - 1
    return end_of(name) in allowed_by(matcher, len(tokenizer.vocab))


def read_back(
    name: str, said: list[int], given: list[Any], *, by_token: bool, sizes: list[int], is_single: bool
) -> list[Event]:
    abilities = abilities_of(name, by_token=by_token)
    assert abilities.syntax is not None
    reader = Reader(
        abilities.syntax, token_bytes(name, by_token=by_token), SamplingParams(), ReplyStart(given, is_single=is_single)
    )
    return read(reader, said, sizes, FinishReason.STOP)[0]


@pytest.mark.parametrize(("name", "by_token"), [*in_turn(HELD, [True, False]), ("harmony", True)])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_a_reply_of_the_grammar_reads_back_as_valid_calls(name: str, by_token: bool, data: st.DataObject) -> None:
    schemas = data.draw(st.lists(PARAMETERS, min_size=1, max_size=2), "parameters")
    choice, is_single = data.draw(st.sampled_from(CHOICES), "choice"), data.draw(st.booleans(), "single")
    is_strict = data.draw(st.booleans(), "strict") or choice == ToolChoice()
    given = [tool(one, schema, strict=is_strict) for one, schema in zip(FUNCTIONS, schemas, strict=False)]
    try:
        made = made_of(name, *given, by_token=by_token, choice=choice, is_single=is_single)
        start = vocabulary_of(name, by_token=by_token).compile(made.grammar)
    except RequestError as error:
        if not is_strict:
            raise
        event(f"refused: {error.message[-60:]}")
        return
    before = f"{SAID}a b<|end|><|start|>assistant" if name == "harmony" else "a b\n"
    lead = data.draw(st.sampled_from(["", before + made.mark, made.mark]), "lead") if made.mark else ""
    said = drawn(name, start, data.draw(st.integers(0, 2**32), "seed"), by_token=by_token, lead=lead)
    if said is None:
        event("too long")
        return
    events = read_back(name, said, given, by_token=by_token, sizes=data.draw(SIZES, "sizes"), is_single=is_single)
    found = list(called(events).values())
    event(f"calls: {min(len(found), 3)}")
    assert len(found) >= (choice.is_required or bool(lead))
    assert len(found) <= 1 or not is_single
    content = "".join(each.text for each in events if each.kind is Kind.CONTENT)
    assert not (content and choice.is_required), content
    for _, function, arguments in found:
        assert function in (choice.names or FUNCTIONS[: len(given)])
        if not made.not_held:
            jsonschema.validate(json.loads(arguments), schemas[FUNCTIONS.index(function)])


TEXTS = Grammar.of("json", json.dumps({"type": "object", "properties": {"a": {"enum": ["<b>", 5]}}, "required": ["a"]}))


@pytest.mark.parametrize(("name", "by_token"), [*in_turn(HELD, [True, False]), ("harmony", True)])
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_reply_beside_a_format_is_a_text_of_it_or_calls(name: str, by_token: bool, data: st.DataObject) -> None:
    given = [tool("look", {"type": "object", "properties": {"text": {"type": "string", "maxLength": 9}}})]
    is_single = data.draw(st.booleans(), "single")
    chat = chat_of([HI], tools=given, is_single=is_single)
    made = ToolGrammars(abilities_of(name, by_token=by_token)).of(chat, TEXTS)
    assert made is not None and not made.not_held
    start = vocabulary_of(name, by_token=by_token).compile(made.grammar)
    is_call = data.draw(st.booleans(), "call")
    said = drawn(
        name, start, data.draw(st.integers(0, 2**32), "seed"), by_token=by_token, lead=made.mark if is_call else "{"
    )
    if said is None:
        return
    events = read_back(name, said, given, by_token=by_token, sizes=data.draw(SIZES, "sizes"), is_single=is_single)
    content = "".join(each.text for each in events if each.kind is Kind.CONTENT)
    found = list(called(events).values())
    assert bool(found) is is_call and not (found and content)
    if not is_call:
        assert next(iter(json.loads(content).values())) in ("<b>", 5)
    for _, function, arguments in found:
        assert function == "look"
        jsonschema.validate(json.loads(arguments), given[0]["function"]["parameters"])


def test_a_format_stays_alone_where_no_call_can_be_read() -> None:
    abilities, chat = abilities_of("hermes", by_token=True), chat_of([HI], tools=[tool()])
    assert ToolGrammars(abilities).of(chat_of([HI]), TEXTS) is None
    assert ToolGrammars(abilities).of(msgspec.structs.replace(chat, continue_final_message=True), TEXTS) is None
    assert ToolGrammars(abilities_of("harmony", by_token=False)).of(chat, TEXTS) is None


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_calls_as_a_template_shows_them_are_of_the_grammar(name: str, by_token: bool) -> None:
    """So that a model is not led away from the spelling that it knows."""
    properties = {"text": {"type": "string"}, "number": {"type": "integer"}, "more": {"type": "object"}}
    given = [tool("look", {"type": "object", "properties": properties}), tool("rest")]
    calls = [
        ("look", {"text": "a\n</b> é", "number": -5, "more": {"b": [1, None]}}),
        ("rest", {}),
        ("look", {"text": ""}),
    ]
    template = template_of(name)
    user = {"role": "user", "content": "Hi"}
    for some in (calls[:1], calls):
        message = {"role": "assistant", "content": ""} | {
            "tool_calls": [{"type": "function", "function": {"name": one, "arguments": value}} for one, value in some]
        }
        whole = template.render(chat_of([user, message], add_generation_prompt=False))
        reply = whole.removeprefix(template.render(chat_of([user]))).removesuffix("<|end|>")
        reply = re.sub(r"^\s*(<think>)?\s*</think>\n*", "", reply)
        for fields in ({"choice": ToolChoice(True)}, {"choice": ToolChoice(False, ("look", "rest"))}):
            assert takes(name, made_of(name, *given, by_token=by_token, **fields), reply, by_token=by_token), (
                fields,
                reply,
            )
        if len(some) == 1:
            assert takes(name, made_of(name, *given, by_token=by_token, is_single=True), reply, by_token=by_token)
        else:
            assert not takes(name, made_of(name, *given, by_token=by_token, is_single=True), reply, by_token=by_token)
        assert not takes(name, made_of(name, given[1], by_token=by_token), reply, by_token=by_token), "another function"


def test_replies_are_free_where_nothing_is_asked_for() -> None:
    for chat in (chat_of([HI]), chat_of([HI], tools=[tool()])):
        assert ToolGrammars(abilities_of("hermes", by_token=True)).of(chat) is None


@pytest.mark.parametrize("name", HELD)
def test_text_is_free_up_to_a_mark_and_no_mark_is_text(name: str) -> None:
    made = made_of(name, tool(strict=True), choice=ToolChoice())
    others = [
        mark
        for mark in marks_of(BY_NAME[name])
        if mark not in made.mark and tokenizer_of(name, by_token=True).encode(mark, add_special_tokens=False).size == 1
    ]
    assert takes(name, made, "Well: a < b, [1] and \n\n{é}!")
    assert not takes(name, made, f"Well {made.mark}")
    assert not takes(name, made, f"Well {made.mark} no")
    for mark in others:
        assert not takes(name, made, f"Well {mark}"), mark


def test_an_object_that_would_be_a_call_without_a_mark_is_no_text() -> None:
    made = made_of("llama3_json", tool(strict=True), choice=ToolChoice())
    assert takes("llama3_json", made, 'It is {"a": 1}')
    assert not takes("llama3_json", made, ' {"a": 1}')
    assert takes("llama3_json", made, '{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}')


SCHEMAS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string"}, ["", "5", "a\n\nb", "null"], []),
    ({"type": "string", "pattern": "^a|b$"}, ["x"], []),  # it is not held
    ({"type": "string", "pattern": "a/b\\$"}, ["xa/b$", "a/b$\n"], ["a/b"]),
    ({"enum": ["a/b", "", 5]}, ["a/b", "", "5"], ["b", "6"]),
    ({"type": ["string", "null"]}, ["x", "null", "55"], []),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, ["x", "5x"], ["5", "2"]),
    ({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 3}]}, ["auto", "5"], ["2", "x"]),
    ({"$ref": "#/$defs/colour"}, ["red"], ["blue"]),
    ({"allOf": [{"$ref": "#/$defs/colour"}], "description": "d"}, ["red"], ["blue"]),
    ({}, ["x", "5", "null", '{"a": 1}'], ["{a"]),
    ({"type": "integer"}, ["5"], ["x", "5.5"]),
]


@pytest.mark.parametrize("name", UNTYPED)
@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=str)
def test_values_without_quotes_are_of_their_schema(
    name: str, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    defs = {"colour": {"enum": ["red", "green"]}}
    made = made_of(
        name, tool("look", {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": defs})
    )
    head, tail = around(name)
    for texts, expected in ((good, True), (bad, False)):
        for text in texts:
            assert takes(name, made, head + text + tail) is expected, text


def around(name: str) -> tuple[str, str]:
    """The texts before and after the one argument of a call."""
    row = BY_NAME[name]
    lines = "\n" * row.value_lines
    key = f"{row.key[0]}v{row.key_type and row.key_type + 'true'}{row.key[1]}"
    head = f"{row.section[0]}{row.call[0]}look{row.name_ends[0]}{key}{row.value[0]}{lines}"
    return head, f"{lines}{row.value[1]}{row.end}{row.call[1]}{row.section[1]}"


@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": "integer"}, {"anyOf": [{"enum": ["5"]}, {"type": "integer"}]}], ids=str
)
@pytest.mark.parametrize("by_token", [False, True])
def test_a_value_whose_mark_tells_its_type_is_of_it(by_token: bool, schema: dict[str, Any]) -> None:
    given = [tool("look", {"type": "object", "properties": {"v": schema}, "required": ["v"]})]
    made, (head, tail) = made_of("deepseek_v32", *given, by_token=by_token), around("deepseek_v32")
    for is_text in (True, False):
        text = (head if is_text else head.replace('"true"', '"false"')) + "5" + tail
        said = tokenizer_of("deepseek_v32", by_token=by_token).encode(text, add_special_tokens=False).tolist()
        events = read_back("deepseek_v32", said, given, by_token=by_token, sizes=[], is_single=True)
        ((_, _, arguments),) = called(events).values()
        value = json.loads(arguments)["v"]
        assert value == ("5" if is_text else 5)
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert takes("deepseek_v32", made, text, by_token=by_token) is is_valid, text
    assert not takes("deepseek_v32", made, head.replace('"true"', '"false"') + '"5"' + tail, by_token=by_token)


@pytest.mark.parametrize("schema", [{"type": "string"}, {}], ids=str)
@pytest.mark.parametrize("name", TAGGED)
def test_a_text_without_quotes_has_no_mark_that_would_end_it(name: str, schema: dict[str, Any]) -> None:
    """The reader would take what follows for another argument."""
    made = made_of(name, tool("look", {"type": "object", "properties": {"v": schema}}), by_token=False)
    (head, tail), row = around(name), BY_NAME[name]
    assert takes(name, made, f"{head}x < y{tail}", by_token=False)
    for text in (f"x{row.value[1]}y", f"x{row.value[1]}\n{row.key[0]}w{row.key[1]}{row.value[0]}y"):
        assert not takes(name, made, head + text + tail, by_token=False)


NOT_HELD = {"type": "object", "properties": {"v": {"type": "string", "format": "date"}}}


@pytest.mark.parametrize("name", TAGGED)
def test_what_is_not_held_is_told_or_refused(name: str) -> None:
    assert made_of(name, tool("look", NOT_HELD)).not_held == ["look: v: format"]
    with pytest.raises(RequestError, match="strict, but calls of this model cannot hold v: format") as caught:
        made_of(name, tool("look", NOT_HELD, strict=True))
    assert caught.value.param == "tools[0].function.parameters"


def test_json_is_held_to_the_letter_if_it_is_strict() -> None:
    schema = {"type": "object", "properties": {"v": {"type": "string", "format": "colour"}}}
    compile_it = vocabulary_of("hermes", by_token=True).compile
    assert "colour" in compile_it(made_of("hermes", tool("look", schema)).grammar).warnings[0]
    with pytest.raises(RequestError, match="colour"):
        compile_it(made_of("hermes", tool("look", schema, strict=True)).grammar)
    schema["x-guidance"] = {"lenient": True}
    with pytest.raises(RequestError, match="colour"):
        compile_it(made_of("hermes", tool("look", schema, strict=True)).grammar)


@pytest.mark.parametrize("name", HELD)
def test_a_name_that_the_reader_would_not_read_is_refused(name: str) -> None:
    for bad in ("a b", "", "x" * 257, "a<b", *(mark for mark in BY_NAME[name].name_ends if mark.strip())):
        with pytest.raises(RequestError) as caught:
            made_of(name, tool("look"), tool(bad))
        assert caught.value.param == "tools[1].function.name"


def test_schemas_are_bounded_in_size_and_alternatives() -> None:
    with pytest.raises(RequestError, match=str(bounds.MAX_SCHEMA_BYTES)) as caught:
        made_of("hermes", *(tool(f"f{index}", {"enum": ["x" * 3000]}) for index in range(100)))
    assert caught.value.param == "tools"
    twice = {f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 4} for index in range(30)}
    parameters = {"properties": {"v": {"$ref": "#/$defs/d0"}}, "$defs": twice | {"d30": {}}}
    with pytest.raises(RequestError, match="alternatives") as caught:
        made_of("glm", tool("look", parameters))
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"template": tiny_text.TEMPLATE}, "does not show tools"),
        ({"reply_format": "none"}, "is not known"),
        ({"continue_final_message": True}, "tool_choice and continue_final_message"),
    ],
)
def test_calls_that_no_reply_can_have_are_refused(fields: dict[str, Any], told: str) -> None:
    template = fields.pop("template", (TEMPLATES / "hermes.jinja").read_text())
    made = Abilities(
        tokenizer_of("hermes", by_token=True), token_bytes("hermes", by_token=True), ChatTemplate(template),
        fields.pop("reply_format", "auto"),
    )  # fmt: skip
    with pytest.raises(RequestError, match=told) as caught:
        ToolGrammars(made).of(Conversation(turns=(), tools=[tool()], choice=ToolChoice(True), **fields))
    assert caught.value.param == "tool_choice"


def test_each_mark_that_is_a_token_is_spelled_by_it() -> None:
    text = made_of("kimi_k2", tool()).grammar.text
    assert not re.search("<\\|", text)
    assert len(set(re.findall(r"<\[\d+\]>", text))) == 5


@pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>so: {}<|end|><|start|>assistant"])
def test_a_call_that_is_a_message_follows_a_thought_and_ends_the_reply(thought: str) -> None:
    given = [tool("look", {"type": "object", "properties": {"text": {"type": "string"}}}, strict=True), tool("rest")]
    template, user = template_of("harmony"), {"role": "user", "content": "Hi"}
    call = {"type": "function", "function": {"name": "look", "arguments": {"text": "a"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = template.render(chat_of([user, message], add_generation_prompt=False))
    reply = thought + whole.removeprefix(template.render(chat_of([user])))
    required, named, free = (
        made_of("harmony", *given, choice=each) for each in (CHOICES[0], ToolChoice(True, ("rest",)), ToolChoice())
    )
    assert takes("harmony", required, reply) and takes("harmony", free, reply)
    assert not takes("harmony", required, reply + "<|start|>assistant" + reply)
    assert not takes("harmony", named, reply) and takes(
        "harmony", named, reply.replace("look", "rest").replace('"text": "a"', "")
    )
    for text in ("Yes.", f"{SAID}Let me look.", thought + "<|channel|>final<|message|>Yes."):
        assert takes("harmony", free, text) and not takes("harmony", required, text)
    assert not takes("harmony", free, reply.replace('"a"', "5"))
    assert takes("harmony", free, f"{SAID}Let me look.<|end|><|start|>assistant{reply}")


def test_no_call_is_required_of_messages_whose_headers_are_text() -> None:
    name = "harmony"
    made = abilities_of(name, by_token=False)
    with pytest.raises(RequestError, match="marks of its form, harmony, are no tokens of this model"):
        ToolGrammars(made).of(chat_of([HI], tools=[tool()], choice=ToolChoice(True)))
    assert ToolGrammars(made).of(chat_of([HI], tools=[tool()], choice=ToolChoice(strict=("look",)))) is None


WRONG = [None, 1, -1, 1.5, "x", [], {}, True, [1], [None], [{}], {"a": 1}]
WORDS = ["properties", "required", "additionalProperties", "$ref", "allOf", "anyOf", "enum", "const", "type"]
OF_TEXTS = ["minLength", "maxLength", "pattern", "format", "enum", "not"]


@pytest.mark.parametrize("word", [*WORDS, *OF_TEXTS])
@pytest.mark.parametrize("name", TAGGED)
def test_a_keyword_of_another_type_is_the_callers_fault(name: str, word: str) -> None:
    refused = list[str | None]()
    for value in WRONG:
        text = {"type": "string", word: value}
        for parameters in (
            {word: value},
            {"properties": {"a": {word: value}}, "required": ["a"]},
            {"properties": {"a": text}},
            {"properties": {"a": {"anyOf": [text, {"type": "integer"}]}}},
            {"properties": {}, "additionalProperties": text},
        ):
            try:
                made_of(name, tool(parameters=parameters))
            except RequestError as error:
                refused.append(error.param)
    is_checked = word in ("properties", "required", "enum", "minLength", "maxLength", "pattern", "type")
    assert set(refused) == ({"tools[0].function.parameters"} if is_checked else set())


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("type_name", ["object", "string"])
def test_references_do_not_multiply_what_they_name(name: str, type_name: str) -> None:
    many, size = 10_000, 2_000_000  # 20 GB
    named = {"enum": ["x" * size]} if type_name == "string" else {"type": "object", "description": "x" * size}
    references = {f"a{i}": {"$ref": "#/$defs/a"} for i in range(many)}
    with pytest.raises(RequestError, match="references stand for what they name"):
        made_of(name, tool(parameters={"$defs": {"a": named}, "properties": references}))


@pytest.mark.parametrize("name", TAGGED)
def test_required_arguments_are_looked_up_not_searched(name: str) -> None:
    class Name(str):
        num_compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Name.num_compared += 1
            return str.__eq__(self, other)

    names = [Name(f"a{i}") for i in range(300)]
    schema = {"properties": {each: {"type": "integer"} for each in names}, "required": names[::-1]}
    syntax = abilities_of(name, by_token=True).syntax
    assert syntax is not None
    grammar_of_tools._written(syntax, chat_of([HI], tools=[tool(parameters=schema)], choice=CHOICES[0]))
    assert Name.num_compared < 300 * 30


def test_a_grammar_is_written_once_for_the_same_tools_and_anew_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the text depends on may be missing in what tools are known by."""
    written: list[str] = []
    real = grammar_of_tools._written

    def count(*given: Any, **fields: Any) -> ToolGrammar:
        written.append("")
        return real(*given, **fields)

    monkeypatch.setattr(grammar_of_tools, "_written", count)
    abilities = abilities_of("qwen3_coder", by_token=True)
    grammars, look = ToolGrammars(abilities), {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}
    swapped = {"type": "object", "properties": dict(reversed(look["properties"].items()))}
    given = [tool("look", look), tool("find", look)]
    chats = [
        chat_of([HI], tools=tools, choice=choice, is_single=is_single)
        for tools in (
            given,
            given[::-1],
            given[:1],
            [tool("look"), given[1]],
            [tool("look", swapped), given[1]],
            [tool("look", look | {"properties": {"a": {"const": 1}}}), given[1]],
            [tool("look", look | {"properties": {"a": {"const": 1.0}}}), given[1]],
            [tool("look", look | {"properties": {"a": {"const": True}}}), given[1]],
        )
        for choice in (*CHOICES[:3], ToolChoice(False, None, ("look",)))
        for is_single in (False, True)
    ]
    fresh = [ToolGrammars(abilities).of(chat) for chat in chats]
    written.clear()
    for chat, expected in zip(chats, fresh, strict=True):
        assert grammars.of(chat) == expected
        num_written = len(written)
        said_more = msgspec.structs.replace(
            chat, turns=chat_of([HI, HI]).turns, tools=json.loads(json.dumps(chat.tools))
        )
        assert grammars.of(said_more) == expected
        assert len(written) == num_written
    assert len(written) <= len(chats)
    free = next(chat for chat in chats if not chat.choice.is_required)
    assert grammars.of(free, TEXTS) == ToolGrammars(abilities).of(free, TEXTS) != grammars.of(free)


def test_the_grammars_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = ToolGrammars(abilities_of("hermes", by_token=True))
    chats = [chat_of([HI], tools=[tool(f"look{i}")], choice=CHOICES[0]) for i in range(MAX_KEPT + 1)]
    for chat in chats:
        grammars.of(chat)
        grammars.of(chats[0])  # used last
    assert len(grammars._kept) == MAX_KEPT
    monkeypatch.setattr(grammar_of_tools, "_written", None)
    assert grammars.of(chats[0]) is not None
    with pytest.raises(TypeError):
        grammars.of(chats[1])
