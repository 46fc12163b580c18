"""Agent libraries against a live server: each runs a tool, answers, and takes structured output, in the protocols that it speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest

from hiserve.models.model_config import NANO
from tests.clients.conftest import CALLS
from tests.clients.forcing import LAST, PAGE, check_step, counts
from tests.e2e.live import Live

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
QUESTION = "How is the weather in Oslo, please?"


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")  # else the model may go on with fields of its own
    drink: Literal["latte", "mocha", "tea"]
    size: Literal["small", "large"]
    count: Literal[1, 2, 3]


class Looking:
    """A tool, and where it looked."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def look(self, where: str) -> str:
        """Looks at the weather of a place.

        Args:
            where: The place.
        """
        self.seen.append(where)
        return f"rain in {where}"


def check(looking: Looking, live: Live, num_before: int, output: Any) -> None:
    """The tool ran once, its result led to the answer, and its step computed what was new."""
    assert looking.seen == [CALLS["look"]["where"]]
    assert output == LAST
    first, second = counts(live)[num_before:]
    check_step(first, second)


def chat_models(live: Live) -> dict[str, Callable[..., Any]]:
    """langchain's models of the three protocols."""
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    of_openai = {"model": NANO, "base_url": f"{live.url}/v1", "api_key": "none", "max_retries": 0}
    of_anthropic = {"model_name": NANO, "base_url": live.url, "api_key": "none", "max_retries": 0}
    return {
        "chat": lambda **more: ChatOpenAI(**of_openai, **more),
        "responses": lambda **more: ChatOpenAI(**of_openai, use_responses_api=True, **more),
        "messages": lambda **more: ChatAnthropic(**of_anthropic, **more),
    }


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_of_langgraph(forced: Live, protocol: str, is_stream: bool) -> None:
    from langchain_core.tools import tool
    from langgraph.prebuilt import create_react_agent

    looking, before = Looking(), len(counts(forced))
    agent = create_react_agent(chat_models(forced)[protocol](streaming=is_stream), [tool(looking.look)])
    asked = {"messages": [("user", f"{QUESTION} {protocol} {is_stream}")]}
    *_, state = agent.stream(asked, stream_mode="values")
    check(looking, forced, before, state["messages"][-1].text)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_structured_output_of_langchain(live: Live, protocol: str, method: str) -> None:
    structured = chat_models(live)[protocol](temperature=1).with_structured_output(Order, method=method)
    assert isinstance(structured.invoke(QUESTION), Order)


def test_thoughts_of_langchain_anthropic(forced: Live) -> None:
    model = chat_models(forced)["messages"](thinking={"type": "adaptive"}, max_tokens=4096)
    tools = [{"name": "never", "description": "Is not called.", "input_schema": {"type": "object", "properties": {}}}]
    whole = model.bind_tools(tools).invoke(QUESTION)
    chunks = list(model.bind_tools(tools).stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    for reply in (whole, total):
        thought, words = reply.content
        assert (thought["type"], thought["thinking"], words["text"]) == ("thinking", "so it is", LAST)
        assert thought["signature"]
        assert reply.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_agent_of_openai_agents_with_its_default_model_class(forced: Live, is_stream: bool) -> None:
    import agents

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{forced.url}/v1", api_key="none", max_retries=0))
    looking, before = Looking(), len(counts(forced))
    agent = agents.Agent(name="a", instructions="Be short.", model=NANO, tools=[agents.function_tool(looking.look)])
    question = f"{QUESTION} {is_stream}"
    if is_stream:
        run = agents.Runner.run_streamed(agent, question)
        async for _ in run.stream_events():
            pass
        check(looking, forced, before, run.final_output)
    else:
        check(looking, forced, before, (await agents.Runner.run(agent, question)).final_output)
    ordering = agents.Agent(name="b", model=NANO, output_type=Order)
    assert isinstance((await agents.Runner.run(ordering, question)).final_output, Order)


def models_of_pydantic_ai(live: Live) -> dict[str, Any]:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    of_openai = OpenAIProvider(base_url=f"{live.url}/v1", api_key="none")
    client = anthropic.AsyncAnthropic(base_url=live.url, api_key="none", max_retries=0)
    return {
        "chat": OpenAIChatModel(NANO, provider=of_openai),
        "responses": OpenAIResponsesModel(NANO, provider=of_openai),
        "messages": AnthropicModel(NANO, provider=AnthropicProvider(anthropic_client=client)),
    }


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_agent_of_pydantic_ai(forced: Live, protocol: str, is_stream: bool) -> None:
    import pydantic_ai

    looking, before = Looking(), len(counts(forced))
    agent = pydantic_ai.Agent(models_of_pydantic_ai(forced)[protocol], tools=[looking.look])

    async def read(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    run = await agent.run(f"{QUESTION} {protocol} {is_stream} again", event_stream_handler=read if is_stream else None)
    check(looking, forced, before, run.output)


@pytest.mark.parametrize(
    ("protocol", "mode"),
    # It asks no Messages model whose name it does not know for native output.
    [
        *((name, "ToolOutput") for name in ("chat", "responses", "messages")),
        ("chat", "NativeOutput"),
        ("responses", "NativeOutput"),
    ],
)
async def test_structured_output_of_pydantic_ai(live: Live, protocol: str, mode: str) -> None:
    import pydantic_ai

    output: Any = getattr(pydantic_ai, mode)(Order)
    one: Any = {"parallel_tool_calls": False}  # an untrained model would call without end
    agent: Any = pydantic_ai.Agent(
        models_of_pydantic_ai(live)[protocol], output_type=output, retries=0, model_settings=one
    )
    assert isinstance((await agent.run(QUESTION)).output, Order)


def test_an_agent_of_smolagents(forced: Live) -> None:
    import smolagents

    looking, before = Looking(), len(counts(forced))
    model = smolagents.OpenAIServerModel(model_id=NANO, api_base=f"{forced.url}/v1", api_key="none")
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(looking.look)], model=model, max_steps=3)
    assert agent.run(QUESTION) == LAST
    assert looking.seen == ["Oslo"]
    first, second = counts(forced)[before:]
    assert second.cached >= first.prompt - 2 * PAGE, "it sends calls back as text, so that the prompt alone is shared"
