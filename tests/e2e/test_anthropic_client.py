"""The real Anthropic client against a live server on the embedded model, whose template shows thoughts and tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import pydantic
import pytest
import pytest_asyncio

from hiserve.models.model_config import NANO
from tests.e2e.live import DRAFTS, Live, serve
from tests.helpers.reply_formats import TEMPLATES
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.widening import in_turn

LOOK: Any = {
    "name": "look",
    "description": "Looks for something.",
    "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}},
}
WORDS = "I would like a small latte with oat milk, please."
# A thought and a call with odd white space, which the client does not return.
STEP = (
    r"<think>\n[a-z ]{5,30}\n</think>\n\n"
    r'<tool_call>\n\{"name": "look", "arguments": \{"where":  {1,3}"[a-z]{3,12}"\}\}\n</tool_call>'
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = ("--cpu-threads", "1", "--chat-template", str(TEMPLATES / "hermes.jinja"), "--seal-key", "a key", *DRAFTS)
    with serve(tmp_path_factory.mktemp("anthropic"), *flags) as running:
        yield running


@pytest_asyncio.fixture
async def client(live: Live) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def num_prompt(usage: anthropic.types.Usage) -> int:
    parts = (usage.input_tokens, usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0)
    assert min(parts) >= 0
    return sum(parts)


async def test_a_streamed_message_equals_the_whole_one_and_its_usage_sums(client: anthropic.AsyncAnthropic) -> None:
    asked: Any = {"model": NANO, "messages": [user(WORDS)], "max_tokens": 32, "system": "Be short."}
    asked["extra_body"] = {"temperature": 0}  # the client has left it out of its own fields
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    assert text
    assert whole.content[0].type == "text"
    assert whole.content[0].text == text
    assert (streamed.stop_reason, streamed.content[0].to_dict()["text"]) == (whole.stop_reason, text)
    assert streamed.id != whole.id
    counted = await client.messages.count_tokens(model=NANO, messages=asked["messages"], system=asked["system"])
    assert counted.input_tokens == num_prompt(whole.usage) == num_prompt(streamed.usage)
    assert whole.usage.output_tokens == streamed.usage.output_tokens <= 32


@pytest.mark.parametrize(("is_stream", "display"), in_turn([False, True], ["summarized", "omitted"]))
async def test_the_next_step_of_an_agent_computes_what_is_new(
    client: anthropic.AsyncAnthropic, live: Live, display: Literal["summarized", "omitted"], is_stream: bool
) -> None:
    """Thoughts and calls are sampled; the client sends them back as its own objects, thoughts shown or not."""
    page_size = live.info()["config"]["cache"]["page_size"]
    messages: list[Any] = [user(f"{WORDS} ({display}, {is_stream})")]
    history = 0
    for seed in range(4):
        asked: Any = {
            "model": NANO, "messages": messages, "tools": [LOOK], "max_tokens": 300,
            "thinking": {"type": "adaptive", "display": display}, "extra_body": {"regex": STEP, "seed": seed, "temperature": 1.2},
        }  # fmt: skip
        if is_stream:
            async with client.messages.stream(**asked) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
        thought, call = message.content
        assert (message.stop_reason, thought.type, call.type) == ("tool_use", "thinking", "tool_use")
        assert bool(thought.thinking) == (display == "summarized")
        new = num_prompt(message.usage) - history
        computed = num_prompt(message.usage) - message.usage.cache_read_input_tokens
        assert computed <= new + 2 * page_size, f"step {seed}: {computed} computed, {new} new"
        history = num_prompt(message.usage) + message.usage.output_tokens
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "nothing there"}
        messages += [{"role": "assistant", "content": message.content}, user([result])]


async def test_both_protocols_share_one_cache(client: anthropic.AsyncAnthropic, live: Live) -> None:
    page_size = live.info()["config"]["cache"]["page_size"]
    long = "The weather is fine, and so is the coffee. " * 20
    function = {"name": "look", "description": LOOK["description"], "parameters": LOOK["input_schema"]}
    chat = {
        "messages": [{"role": "system", "content": long}, user(WORDS)],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 8,
    }
    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as http:
        told = (await http.post("/v1/chat/completions", json=chat)).raise_for_status().json()["usage"]
        shown = {name: chat[name] for name in ("messages", "tools")}
        counted = (await http.post("/tokenize", json=shown)).raise_for_status().json()["count"]
    message = await client.messages.create(
        model=NANO, system=[{"type": "text", "text": long}], messages=[user(WORDS)], tools=[LOOK], max_tokens=8
    )
    assert num_prompt(message.usage) == counted == told["prompt_tokens"]
    assert (message.usage.cache_read_input_tokens or 0) >= counted - page_size
    assert (message.usage.cache_creation_input_tokens or 0) <= page_size, "the last token is computed, with its page"


async def test_structured_output_parses_into_the_clients_types(client: anthropic.AsyncAnthropic) -> None:
    class Order(pydantic.BaseModel):
        drink: Literal["latte", "mocha", "tea"]
        count: Literal[1, 2, 3]

    parsed = await client.messages.parse(
        model=NANO, messages=[user(WORDS)], max_tokens=200, output_format=Order, extra_body={"seed": 1}
    )
    assert parsed.stop_reason == "end_turn"
    assert isinstance(parsed.parsed_output, Order)


async def test_the_clients_own_loop_runs_tools(client: anthropic.AsyncAnthropic) -> None:
    """It begins a conversation that the server keeps, is told that there is none, and sends all of it."""
    seen: list[str] = []

    @anthropic.beta_async_tool
    async def look(where: str) -> str:
        """Looks for something.

        Args:
            where: A place.
        """
        seen.append(where)
        return "nothing there"

    runner = client.beta.messages.tool_runner(
        model=NANO, messages=[user(WORDS)], tools=[look], max_tokens=300, max_iterations=3, extra_body={"regex": STEP}
    )
    messages = [message async for message in runner]
    assert len(messages) == 3
    assert len(seen) >= 2
    assert all(place.isalpha() for place in seen)


async def test_a_prompt_that_is_too_long_is_told_with_its_numbers(client: anthropic.AsyncAnthropic, live: Live) -> None:
    most = live.info()["config"]["model"]["max_model_len"]
    messages: list[Any] = [user("coffee " * (2 * most))]
    counted = await client.messages.count_tokens(model=NANO, messages=messages)
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.create(model=NANO, messages=messages, max_tokens=32_000)
    told = json.loads(caught.value.response.text)["error"]["message"]
    assert told == f"prompt is too long: {counted.input_tokens} tokens > {most - 1} maximum"


async def test_seals_outlive_the_server_that_made_them(client: anthropic.AsyncAnthropic, tmp_path: Path) -> None:
    """Another server with the same key opens them; without it they are left out."""
    asked: Any = {"model": NANO, "max_tokens": 100, "tools": [LOOK], "extra_body": {"regex": STEP, "seed": 3}}
    message = await client.messages.create(
        **asked, messages=[user(WORDS)], thinking={"type": "adaptive", "display": "omitted"}
    )
    _, call = message.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "nothing"}  # type: ignore[union-attr]
    history: Any = [user(WORDS), {"role": "assistant", "content": message.content}, user([result])]
    counts = [(await client.messages.count_tokens(model=NANO, messages=history)).input_tokens]
    for number, flags in enumerate((("--seal-key", "a key"), ())):
        template = ("--cpu-threads", "1", "--chat-template", str(TEMPLATES / "hermes.jinja"))
        (folder := tmp_path / str(number)).mkdir()
        with serve(folder, *template, *flags) as other:
            counted = await client.with_options(base_url=other.url).messages.count_tokens(model=NANO, messages=history)
            counts.append(counted.input_tokens)
    assert counts[0] == counts[1] > counts[2] + 5


async def test_a_call_that_is_required_is_made(client: anthropic.AsyncAnthropic) -> None:
    order: Any = {
        "name": "order",
        "input_schema": {
            "type": "object",
            "properties": {"drink": {"enum": ["latte", "tea"]}, "number": {"enum": [1, 2]}},
            "required": ["drink", "number"],
            "additionalProperties": False,
        },
    }
    one = {"type": "any", "disable_parallel_tool_use": True}
    for seed, choice in enumerate((one, {"type": "tool", "name": "order"})):
        asked: Any = {"model": NANO, "tools": [order], "tool_choice": choice, "extra_body": {"seed": seed}}
        message = await client.messages.create(**asked, messages=[user(WORDS)], max_tokens=300)
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use"
        assert calls
        for call in calls:
            assert call.name == "order"
            assert call.input["drink"] in ("latte", "tea")
            assert call.input["number"] in (1, 2)
    none = await client.messages.create(
        model=NANO, tools=[order], tool_choice={"type": "none"}, messages=[user(WORDS)], max_tokens=20
    )
    assert not [block for block in none.content if block.type == "tool_use"]
