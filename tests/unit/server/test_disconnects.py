"""A client that goes away ends its request at once, wherever it is, and is counted once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers.asgi import Call
from tests.helpers.waiting import PATIENCE_S
from tests.unit.server.conftest import NUM_STEPS, Server

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


class Hold:
    """Lets the engine produce deltas below an index, then holds it."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.is_held = asyncio.Event()

    async def step(self, index: int) -> None:
        if index >= self._at:
            self.is_held.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("at", [0, 1, NUM_STEPS - 1])
async def test_a_closed_socket_aborts_the_request(server: Server, at: int, is_stream: bool) -> None:
    hold = Hold(at)
    server.engine.step = hold.step
    call = server.call("POST", CHAT, {"messages": HI, "stream": is_stream})
    await asyncio.wait_for(hold.is_held.wait(), PATIENCE_S)
    assert server.engine.num_inflight == 1
    call.disconnect()
    await call.end()
    assert [seen.aborted for seen in server.engine.seen] == [True]
    assert server.reply_cache.num_entries == 0
    server.engine.step = None
    assert await server.metric("hiserve:request_success_total", finished_reason="abort") == 1
    assert await server.metric("hiserve:generation_tokens_total") == at
    assert await server.metric("hiserve:prompt_tokens_total") == (len(server.engine.seen[0].prompt) if at else 0)
    assert await server.metric("hiserve:e2e_request_latency_seconds_count") == 1


async def test_a_client_that_leaves_between_two_events_aborts_too(server: Server) -> None:
    """The stream is then suspended in the send, not in the engine."""
    is_blocked, gone = asyncio.Event(), asyncio.Event()

    class SlowReader(Call):
        async def _send(self, message: dict[str, Any]) -> None:
            await super()._send(message)
            if self.chunks and not gone.is_set():
                is_blocked.set()
                await asyncio.Event().wait()

    call = SlowReader(server.app, "POST", CHAT, {"messages": HI, "stream": True})
    await asyncio.wait_for(is_blocked.wait(), PATIENCE_S)
    gone.set()
    call.disconnect()
    await call.end()
    assert [seen.aborted for seen in server.engine.seen] == [True]


async def test_a_request_whose_task_is_cancelled_is_aborted(server: Server) -> None:
    hold = Hold(1)
    server.engine.step = hold.step
    call = server.call("POST", CHAT, {"messages": HI, "stream": True})
    await asyncio.wait_for(hold.is_held.wait(), PATIENCE_S)
    call._task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.end()
    assert [seen.aborted for seen in server.engine.seen] == [True]


async def test_a_client_that_leaves_after_the_end_changes_nothing(server: Server) -> None:
    call = await server.chat("Hi", stream=True)
    call.disconnect()
    assert [seen.finished for seen in server.engine.seen] == [True]
    assert await server.metric("hiserve:request_success_total", finished_reason="abort") == 0
    assert await server.metric("hiserve:request_success_total", finished_reason="stop") == 1


async def test_counters_add_up_over_a_mixture_of_ends(server: Server) -> None:
    async def one(i: int) -> None:
        call = server.call("POST", CHAT, {"messages": HI, "stream": i % 2 == 0})
        if i % 3 == 0:
            await asyncio.sleep(0.001 * (i % 4))
            call.disconnect()
        await call.end()

    await asyncio.gather(*(one(i) for i in range(60)))
    ends = {reason: await server.metric("hiserve:request_success_total", finished_reason=reason) for reason in REASONS}
    assert sum(ends.values()) == len(server.engine.seen)
    assert ends["abort"] == sum(seen.aborted for seen in server.engine.seen)
    assert ends["stop"] == sum(seen.finished for seen in server.engine.seen) >= 40
    assert await server.metric("hiserve:e2e_request_latency_seconds_count") == len(server.engine.seen)


REASONS = ("stop", "length", "abort", "error")
