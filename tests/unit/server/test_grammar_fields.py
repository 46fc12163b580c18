"""Fields that constrain a reply: each spelling is one grammar, vetted once, that the engine gets; faults name their field."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from hiserve.core.request import Grammar
from hiserve.errors import RequestError
from hiserve.text.body.parser import QUICK_BYTES
from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.reply_formats import TEMPLATES
from tests.unit.server.conftest import TOKENIZER, Server, make_server, reply_script

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = Grammar.of("json", json.dumps(SCHEMA, separators=(",", ":")))
OBJECT = Grammar.of("json", '{"type":"object"}')
REGEX, CHOICE = Grammar.of("regex", "a+"), Grammar.of("choice", '["yes","no"]')
RULES = Grammar.of("ebnf", 'root ::= "a"')


def spaced(pattern: str) -> Grammar:
    """The grammar of the schema with other white space."""
    options = {"x-guidance": {"whitespace_pattern": pattern}}
    return Grammar.of("json", json.dumps(SCHEMA | options, separators=(",", ":")))


NAMED = {"name": "x", "schema": SCHEMA}
# Fields of /v1, and the grammar that they ask for.
SPELLINGS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, JSON),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True, "description": "d"}}}, JSON),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": {"type": "text"}}, None),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": json.dumps(SCHEMA)}, JSON),
    ({"guided_regex": "a+"}, REGEX),
    ({"guided_choice": ["yes", "no"]}, CHOICE),
    ({"guided_grammar": RULES.text}, RULES),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, REGEX),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICE),
    ({"structured_outputs": {"grammar": RULES.text}}, RULES),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, spaced("")),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, JSON),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ \\n]{0,4}"}}, spaced("[ \\n]{0,4}")),
    ({"guided_json": SCHEMA, "structured_outputs": {"disable_any_whitespace": True}}, spaced("")),
    ({"guided_json": SCHEMA | {"x-guidance": {"whitespace_pattern": "x"}}}, JSON),
    ({"regex": "a+"}, REGEX),
    ({"ebnf": RULES.text}, RULES),
    ({"regex": None, "guided_json": None, "response_format": None}, None),
]
NATIVE: list[tuple[dict[str, Any], Grammar]] = [
    ({"json_schema": json.dumps(SCHEMA)}, JSON),
    ({"json_schema": SCHEMA}, JSON),
    ({"regex": "a+"}, REGEX),
    ({"ebnf": RULES.text}, RULES),
]
FORMAT, SHAPED = "response_format.json_schema", "structured_outputs"
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "a", "guided_json": {}}, "guided_json", "regex and guided_json are two"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs.choice",
        "structured_outputs.regex and",
    ),
    ({"structured_outputs": {"disable_any_whitespace": True}}, f"{SHAPED}.disable_any_whitespace", "is of JSON"),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        f"{SHAPED}.disable_any_whitespace",
        "is of JSON",
    ),
    *(
        ({"structured_outputs": {"json": {}, "whitespace_pattern": pattern}}, f"{SHAPED}.whitespace_pattern", "such as")
        for pattern in ("a", "[", r"\s", " {9,1}", "(" * 300, "[^ ]", r'[ "]', "?")
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
        f"{SHAPED}.whitespace_pattern",
        "exclude each other",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        f"{SHAPED}.disable_additional_properties",
        "additionalProperties",
    ),
    ({"response_format": {"type": "json_schema"}}, FORMAT, "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, f"{FORMAT}.schema", "an object"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_object"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": 7}, "guided_json", "an object"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"guided_choice": "yes"}, "guided_choice", "a list"),
    ({"regex": 7}, "regex", "a string"),
    ({"regex": "a" * 8193}, "regex", "8192"),
    ({"ebnf": 'r ::= "a"\n' * 1001}, "ebnf", "1001 rules"),
    ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "262144"),
]


class Vetted:
    """Stands for ``Vetting``: takes every grammar but one.

    Attributes:
        seen: What was asked: grammar, field, whether it may be relaxed, caller.
        marks: The marks after which it is constrained.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[Grammar, str, bool, int]] = []
        self.marks: list[str] = []
        self.trials: dict[str, int] = {}

    async def check(
        self, grammar: Grammar, param: str, *, may_relax: bool = False, mark: str = "", caller: int
    ) -> tuple[Grammar, list[str]]:
        self.seen.append((grammar, param, may_relax, caller))
        self.marks.append(mark)
        if "refuse" in grammar.text:
            raise RequestError(f"{param} cannot be used as a grammar: no.", code="grammar_too_complex", param=param)
        if "broken" in grammar.text:
            raise RequestError(
                f"{param} cannot be used as a grammar: it is broken.", code="invalid_grammar", param=param
            )
        return grammar, ["Unknown\nformat: é"] if "colour" in grammar.text else []

    async def close(self) -> None:
        pass


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = make_server(FakeEngineClient(script=lambda prompt: reply_script()), vetting=Vetted())
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made


