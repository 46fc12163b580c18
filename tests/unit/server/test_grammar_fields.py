"""Fields that constrain a reply: each spelling is one grammar, vetted once, that the engine gets; faults name their field."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hiserve.core.request import Grammar
from hiserve.errors import RequestError
from hiserve.text.body_parser import QUICK_BYTES
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import Server, make_server, reply_script

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = Grammar.of("json", json.dumps(SCHEMA, separators=(",", ":")))
OBJECT = Grammar.of("json", '{"type":"object"}')
REGEX, CHOICE = Grammar.of("regex", "a+"), Grammar.of("choice", '["yes","no"]')
RULES = Grammar.of("ebnf", 'root ::= "a"')
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
FORMAT = "response_format.json_schema"
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "a", "guided_json": {}}, "guided_json", "regex and guided_json are two"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs.choice",
        "structured_outputs.regex and",
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
    """

    def __init__(self) -> None:
        self.seen: list[tuple[Grammar, str, bool, int]] = []

    async def check(self, grammar: Grammar, param: str, *, may_relax: bool, caller: int) -> tuple[Grammar, list[str]]:
        self.seen.append((grammar, param, may_relax, caller))
        if "refuse" in grammar.text:
            raise RequestError(f"{param} cannot be used as a grammar: no.", code="grammar_too_complex", param=param)
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


async def test_numbers_of_a_large_body_stay_numbers(server: Server) -> None:
    """Such bodies are read in another process, which turns lists of token ids into arrays."""
    schema = {"enum": list(range(20_000))}
    call = await server.complete("Hi", guided_json=schema, user="x" * QUICK_BYTES)
    assert call.status == 200, call.text[:300]
    assert json.loads(last_grammar(server).text) == schema  # type: ignore[union-attr]


async def test_where_the_prompt_opens_a_thought_the_grammar_holds_behind_it() -> None:
    """Otherwise the whole reply, of the grammar, would be read as a thought. What is vetted is the grammar alone."""
    template = (
        "{{ messages[-1].content }}{% if enable_thinking is not false %}<think>\n{% else %}<think></think>{% endif %}"
    )
    made = make_server(FakeEngineClient(script=lambda prompt: reply_script()), template=template, vetting=Vetted())
    async with made.app.router.lifespan_context(made.app):
        await made.handle.wait_open()
        assert (await made.chat("hi", regex="a+")).status == 200
        assert last_grammar(made) == Grammar.of("regex", "a+", "</think>") != REGEX
        assert (await made.chat("hi", regex="a+", chat_template_kwargs={"enable_thinking": False})).status == 200
        assert last_grammar(made) == REGEX
        assert (await made.complete("hi<think>\n", regex="a+")).status == 200
        assert last_grammar(made) == REGEX
    assert [seen[0] for seen in made.vetting.seen] == [REGEX] * 3
