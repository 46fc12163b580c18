"""Calls that must be made, over HTTP with OpenAI's client and offline: their arguments are valid, whatever the model would say."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio

from hiserve import LLM, SamplingParams
from hiserve.core.request import Grammar
from hiserve.errors import RequestError
from hiserve.models.model_config import NANO
from hiserve.text.reader.buffer import called
from tests.e2e.live import Live, serve
from tests.helpers.cache_paths import SETTINGS
from tests.helpers.forks import forked_engines
from tests.helpers.grammars import TOOL_SCHEMA, TOOLS
from tests.helpers.waiting import PATIENCE_S

USER: Any = {"role": "user", "content": "Book a table for two in Boston, please."}
STRICT: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
FORMAT: Any = {"type": "json_object"}  # of contents, which these replies do not have
NAMED: Any = {"type": "function", "function": {"name": "book"}}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serve(tmp_path_factory.mktemp("live"), "--cpu-threads", "1") as running:
        yield running


@pytest_asyncio.fixture
async def client(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def check(calls: list[Any]) -> list[str]:
    """Checks the arguments of calls; returns their names."""
    for call in calls:
        value = json.loads(call.function.arguments)
        jsonschema.validate(value, TOOL_SCHEMA if call.function.name == "book" else {"maxProperties": 0})
    return [call.function.name for call in calls]


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_call_that_must_be_made_is_made_streamed_or_not(client: openai.AsyncOpenAI, seed: int) -> None:
    fields: dict[str, Any] = {"model": NANO, "messages": [USER], "tools": TOOLS, "seed": seed, "temperature": 1.0}
    for choice in ("required", NAMED):
        asked = fields | {"tool_choice": choice, "parallel_tool_calls": False, "response_format": FORMAT}
        (whole,) = (await client.chat.completions.create(**asked)).choices
        async with client.chat.completions.stream(**asked) as events:
            (streamed,) = (await events.get_final_completion()).choices
        for each in (whole, streamed):
            assert each.finish_reason == "tool_calls"
            assert not each.message.content
            names = check(each.message.tool_calls or [])
            assert len(names) == 1 and (choice == "required" or names == ["book"])
        told = [
            [(call.function.name, call.function.arguments) for call in each.message.tool_calls]
            for each in (whole, streamed)
        ]
        assert told[0] == told[1]


async def test_several_calls_are_cut_by_the_length_alone(client: openai.AsyncOpenAI) -> None:
    fields: Any = {"model": NANO, "messages": [USER], "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    (choice,) = (await client.chat.completions.create(**fields, max_tokens=200)).choices
    made = choice.message.tool_calls or []
    is_cut = choice.finish_reason == "length"
    assert made and choice.finish_reason in ("length", "tool_calls")
    check(made[:-1] if is_cut else made)


async def test_under_auto_text_is_free_beside_strict_tools(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": NANO, "messages": [USER], "temperature": 1.0, "max_tokens": 120}
    free = await client.chat.completions.create(**fields, seed=3, tools=TOOLS)
    strict = await client.chat.completions.create(**fields, seed=3, tools=STRICT)
    assert free.choices[0].message.content == strict.choices[0].message.content != "", "no call was begun"


def broken(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


JSON = {"type": "json_object"}
NOTHING = {"properties": {"n": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"extra_body": {"regex": "a"}}, "tool_choice"),
        ({"tools": [broken({"$ref": "#"})]}, "tools[0].function.parameters"),
        ({"tools": [broken({"properties": {"n": {"multipleOf": 1234567, "type": "integer"}}})]}, "tools[0].function.parameters"),
        ({"tools": [*TOOLS, broken({"properties": {"n": {"type": "strin"}}})]}, "tools[2].function.parameters"),
        ({"tools": [*TOOLS, broken({"properties": {"n": {"$ref": "http://a.b"}}})]}, "tools[2].function.parameters"),
        ({"tools": [*TOOLS, broken(NOTHING, strict=True)], "tool_choice": "auto"}, "tools[2].function.parameters"),
        ({"tools": [*TOOLS, broken(NOTHING)], "tool_choice": "auto", "response_format": JSON}, "tools[2].function.parameters"),
    ],
)  # fmt: skip
async def test_calls_that_cannot_be_made_are_refused(client: openai.AsyncOpenAI, fields: Any, param: str) -> None:
    asked: Any = {"model": NANO, "messages": [USER], "tools": TOOLS, "tool_choice": "required", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**asked)
    assert caught.value.param == param
    assert param in caught.value.message and not re.search(r"at \d+\(\d+\)", caught.value.message), "a place in rules"


async def test_a_tool_that_nothing_forces_may_have_a_broken_schema(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": NANO, "messages": [USER], "tools": [*TOOLS, broken(NOTHING)], "max_tokens": 8}
    reply = await client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert reply.choices[0].finish_reason == "length"


def test_offline_calls_are_made_and_grammars_that_kill_are_refused() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=120)
    with forked_engines(), LLM(**SETTINGS | {"max_model_len": 512}) as llm:
        for fields in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": NAMED}):
            (output,) = llm.chat([USER], sampling, tools=TOOLS, **fields)
            (reply,) = output.outputs
            ((_, name, arguments),) = called(reply.events).values()
            assert reply.finish_reason == "tool_calls" and reply.text == ""
            jsonschema.validate(json.loads(arguments), TOOL_SCHEMA if name == "book" else {"maxProperties": 0})
        with pytest.raises(RequestError, match="two grammars") as caught:
            llm.chat([USER], constrained(sampling, Grammar.of("regex", "a")), tools=TOOLS, tool_choice="required")
        assert caught.value.param == "tool_choice"
        for _ in range(3):  # nobody is refused for the grammars before
            with pytest.raises(RequestError, match="grammar cannot be used") as caught:
                llm.generate("Hi", constrained(sampling, Grammar.of("json", '{"type":"integer","multipleOf":1234567}')))
            assert caught.value.code == "grammar_too_complex"
        assert llm.generate("Hi", constrained(sampling, Grammar.of("choice", '["yes"]')))[0].outputs[0].text == "yes"


def constrained(sampling: SamplingParams, grammar: Grammar) -> SamplingParams:
    return SamplingParams(temperature=sampling.temperature, seed=sampling.seed, max_tokens=8, grammar=grammar)