def last_grammar(server: Server) -> Grammar | None:
    grammar: Grammar | None = server.engine.seen[-1].sampling.grammar
    return grammar


@pytest.mark.parametrize(("fields", "grammar"), SPELLINGS, ids=str)
async def test_each_spelling_is_the_same_grammar(
    server: Server, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for call in (await server.chat("hi", **fields), await server.complete("hi", **fields)):
        assert call.status == 200, call.text
        assert last_grammar(server) == grammar
        assert "x-hiserve-warning" not in call.headers


@pytest.mark.parametrize(("fields", "grammar"), NATIVE, ids=str)
async def test_each_spelling_of_generate(server: Server, fields: dict[str, Any], grammar: Grammar) -> None:
    call = await server.post("/generate", {"text": "hi", "sampling_params": fields})
    assert call.status == 200, call.text
    assert last_grammar(server) == grammar


@pytest.mark.parametrize(("fields", "param", "told"), FAULTS, ids=lambda value: str(value)[:40])
async def test_a_fault_names_its_field_before_anything_is_tried(
    server: Server, fields: dict[str, Any], param: str, told: str
) -> None:
    call = await server.chat("hi", **fields)
    error = call.json["error"]
    assert (call.status, error["param"]) == (400, param), error
    assert told in error["message"]
    assert not server.engine.seen and not server.vetting.seen


async def test_a_refused_grammar_never_reaches_the_engine(server: Server) -> None:
    calls = [
        await server.chat("hi", guided_regex="refuse"),
        await server.complete("hi", structured_outputs={"regex": "refuse"}),
        await server.post("/generate", {"text": "hi", "sampling_params": {"regex": "refuse"}}),
    ]
    errors = [call.json["error"] for call in calls]
    assert [call.status for call in calls] == [400] * 3
    assert [error["param"] for error in errors] == ["guided_regex", "structured_outputs.regex", "sampling_params.regex"]
    assert {error["code"] for error in errors} == {"grammar_too_complex"}
    assert not server.engine.seen


async def test_only_strict_holds_a_schema_to_the_letter_and_others_are_warned(server: Server) -> None:
    schema = {"type": "string", "format": "colour"}
    for strict, may_relax in ((True, False), (False, True), (None, True)):
        named = {"name": "x", "schema": schema, "strict": strict}
        call = await server.chat("hi", response_format={"type": "json_schema", "json_schema": named})
        assert server.vetting.seen[-1][1:3] == (f"{FORMAT}.schema", may_relax)
        assert call.headers["x-hiserve-warning"] == f"{FORMAT}.schema is not held in full: Unknown format: ?"
    streamed = await server.chat("hi", guided_json=schema, stream=True)
    assert "colour" in server.vetting.seen[-1][0].text
    assert streamed.headers["x-hiserve-warning"].startswith("guided_json is not held in full")


async def test_all_choices_of_a_reply_have_the_grammar_and_it_is_vetted_once(server: Server) -> None:
    call = await server.chat("hi", regex="a+", n=3)
    assert call.status == 200
    assert [seen.sampling.grammar for seen in server.engine.seen] == [REGEX] * 3
    assert len(server.vetting.seen) == 1


async def test_a_large_grammar_is_not_copied_to_many_choices(server: Server) -> None:
    """256 KiB of it would be a gibibyte for the 4,096 choices that a request may have."""
    schema = {"enum": ["x" * 200_000]}
    calls = [
        await server.complete(["Hi"] * 64, n=2, guided_json=schema),
        await server.post("/generate", {"text": ["Hi"] * 90, "sampling_params": {"json_schema": schema}}),
    ]
    for call, param in zip(calls, ("guided_json", "sampling_params.json_schema"), strict=True):
        assert (call.status, call.json["error"]["param"]) == (400, param)
        assert "choices in all" in call.json["error"]["message"]
    assert not server.engine.seen and not server.vetting.seen
    assert (await server.complete(["Hi"] * 40, n=2, guided_json=schema)).status == 200


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": name == "look"}}
    for name in ("look", "find")
]
UNKNOWN = {"type": "function", "function": {"name": "x"}}
NAMED_TOOL = {"type": "function", "function": {"name": "find"}}
SOME = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED_TOOL]}}


