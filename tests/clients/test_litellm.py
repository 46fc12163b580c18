"""litellm: the same reply through each of its names for a server like this, streams, and its own errors."""

from __future__ import annotations

from typing import Any

import pytest

from hiserve.models.model_config import NANO
from tests.e2e.live import Live

pytestmark = pytest.mark.clients
MESSAGES = [{"role": "user", "content": "Two coffees, please."}]


@pytest.fixture
def litellm() -> Any:
    import litellm

    return litellm


@pytest.fixture
def fields(live: Live) -> dict[str, Any]:
    return {
        "api_base": f"{live.url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "max_tokens": 16,
        "temperature": 0,
        "num_retries": 0,
    }


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_stream_adds_up_to_the_reply(litellm: Any, fields: dict[str, Any], provider: str) -> None:
    whole = litellm.completion(model=f"{provider}/{NANO}", **fields)
    stream = litellm.completion(
        model=f"{provider}/{NANO}", **fields, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert whole.usage.prompt_tokens_details.cached_tokens is not None


async def test_choices_and_stop_strings(litellm: Any, fields: dict[str, Any]) -> None:
    reply = await litellm.acompletion(model=f"openai/{NANO}", **fields | {"temperature": 1.0}, n=3, seed=5)
    assert len({choice.message.content for choice in reply.choices}) > 1
    whole = (await litellm.acompletion(model=f"openai/{NANO}", **fields)).choices[0].message.content
    stop = whole[len(whole) // 2]
    stopped = (await litellm.acompletion(model=f"openai/{NANO}", **fields, stop=[stop])).choices[0]
    assert (stopped.message.content or "") == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("provider", ["text-completion-openai", "hosted_vllm"])
def test_texts_are_completed(litellm: Any, fields: dict[str, Any], provider: str) -> None:
    del fields["messages"]
    reply = litellm.text_completion(model=f"{provider}/{NANO}", **fields, prompt="Would you like")
    assert reply.choices[0].text
    assert reply.usage.completion_tokens <= 16


def test_errors_are_the_clients_own(litellm: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", **fields)
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length"):
        litellm.completion(model=f"openai/{NANO}", **fields | {"max_tokens": 90_000})
