"""Several choices and several prompts in one reply: side by side, failing or finishing as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from hiserve.errors import EngineError, OverloadedError
from hiserve.server.reply import choices
from hiserve.server.reply.choices import merge
from tests.helpers.asgi import Call
from tests.helpers.waiting import PATIENCE_S
from tests.unit.server.conftest import NUM_STEPS, REPLY, TOKENIZER, Server, on_device, reply_script

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def by_choice(events: list[Any]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            found.setdefault(choice["index"], []).append(choice)
    return found


def shorter_by_choice(server: Server) -> None:
    """Choice i of a prompt is cut i tokens earlier."""
    server.engine.script = lambda prompt: reply_script()[: NUM_STEPS - server.engine.seen[-1].choice]


async def test_each_choice_is_an_engine_request_with_its_index_and_one_common_seed(server: Server) -> None:
    await server.chat("Hi", n=3)
    await server.chat("Hi", n=2, seed=7)
    first, second = server.engine.seen[:3], server.engine.seen[3:]
    assert sorted(seen.choice for seen in first) == [0, 1, 2]
    (seed,) = {seen.sampling.seed for seen in first}
    assert seed is not None
    assert {seen.sampling.seed for seen in second} == {7}
    await server.chat("Hi", n=3)
    assert server.engine.seen[-1].sampling.seed != seed


async def test_a_whole_reply_has_all_choices_in_order_and_counts_the_prompt_once(server: Server) -> None:
    shorter_by_choice(server)
    server.engine.cached = 2
    reply = (await server.chat("Hi", n=3)).json
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["choices"][0]["message"]["content"] == REPLY
    num_prompt = len(server.engine.seen[0].prompt)
    assert reply["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 3 * NUM_STEPS - 3,
        "total_tokens": num_prompt + 3 * NUM_STEPS - 3,
        "prompt_tokens_details": on_device(2),
    }


async def test_streamed_choices_each_have_an_opening_and_one_finish(server: Server) -> None:
    shorter_by_choice(server)
    *events, last, done = (await server.chat("Hi", n=3, stream=True, stream_options={"include_usage": True})).events
    assert done == "[DONE]"
    found = by_choice(events)
    assert sorted(found) == [0, 1, 2]
    for chunks in found.values():
        assert [chunk["delta"].get("role") for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert "".join(chunk["delta"].get("content", "") for chunk in found[0]) == REPLY
    assert last["usage"]["completion_tokens"] == 3 * NUM_STEPS - 3
    assert last["choices"] == []
    order = [event["choices"][0]["index"] for event in events]
    assert order != sorted(order), "the choices come as they arrive, not one after the other"


@pytest.mark.parametrize("prompts", [["Hi", "the text"], [[5, 6, 7], [8, 9]]])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_several_prompts_are_answered_prompt_by_prompt(
    server: Server, prompts: list[Any], is_stream: bool
) -> None:
    call = await server.complete(prompts, n=2, seed=3, stream=is_stream, return_token_ids=True)
    encoded = [TOKENIZER.encode(p, add_special_tokens=True).tolist() if isinstance(p, str) else p for p in prompts]
    found = by_choice(call.events) if is_stream else {choice["index"]: [choice] for choice in call.json["choices"]}
    assert sorted(found) == [0, 1, 2, 3]
    assert [found[i][0]["prompt_token_ids"] for i in range(4)] == [prompt for prompt in encoded for _ in range(2)]
    assert all("".join(chunk["text"] for chunk in chunks) == REPLY for chunks in found.values())
    asked = sorted((seen.prompt.tolist(), seen.choice) for seen in server.engine.seen)
    assert asked == sorted((prompt, seat) for prompt in encoded for seat in range(2))
    assert {seen.sampling.seed for seen in server.engine.seen} == {3}


async def test_usage_of_several_prompts_sums_each_prompt_once(server: Server) -> None:
    server.engine.cached = 1
    usage = (await server.complete([[5, 6, 7], [8, 9]], n=3)).json["usage"]
    assert usage["prompt_tokens"] == 5
    assert usage["completion_tokens"] == 6 * NUM_STEPS
    assert usage["prompt_tokens_details"] == on_device(2)


async def test_prompts_without_a_seed_get_seeds_of_their_own(server: Server) -> None:
    await server.complete([[5], [6]], n=2)
    seeds = {tuple(seen.prompt.tolist()): seen.sampling.seed for seen in server.engine.seen}
    assert seeds[(5,)] != seeds[(6,)]


async def test_the_most_choices_are_served(server: Server) -> None:
    server.engine.script = lambda prompt: [[0, 1]]
    call = await server.complete([[5]] * 64, n=64)
    assert len(call.json["choices"]) == 4096
    refused = await server.complete([[5]] * 65, n=64)
    assert (refused.status, refused.json["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_error_of_one_choice_ends_them_all(server: Server, is_stream: bool) -> None:
    """The first comes to the failure, the others are held."""
    server.engine.fail_at, server.engine.failure = 1, EngineError("the worker broke.")
    num_begun = 0

    async def step(index: int) -> None:
        nonlocal num_begun
        num_begun += index == 0
        if index == 0 and num_begun > 1:
            await asyncio.Event().wait()

    server.engine.step = step
    call = await server.chat("Hi", n=3, stream=is_stream)
    error = call.events[-1]["error"] if is_stream else call.json["error"]
    assert error["code"] == "engine_error"
    assert sorted((seen.choice, seen.failed, seen.aborted) for seen in server.engine.seen) == [
        (0, True, False),
        (1, False, True),
        (2, False, True),
    ]


async def test_a_refused_choice_refuses_the_reply(server: Server) -> None:
    server.engine.fail_at, server.engine.failure = 0, OverloadedError("the queue is full.")
    assert (await server.chat("Hi", n=4)).status == 429
    assert (await server.chat("Hi", n=4, stream=True)).status == 429


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_aborts_every_choice(server: Server, is_stream: bool) -> None:
    is_held = asyncio.Event()

    async def step(index: int) -> None:
        if index:
            is_held.set()
            await asyncio.Event().wait()

    server.engine.step = step
    call = server.call("POST", CHAT, {"messages": HI, "n": 3, "stream": is_stream})
    await asyncio.wait_for(is_held.wait(), PATIENCE_S)
    call.disconnect()
    await call.end()
    assert [seen.aborted for seen in server.engine.seen] == [True] * 3


async def test_a_reader_that_stands_still_holds_its_choices_up(server: Server) -> None:
    """What waits for it does not grow with the length of the reply."""
    num_steps, stands_still = 0, asyncio.Event()

    async def step(index: int) -> None:
        nonlocal num_steps
        num_steps += 1

    class Still(Call):
        async def _send(self, message: dict[str, Any]) -> None:
            await super()._send(message)
            if self.chunks:
                stands_still.set()
                await asyncio.Event().wait()

    server.engine.step = step
    server.engine.script = lambda prompt: [[5]] * 200
    call = Still(server.app, "POST", CHAT, {"messages": HI, "n": 4, "stream": True})
    await asyncio.wait_for(stands_still.wait(), 60)  # the prompt is rendered in another thread or process
    for _ in range(2000):
        await asyncio.sleep(0)
    assert 4 <= num_steps <= choices.MAX_WAITING + 3 * 4
    call.disconnect()
    await call.end()


async def numbers(start: int, most: int, state: dict[str, int]) -> AsyncGenerator[int, None]:
    state["open"] = state.get("open", 0) + 1
    state["most"] = max(state.get("most", 0), state["open"])
    try:
        for number in range(start, start + most):
            await asyncio.sleep(0)
            yield number
    finally:
        state["open"] -= 1


async def test_merged_streams_keep_their_own_order_and_lose_nothing() -> None:
    state: dict[str, int] = {}
    items = [item async for item in merge([numbers(100 * i, 50, state) for i in range(5)])]
    assert [[item for item in items if item // 100 == i] for i in range(5)] == [
        list(range(100 * i, 100 * i + 50)) for i in range(5)
    ]
    assert state == {"open": 0, "most": 5}


async def test_merging_opens_a_bounded_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "MAX_AT_ONCE", 3)
    state: dict[str, int] = {}
    items = [item async for item in merge([numbers(100 * i, 5, state) for i in range(10)])]
    assert len(items) == 50
    assert state == {"open": 0, "most": 3}


async def test_closing_merged_streams_closes_each() -> None:
    state: dict[str, int] = {}
    merged = merge([numbers(100 * i, 10_000, state) for i in range(5)])
    assert [await anext(merged) for _ in range(7)]
    await merged.aclose()
    assert state == {"open": 0, "most": 5}