@asynccontextmanager
async def with_tools(text: str = "", template: str = "") -> AsyncIterator[Server]:
    """A server whose template shows tools, and whose model replies with a text."""
    ids = [*TOKENIZER.encode(text, add_special_tokens=False).tolist(), tiny_text.END]
    shown = template or (TEMPLATES / "hermes.jinja").read_text()
    made = make_server(FakeEngineClient(script=lambda _: [ids]), template=shown, vetting=Vetted())
    made.engine.max_model_len = 4096
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        yield made


@pytest.mark.parametrize(
    ("choice", "names", "param", "mark"),
    [
        ("required", "look find", "tool_choice", ""),
        (NAMED_TOOL, "find", "tool_choice", ""),
        (SOME, "find", "tools", "<tool_call>"),
        ("auto", "look find", "tools", "<tool_call>"),
        (None, "look find", "tools", "<tool_call>"),
    ],
)
async def test_tools_are_a_grammar(choice: Any, names: str, param: str, mark: str) -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call>'
    async with with_tools(call) as server:
        reply = await server.chat("hi", tools=TOOLS, tool_choice=choice)
        assert reply.json["choices"][0]["finish_reason"] == "tool_calls"
        grammar = last_grammar(server)
    assert grammar is not None and grammar.kind == "lark"
    assert re.findall(r'"name\\": \\"(\w+)', grammar.text) == names.split()
    assert server.vetting.seen[-1][:2] == (grammar, param)
    assert server.vetting.marks == [mark]


def described(word: str, *, strict: bool = False) -> dict[str, Any]:
    parameters = {"type": "object", "description": word}
    return {"type": "function", "function": {"name": word, "parameters": parameters, "strict": strict}}


@pytest.mark.parametrize(
    ("fields", "param", "num_tried"),
    [
        ({"tool_choice": "required"}, "tools[2].function.parameters", 4),
        ({"tool_choice": {"type": "function", "function": {"name": "broken"}}}, "tools[2].function.parameters", 2),
        ({"tools": [*TOOLS, described("broken", strict=True)]}, "tools[2].function.parameters", 4),
        ({"response_format": {"type": "json_object"}}, "tools[2].function.parameters", 4),
        ({"tools": [*TOOLS, described("refuse")], "tool_choice": "required"}, "tool_choice", 1),
        ({"tools": [described("refuse")], "tool_choice": "required"}, "tools[0].function.parameters", 1),
    ],
)
async def test_a_tool_whose_schema_is_broken_is_named_whichever_field_forces_it(
    fields: dict[str, Any], param: str, num_tried: int
) -> None:
    async with with_tools() as server:
        call = await server.chat("hi", **{"tools": [*TOOLS, described("broken")]} | fields)
        error = call.json["error"]
        assert (call.status, error["param"]) == (400, param), error
        assert error["message"].startswith(f"{param} cannot be used as a grammar: ")
        assert len(server.vetting.seen) == num_tried and not server.engine.seen


@pytest.mark.parametrize("place", [0, 15, 16, 31])
async def test_the_broken_one_of_many_tools_is_found_by_halves(place: int) -> None:
    tools = [described("broken" if index == place else f"sound{index}") for index in range(32)]
    async with with_tools() as server:
        call = await server.chat("hi", tools=tools, tool_choice="required")
        assert call.json["error"]["param"] == f"tools[{place}].function.parameters", call.text
        assert len(server.vetting.seen) == 1 + 5 + 1  # all, log2(32) halves, the one that is left


async def test_a_tool_that_nothing_forces_may_have_a_broken_schema() -> None:
    async with with_tools() as server:
        assert (await server.chat("hi", tools=[described("broken")])).status == 200


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": TOOLS[1:]}, {"tools": []}])
async def test_replies_are_free_where_no_tool_is_strict_and_none_must_be_called(fields: dict[str, Any]) -> None:
    async with with_tools() as server:
        assert (await server.chat("hi", **{"tools": TOOLS, **fields})).status == 200
        assert last_grammar(server) is None


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"tools": []}, "tool_choice", "tools is empty"),
        ({"tools": [], "tool_choice": NAMED_TOOL}, "tool_choice", "none of tools"),
        (
            {"tool_choice": SOME | {"allowed_tools": {"mode": "auto", "tools": [NAMED_TOOL, UNKNOWN]}}},
            "tool_choice.allowed_tools.tools[1]",
            "'x'",
        ),
        ({"regex": "a"}, "tool_choice", "regex and tool_choice are two"),
        ({"guided_json": SCHEMA}, "tool_choice", "guided_json and tool_choice are two"),
        (
            {"regex": "a", "response_format": {"type": "json_object"}},
            "response_format",
            "regex and response_format are two",
        ),
        ({"tool_choice": UNKNOWN}, "tool_choice", "none of tools"),
        ({"continue_final_message": True}, "tool_choice", "continue_final_message"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "a b"),
    ],
)
async def test_calls_that_cannot_be_required_are_refused(fields: dict[str, Any], param: str, told: str) -> None:
    async with with_tools() as server:
        call = await server.chat("hi", **{"tools": TOOLS, "tool_choice": "required", **fields})
        assert (call.status, call.json["error"]["param"]) == (400, param), call.text
        assert told in call.json["error"]["message"]
        assert not server.engine.seen and not server.vetting.seen


