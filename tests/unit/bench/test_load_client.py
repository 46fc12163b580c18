"""One measured request against scripted servers: what is sent, what is read, and every way to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from hiserve.bench.http import Pool
from hiserve.bench.load_client import BACKENDS, FINAL_USAGE, NO_USAGE, RUNNING_USAGE, Client, RequestDefaults, words_of
from hiserve.bench.summary import chunk_gaps_s, ttft_s
from hiserve.bench.workload import Prompt, Sample
from hiserve.errors import ConfigError, UnavailableError
from tests.helpers.fake_server import (
    Asked,
    FakeServer,
    Handler,
    Out,
    finish_event,
    scripted,
    text_event,
    usage_event,
)

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
IDS = np.array([5, 6, 7], dtype=np.int32)


@asynccontextmanager
async def talking(
    handler: Handler, path: str = COMPLETIONS, backend: str = "openai", timeout_s: float = 60.0, **asking: Any
) -> AsyncIterator[tuple[Client, FakeServer]]:
    async with FakeServer({path: handler}) as server:
        pool = Pool(server.url)
        yield Client(pool, BACKENDS[backend](), RequestDefaults(model="fake", **asking), timeout_s), server
        pool.close()


async def measured(handler: Handler, prompt: Prompt = "hi", **more: Any) -> Sample:
    sample = Sample()
    async with talking(handler, **more) as (client, _):
        await client.send(prompt, 4, sample)
    return sample


def events(*contents: Any, done: bool = True) -> Handler:
    async def handle(_: Asked, out: Out) -> None:
        await out.begin()
        for content in contents:
            await out.event(content)
        await out.end(done=done)

    return handle


async def test_pauses_of_the_server_become_times_of_the_sample() -> None:
    """The server says each word when the one before was heard; between the two falls the time of that one."""
    sample, asked_s, said_s = Sample(), time.perf_counter(), []

    async def handle(asked: Asked, out: Out) -> None:
        await out.begin()
        for number in range(1, 4):
            said_s.append(time.perf_counter())
            await out.event(text_event("a", number))
            while len(sample.chunk_s) < number:
                await asyncio.sleep(0.001)
        said_s.append(time.perf_counter())
        await out.event(finish_event())
        await out.event(usage_event(3, cached=1))
        await out.end()

    async with talking(handle) as (client, _):
        await client.send("hi", 4, sample)
    assert asked_s <= sample.begin_s <= said_s[0]
    moments = [moment for each in zip(said_s[:3], sample.chunk_s, said_s[1:], strict=True) for moment in each]
    assert moments == sorted(moments)
    assert ttft_s(sample) == sample.chunk_s[0] - sample.begin_s
    assert chunk_gaps_s(sample) == pytest.approx(
        [sample.chunk_s[1] - sample.chunk_s[0], sample.chunk_s[2] - sample.chunk_s[1]]
    )
    assert sample.chunk_s[-1] <= sample.end_s <= time.perf_counter()
    assert sample.chunk_tokens == [1, 2, 3]
    assert (sample.num_prompt, sample.num_cached, sample.num_output) == (3, 1, 3)
    assert (sample.status, sample.finish, sample.error) == (200, "length", "")


async def test_neither_the_opening_nor_the_usage_nor_done_is_a_chunk() -> None:
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    text = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}

    async def handle(_: Asked, out: Out) -> None:
        await out.begin()
        await out.event(opening)
        await asyncio.sleep(0.05)
        await out.event(text)
        await asyncio.sleep(0.05)
        await out.event(usage_event(1))
        await out.end()

    sample = await measured(handle, path=CHATS, backend="openai-chat")
    assert len(sample.chunk_s) == 1
    assert sample.end_s == sample.chunk_s[0] > sample.begin_s + 0.03


async def test_reasoning_is_text() -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": "stop"}]}
    sample = await measured(events(thought), path=CHATS, backend="openai-chat")
    assert len(sample.chunk_s) == 1


async def test_without_usage_chunks_count_as_tokens_and_it_is_told() -> None:
    sample = await measured(events(text_event("a"), text_event("b"), finish_event()), IDS)
    assert (sample.has_usage, sample.num_output, sample.num_prompt, sample.num_cached) == (False, 2, 3, -1)
    assert sample.chunk_tokens == [-1, -1]
    assert not sample.error


async def test_a_cumulative_reply_is_read_by_its_growth() -> None:
    def grown(text: str, tokens: int, finish: str | None = None) -> Any:
        reason = {"type": finish} if finish else None
        meta = {"prompt_tokens": 9, "completion_tokens": tokens, "cached_tokens": 2, "finish_reason": reason}
        return {"text": text, "output_ids": list(range(tokens)), "meta_info": meta}

    handler = events(grown("", 1), grown("ab", 3), grown("ab", 4), grown("abc", 5, "length"))
    sample = await measured(handler, path="/generate", backend="generate")
    assert sample.chunk_tokens == [3, 5]
    assert (sample.num_prompt, sample.num_cached, sample.num_output) == (9, 2, 5)
    assert (sample.finish, sample.output_ids) == ("length", [0, 1, 2, 3, 4])


async def test_token_ids_are_collected() -> None:
    first, second = text_event("a", 1), text_event("b", 3)
    first["choices"][0]["token_ids"], second["choices"][0]["token_ids"] = [7], [8, 9]
    assert (await measured(events(first, second, finish_event()))).output_ids == [7, 8, 9]


async def test_an_event_may_be_cut_anywhere_and_several_may_come_at_once() -> None:
    raw = b"".join(
        b"data: %b\r\n\r\n" % msgspec.json.encode(content)
        for content in (text_event("a", 1), text_event("b", 2), finish_event(), usage_event(2))
    )
    raw = b": a comment\n\nevent: message\n" + raw + b"data:[DONE]"  # no line end at the end

    for size in (1, 7, len(raw)):

        async def handle(_: Asked, out: Out, size: int = size) -> None:
            await out.begin()
            for at in range(0, len(raw), size):
                await out.part(raw[at : at + size])
            await out.end(done=False)

        sample = await measured(handle)
        assert (sample.error, sample.chunk_tokens, sample.num_output) == ("", [1, 2], 2), size


# --- failures ---------------------------------------------------------------------------------


async def test_an_error_status_is_told_with_its_words() -> None:
    async def handle(_: Asked, out: Out) -> None:
        await out.json(429, {"error": {"message": "the queue is full", "code": "overloaded"}})

    sample = await measured(handle)
    assert (sample.status, sample.error, sample.detail) == (429, "http 429", "the queue is full")
    assert sample.end_s > sample.begin_s


async def test_an_error_in_the_stream_is_a_failure_though_the_status_was_200() -> None:
    error = {"error": {"message": "the worker died", "code": "engine_error"}}
    sample = await measured(events(text_event("a", 1), error))
    assert (sample.status, sample.error, sample.detail) == (200, "error event", "the worker died")
    generated = await measured(events(error), path="/generate", backend="generate")
    assert generated.error == "error event"


async def test_a_stream_without_an_end_is_incomplete() -> None:
    sample = await measured(events(text_event("a", 1), done=False))
    assert sample.error == "incomplete"
    assert not (await measured(events(text_event("a", 1), finish_event(), done=False))).error
    assert not (await measured(events(text_event("a", 1)))).error


async def test_a_dropped_connection_is_a_failure_of_this_request() -> None:
    async def handle(_: Asked, out: Out) -> None:
        await out.begin()
        await out.event(text_event("a", 1))
        await out.drop()

    sample = await measured(handle)
    assert (sample.status, sample.error) == (200, "connection")
    assert "closed before" in sample.detail


async def test_a_server_that_says_nothing_times_out() -> None:
    async def handle(_: Asked, out: Out) -> None:
        await asyncio.sleep(30)

    sample = await measured(handle, timeout_s=0.05)
    assert (sample.error, sample.status) == ("timeout", 0)
    assert sample.end_s - sample.begin_s >= 0.05


@pytest.mark.parametrize("content", ["{", "[]", '{"choices": 3}'])
async def test_an_event_that_cannot_be_read_is_a_failure(content: str) -> None:
    assert (await measured(events(content))).error == "malformed event"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"object": "error", "message": "b"}, "b"),
        ({"detail": [{"msg": "c"}]}, "[{'msg': 'c'}]"),
        ("plain\n text", "plain text"),
        ({"x": 1}, "{'x': 1}"),
    ],
)
def test_the_words_of_an_error_are_found_in_any_shape(answer: Any, words: str) -> None:
    assert words_of(answer) == words


# --- what is sent -----------------------------------------------------------------------------


def body(backend: str, prompt: Prompt, **asking: Any) -> dict[str, Any]:
    return BACKENDS[backend]().body(prompt, 4, RequestDefaults(model="m", **asking))


def test_bodies_of_each_backend() -> None:
    assert body("openai", IDS, usage=NO_USAGE) == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
    }
    assert body("openai-chat", "hi")["messages"] == [{"role": "user", "content": "hi"}]
    messages = [{"role": "system", "content": "x"}]
    assert body("openai-chat", messages)["messages"] == messages
    assert body("generate", IDS, ignore_eos=True, temperature=0.5) == {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "ignore_eos": True},
        "stream": True,
    }
    assert body("generate", "hi")["text"] == "hi"


def test_what_is_asked_for_is_in_the_body() -> None:
    assert body("openai", "x", usage=FINAL_USAGE)["stream_options"] == {"include_usage": True}
    assert body("openai", "x")["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (
        body("openai", "x", ignore_eos=True, has_token_ids=True).items()
        >= {
            "ignore_eos": True,
            "return_token_ids": True,
        }.items()
    )


# --- warming up -------------------------------------------------------------------------------


def picky(refused: set[str]) -> Handler:
    async def handle(asked: Asked, out: Out) -> None:
        if refused & set(asked.body.get("stream_options", {})):
            await out.json(400, {"error": {"message": "unknown stream option"}})
        else:
            await scripted(0.0)(asked, out)

    return handle


@pytest.mark.parametrize(
    ("refused", "usage"),
    [(set(), RUNNING_USAGE), ({"continuous_usage_stats"}, FINAL_USAGE), ({"include_usage"}, NO_USAGE)],
)
async def test_the_warm_up_asks_for_less_until_the_server_agrees(refused: set[str], usage: int) -> None:
    async with talking(picky(refused)) as (client, server):
        sample = await client.warm_up("hi", 1)
        assert client.asking.usage == usage
        assert len(server.asked) == 1 + RUNNING_USAGE - usage
        assert not sample.error


async def test_a_warm_up_that_fails_ends_the_run_with_the_first_reason() -> None:
    async def refuse(asked: Asked, out: Out) -> None:
        await out.json(400, {"error": {"message": f"no {sorted(asked.body.get('stream_options', {}))}"}})

    async with talking(refuse) as (client, _):
        with pytest.raises(UnavailableError, match=r"http 400, no \['continuous_usage_stats', 'include_usage'\]"):
            await client.warm_up("hi", 1)

    async def broken(_: Asked, out: Out) -> None:
        await out.json(500, b"oops")

    async with talking(broken) as (client, server):
        with pytest.raises(UnavailableError, match="http 500, oops"):
            await client.warm_up("hi", 1)
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("backend", "prompt", "words"),
    [
        ("openai", [{"role": "user", "content": "x"}], "messages"),
        ("generate", [{"role": "user", "content": "x"}], "messages"),
        ("openai-chat", IDS, "token ids"),
    ],
)
async def test_a_prompt_that_the_backend_cannot_send_is_refused(backend: str, prompt: Prompt, words: str) -> None:
    async with talking(scripted(), backend=backend) as (client, server):
        with pytest.raises(ConfigError, match=f"takes no {words}.*--backend"):
            await client.warm_up(prompt, 1)
        assert not server.asked


def reading_of(backend: str, event: Any) -> Sample:
    sample = Sample()
    BACKENDS[backend]().reader(sample)(msgspec.json.encode(event), 1.0)
    return sample


def usage(**details: Any) -> Any:
    return {"usage": {"prompt_tokens": 64, "completion_tokens": 2, "prompt_tokens_details": details}}


def test_cached_tokens_come_by_tier_with_the_reason_of_the_miss() -> None:
    tiers = {"device": 16, "host": 32, "store": 0}
    miss = {"reason": "evicted", "position": 48}
    sample = reading_of("openai", usage(cached_tokens=48, cached_tokens_details=tiers, cache_miss=miss))
    assert (sample.num_cached, sample.cached_by_tier, sample.miss) == (48, tiers, "evicted")


@pytest.mark.parametrize("more", [{}, {"cached_tokens_details": None, "cache_miss": None}, {"cache_miss": {}}])
def test_tiers_that_are_not_told_are_not_made_up(more: Any) -> None:
    sample = reading_of("openai", usage(cached_tokens=48, **more))
    assert (sample.num_cached, sample.cached_by_tier, sample.miss) == (48, {}, "")


def test_the_native_reply_tells_the_store_as_storage() -> None:
    tiers = {"device": 16, "host": 0, "storage": 32, "storage_backend": "file"}
    meta = {"prompt_tokens": 64, "completion_tokens": 2, "cached_tokens": 48, "cached_tokens_details": tiers}
    sample = reading_of("generate", {"text": "a", "meta_info": meta})
    assert (sample.num_cached, sample.cached_by_tier) == (48, {"device": 16, "host": 0, "store": 32})


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "generate"])
def test_a_salt_is_sent_where_there_is_one(backend: str) -> None:
    prompt = "hi" if backend == "openai-chat" else np.array([1, 2], dtype=np.int32)
    body = BACKENDS[backend]().body(prompt, 1, RequestDefaults(model="m", cache_salt="a"))
    assert body["cache_salt"] == "a"
    assert "cache_salt" not in BACKENDS[backend]().body(prompt, 1, RequestDefaults(model="m"))


@pytest.mark.parametrize(
    ("backend", "events"),
    [
        ("openai", [{"choices": [{"text": "It "}]}, {"choices": [{"text": "rains."}]}]),
        (
            "openai-chat",
            [
                {"choices": [{"delta": {"reasoning_content": "Hm. "}}]},
                {"choices": [{"delta": {"content": "It "}}]},
                {"choices": [{"delta": {"content": "rains."}, "finish_reason": "stop"}]},
            ],
        ),
        ("generate", [{"text": "It "}, {"text": "It rains."}]),
    ],
)
def test_the_text_of_a_reply_is_kept_piece_by_piece_without_thoughts(backend: str, events: list[Any]) -> None:
    sample = Sample()
    take = BACKENDS[backend]().reader(sample)
    for event in events:
        take(msgspec.json.encode(event), 1.0)
    assert "".join(sample.chunk_texts) == "It rains."
    assert len(sample.chunk_texts) == len(sample.chunk_s)
