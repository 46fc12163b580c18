"""langchain-openai: replies, streams, batches, tools, scores and errors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from hiserve.models.model_config import NANO
from tests.e2e.live import Live

PAGE = 16  # tokens, as the server has by default
QUESTION = "Can you book a table for two tonight?"


@pytest.fixture
def chat(live: Live) -> ChatOpenAI:
    return ChatOpenAI(
        model=NANO, base_url=f"{live.url}/v1", api_key="none", temperature=0, max_completion_tokens=24, max_retries=0
    )


def test_a_stream_adds_up_to_the_reply_with_its_usage(chat: ChatOpenAI) -> None:
    whole = chat.invoke([SystemMessage("You book tables."), HumanMessage(QUESTION)])
    chunks = list(chat.stream([SystemMessage("You book tables."), HumanMessage(QUESTION)], stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert whole.content
    assert total.content == whole.content
    assert whole.usage_metadata is not None
    assert total.usage_metadata is not None
    for usage in (whole.usage_metadata, total.usage_metadata):
        assert usage["output_tokens"] == whole.usage_metadata["output_tokens"] > 0
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert whole.response_metadata["finish_reason"] in ("stop", "length")


def test_a_later_turn_shows_the_cached_tokens(chat: ChatOpenAI) -> None:
    history: list[Any] = [HumanMessage(f"{QUESTION} {'It is for me and a friend of mine. ' * 4}")]
    history += [chat.invoke(history), HumanMessage("At seven, please.")]
    usage = chat.invoke(history).usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] > 0


async def test_a_batch_equals_its_single_replies(chat: ChatOpenAI) -> None:
    questions = [QUESTION, "Two coffees, please."]
    batch = await chat.abatch(questions)
    assert [reply.content for reply in batch] == [chat.invoke(question).content for question in questions]


def test_options_change_the_reply(chat: ChatOpenAI) -> None:
    whole = str(chat.invoke(QUESTION).content)
    stop = whole[len(whole) // 2]
    assert chat.invoke(QUESTION, stop=[stop]).content == whole[: whole.index(stop)]
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = scored.response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert "".join(entry["token"] for entry in entries).startswith(whole)


def test_a_tool_that_is_bound_is_called_and_its_answer_is_read(chat: ChatOpenAI) -> None:
    @tool
    def get_weather(city: str, date: str) -> str:
        """Get the weather."""
        return json.dumps({"temperature": 71, "chance_of_rain": 15, "city": city, "date": date})

    agent = chat.bind_tools([get_weather]).bind(max_completion_tokens=100)
    messages: list[Any] = [HumanMessage("What is the weather in San Jose on March 9th?")]
    asked = agent.invoke(messages)
    assert isinstance(asked, AIMessage) and asked.response_metadata["finish_reason"] == "tool_calls"
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "San Jose", "date": "March 9th"})
    reply = agent.invoke([*messages, asked, get_weather.invoke(call)])
    assert not reply.tool_calls and "71 degrees" in str(reply.content)
    assert reply.response_metadata["finish_reason"] == "stop"
    assert asked.usage_metadata is not None and reply.usage_metadata is not None
    assert reply.usage_metadata["input_token_details"]["cache_read"] >= asked.usage_metadata["total_tokens"] - PAGE


def test_a_text_model_completes(live: Live) -> None:
    model = OpenAI(model=NANO, base_url=f"{live.url}/v1", api_key="none", temperature=0, max_tokens=8, max_retries=0)
    text = model.invoke("Would you like")
    assert text == "".join(model.stream("Would you like"))
    assert text


def test_errors_are_the_clients_own(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt is too long") as long:
        chat.invoke(QUESTION * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        chat.bind(model="other").invoke(QUESTION)