@pytest.mark.parametrize("choice", ["required", NAMED_TOOL])
async def test_a_format_is_of_the_content_which_a_call_that_must_be_made_does_not_have(choice: Any) -> None:
    """OpenAI's API answers so, and instructor sends both; the schema need not be that of the tool."""
    other = {"type": "object", "properties": {"b": {"type": "string"}}, "additionalProperties": False}
    spelled = {"type": "json_schema", "json_schema": {"name": "x", "schema": other, "strict": True}}
    async with with_tools() as server:
        for form in (None, {"type": "text"}, {"type": "json_object"}, spelled):
            call = await server.chat("hi", tools=TOOLS, tool_choice=choice, response_format=form)
            assert call.status == 200, call.text
        grammar, *others = (seen.sampling.grammar for seen in server.engine.seen)
        assert grammar is not None and others == [grammar] * 3
        assert {asked[1] for asked in server.vetting.seen} == {"tool_choice"}


async def test_a_call_cannot_be_required_of_a_model_that_sees_no_tools() -> None:
    async with with_tools(template=tiny_text.TEMPLATE) as server:
        call = await server.chat("hi", tools=TOOLS, tool_choice="required")
        assert (call.status, call.json["error"]["param"]) == (400, "tool_choice")
        assert "tools" in call.json["error"]["message"]
        assert (await server.chat("hi", tools=TOOLS)).status == 200
        assert last_grammar(server) is None, "a model that cannot call needs no mask"


async def test_beside_tools_that_need_not_be_called_a_reply_is_of_the_format_or_calls() -> None:
    async with with_tools() as server:
        assert (await server.chat("hi", tools=TOOLS, response_format={"type": "json_object"})).status == 200
        grammar = last_grammar(server)
        assert grammar is not None and grammar.kind == "either"
        texts, (kind, calls) = json.loads(grammar.text)
        assert texts == list(msgspec.structs.astuple(OBJECT)[:2])
        assert kind == "lark" and '"name\\": \\"' in calls
        assert server.vetting.marks == ["<tool_call>"]


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_a_regex_is_of_the_whole_reply_beside_tools_too(choice: str) -> None:
    """It may spell calls itself."""
    async with with_tools() as server:
        assert (await server.chat("hi", tools=TOOLS, regex="a+", tool_choice=choice)).status == 200
        assert last_grammar(server) == REGEX


async def test_numbers_of_a_large_body_stay_numbers(server: Server) -> None:
    """Such bodies are read in another process, which turns lists of token ids into arrays."""
    schema = {"enum": list(range(20_000))}
    call = await server.complete("Hi", guided_json=schema, user="x" * QUICK_BYTES)
    assert call.status == 200, call.text[:300]
    assert json.loads(last_grammar(server).text) == schema  # type: ignore[union-attr]


async def test_where_the_prompt_opens_a_thought_the_grammar_holds_behind_it() -> None:
    """Otherwise the whole reply, of the grammar, would be read as a thought. The grammar is vetted with the thought."""
    template = (
        "{{ messages[-1].content }}{% if enable_thinking is not false %}<think>\n{% else %}<think></think>{% endif %}"
    )
    made = make_server(FakeEngineClient(script=lambda prompt: reply_script()), template=template, vetting=Vetted())
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        assert (await made.chat("hi", regex="a+")).status == 200
        thinking = Grammar.of("regex", "a+", "</think>")
        assert last_grammar(made) == thinking != REGEX
        assert (await made.chat("hi", regex="a+", chat_template_kwargs={"enable_thinking": False})).status == 200
        assert last_grammar(made) == REGEX
        assert (await made.complete("hi<think>\n", regex="a+")).status == 200
        assert last_grammar(made) == REGEX
    assert [seen[0] for seen in made.vetting.seen] == [thinking, REGEX, REGEX]
