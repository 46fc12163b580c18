"""``/v1/responses`` on a live server with the embedded model, as OpenAI's client asks it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio

from hiserve.models.model_config import NANO
from tests.e2e.live import DRAFTS, Live, serve
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.widening import in_turn

PAGE = 16
QUESTION = "I would like a small latte with oat milk, please. Can you also find me a table for two tonight?"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    flags = ("--cpu-threads", "1", "--page-size", str(PAGE), "--responses-store", f"sqlite:{folder / 'kept.db'}")
    with serve(folder, *flags, *DRAFTS) as running:
        yield running


@pytest_asyncio.fixture
async def client(live: Live) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def num_cached(reply: Any) -> int:
    return int(reply.usage.input_tokens_details.cached_tokens)


async def test_a_stream_adds_up_to_the_reply(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": NANO, "input": QUESTION, "max_output_tokens": 24, "temperature": 0}
    whole = await client.responses.create(**fields)
    events = [event async for event in await client.responses.create(**fields, stream=True)]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response  # type: ignore[union-attr]
    assert "".join(texts) == whole.output_text == last.output_text
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 24
    counted = await client.responses.input_tokens.count(model=NANO, input=QUESTION)
    assert counted.input_tokens == whole.usage.input_tokens


async def test_both_protocols_share_one_cache(client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You help with orders, tables and rides. " * 4},
        {"role": "user", "content": QUESTION},
    ]
    chat = await client.chat.completions.create(model=NANO, messages=messages, max_tokens=4)
    reply = await client.responses.create(
        model=NANO, instructions=messages[0]["content"], input=QUESTION, max_output_tokens=4
    )
    assert chat.usage is not None
    assert reply.usage is not None
    num_prompt = reply.usage.input_tokens
    assert chat.usage.prompt_tokens == num_prompt > 4 * PAGE
    assert num_cached(reply) == (num_prompt - 1) // PAGE * PAGE
    assert reply.usage.input_tokens_details.cache_write_tokens <= PAGE


@pytest.mark.parametrize("is_stored", [False, True])
async def test_the_next_turn_computes_what_is_new_and_two_pages_at_most(
    client: openai.AsyncOpenAI, is_stored: bool
) -> None:
    items: list[Any] = [{"role": "user", "content": f"{QUESTION} {is_stored}"}]
    before: Any = None
    for turn in range(3):
        new = items if not is_stored or before is None else items[-1:]
        reply = await client.responses.create(
            model=NANO,
            input=new,
            previous_response_id=before.id if is_stored and before else None,
            max_output_tokens=24,
            store=is_stored,
            extra_body={"seed": turn},
        )
        assert reply.usage is not None
        if before is not None:
            known = before.usage.input_tokens + before.usage.output_tokens
            assert num_cached(reply) >= known - 2 * PAGE, f"turn {turn}"
        before = reply
        items += [item.to_dict() for item in reply.output]
        items.append({"role": "user", "content": "And a muffin, please."})


TABLE = {
    "type": "function",
    "name": "find_table",
    "parameters": {
        "type": "object",
        "properties": {"people": {"enum": [2, 3, 4]}, "day": {"enum": ["today", "tomorrow"]}},
        "required": ["people", "day"],
        "additionalProperties": False,
    },
}


async def test_the_next_step_of_an_agent_computes_what_is_new_and_two_pages_at_most(
    client: openai.AsyncOpenAI,
) -> None:
    """The likeliest calls of the embedded model are in the form of its template, which the client spells otherwise."""
    fields: dict[str, Any] = {
        "model": NANO,
        "tools": [TABLE],
        "max_output_tokens": 512,
        "store": False,
        "temperature": 0,
    }
    for number in range(2):
        items: list[Any] = [{"role": "user", "content": f"{QUESTION} {number}"}]
        before: Any = None
        for step in range(3):
            reply = await client.responses.create(
                **fields,
                input=items,
                tool_choice="required",
                parallel_tool_calls=False,
            )
            (call,) = reply.output
            assert call.type == "function_call"
            jsonschema.validate(arguments := json.loads(call.arguments), TABLE["parameters"])
            if before is not None:
                assert num_cached(reply) >= before.input_tokens + before.output_tokens - 2 * PAGE
            before = reply.usage
            spelled = {**call.to_dict(), "arguments": json.dumps(arguments, separators=(",", ":"))}
            items += [spelled, {"type": "function_call_output", "call_id": call.call_id, "output": f"table {step}"}]


MOVE = r"(up|down) [1-9]( \"\w{2}\")?"
RULES = 'start: ("up" | "down") " " /[1-9]/ [more]\nmore: " \\"" LETTER ~ 2 "\\""\nLETTER: /\\w/'


@pytest.mark.parametrize(("syntax", "is_named"), in_turn(["regex", "lark"], [True, False]))
async def test_the_input_of_a_custom_tool_is_held_to_its_grammar(
    client: openai.AsyncOpenAI, syntax: str, is_named: bool
) -> None:
    choice: Any = {"type": "custom", "name": "move"} if is_named else "required"
    definition = {"regex": MOVE, "lark": RULES}[syntax]
    tool: Any = {
        "type": "custom",
        "name": "move",
        "format": {"type": "grammar", "syntax": syntax, "definition": definition},
    }
    for seed in range(3):
        reply = await client.responses.create(
            model=NANO,
            input=QUESTION,
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_output_tokens=512,
            extra_body={"seed": seed},
        )
        (call,) = reply.output
        assert call.type == "custom_tool_call"
        assert re.fullmatch(MOVE, call.input), call.input


async def test_a_reply_is_parsed(client: openai.AsyncOpenAI) -> None:
    class Order(pydantic.BaseModel):
        drink: Literal["latte", "tea"]
        number: Literal[1, 2, 3]

    reply = await client.responses.parse(model=NANO, input=QUESTION, text_format=Order)
    assert isinstance(reply.output_parsed, Order)


async def test_a_stored_response_is_there_until_it_is_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=NANO, input="Hi", max_output_tokens=4)
    assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model=NANO, input="Hi", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"
