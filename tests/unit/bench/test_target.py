"""What is found out about a server, and how tokens are counted."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from hiserve.bench.http import Pool
from hiserve.bench.load_client import BACKENDS, Client, RequestDefaults
from hiserve.bench.target import Target, flush, look_at, make_counter
from hiserve.errors import ConfigError, ModelError, NotFoundError, UnavailableError
from hiserve.models.model_config import NANO, find_model
from tests.helpers.fake_server import CARD, Asked, FakeServer, Handler, Out, finish_event, scripted, usage_event


def answering(content: Any, status: int = 200) -> Handler:
    async def handle(_: Asked, out: Out) -> None:
        await out.json(status, content)

    return handle


@asynccontextmanager
async def serving(card: dict[str, Any] | None = None, **routes: Handler) -> AsyncIterator[tuple[Pool, FakeServer]]:
    named = {"/" + name.replace("__", "/"): handler for name, handler in routes.items()}
    async with FakeServer(named, {**CARD, **(card or {})}) as server:
        pool = Pool(server.url)
        yield pool, server
        pool.close()


async def test_a_server_that_tells_everything() -> None:
    routes = {"server_info": answering({"version": "1.2"}), "get_model_info": answering({"vocab_size": 77})}
    async with serving(**routes) as (pool, _):
        assert await look_at(pool) == Target(model="fake", max_model_len=1000, vocab_size=77, version="1.2")


async def test_a_server_that_tells_its_model_only() -> None:
    async with serving({"max_model_len": None}, version=answering({"version": "0.9"})) as (pool, _):
        target = await look_at(pool)
        assert target == Target(model="fake", max_model_len=None, vocab_size=None, version="0.9")
        with pytest.raises(ConfigError, match="--vocab-size"):
            target.require_vocab_size()
        assert (await look_at(pool, vocab_size=5)).require_vocab_size() == 5


async def test_the_vocabulary_is_read_from_a_folder_of_this_machine_and_nothing_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving({"root": str(find_model(NANO))}) as (pool, _):
        assert (await look_at(pool)).vocab_size == 4096
    monkeypatch.setattr("hiserve.bench.target.find_model", lambda root: pytest.fail("it would be downloaded"))
    async with serving({"root": "owner/model"}) as (pool, _):
        assert (await look_at(pool)).vocab_size is None


async def test_a_model_is_chosen_by_name() -> None:
    async with serving() as (pool, _):
        assert (await look_at(pool, model="fake")).model == "fake"
        with pytest.raises(NotFoundError, match="no model 'other'; it has fake"):
            await look_at(pool, model="other")


async def test_what_is_no_such_server_is_one_clear_error() -> None:
    async with serving() as (_, server):
        elsewhere = Pool(server.url + "/not/here")
        with pytest.raises(UnavailableError, match=r"lists no models.*404"):
            await look_at(elsewhere)
        elsewhere.close()


@pytest.mark.parametrize(("status", "remedy"), [(401, "Give a key with --api-key-file."), (503, "Is --url right?")])
async def test_a_server_that_wants_a_key_is_not_taken_for_a_wrong_address(status: int, remedy: str) -> None:
    async with serving() as (pool, _):
        pool.ask = AsyncMock(return_value=(status, {"error": {}}))  # type: ignore[method-assign]
        with pytest.raises(UnavailableError, match=re.escape(f"answered {status}. {remedy}")):
            await look_at(pool)


async def test_either_route_flushes() -> None:
    async with serving(flush_cache=answering({})) as (pool, server):
        await flush(pool)
        assert server.paths() == ["/flush_cache"]
    async with serving(reset_prefix_cache=answering(b"")) as (pool, server):
        await flush(pool)
        assert server.paths() == ["/flush_cache", "/reset_prefix_cache"]
    forbidden = answering({"error": {"message": "it needs the admin key"}}, 403)
    async with serving(flush_cache=forbidden) as (pool, _):
        with pytest.raises(ConfigError, match=r"answered 403 \(it needs the admin key\).*answered 404"):
            await flush(pool)


def client_of(pool: Pool) -> Client:
    return Client(pool, BACKENDS["openai"](), RequestDefaults(model="fake"), 5.0)


TARGET = Target(model="fake", max_model_len=1000, vocab_size=None, version=None)


async def test_a_tokenizer_of_this_machine_comes_first() -> None:
    async with serving(tokenize=answering({"count": 99})) as (pool, server):
        counter = await make_counter(pool, client_of(pool), TARGET, find_model(NANO), "text")
        assert counter.is_exact
        assert 1 < await counter.count("Hello there, how are you?") < 15
        assert not server.asked
        with pytest.raises(ModelError):
            await make_counter(pool, client_of(pool), TARGET, Path("/nowhere"), "text")


async def test_then_the_server_counts() -> None:
    async def count(asked: Asked, out: Out) -> None:
        assert asked.body["model"] == "fake"
        await out.json(200, {"count": len(asked.body["prompt"].split())})

    async with serving(tokenize=count) as (pool, server):
        counter = await make_counter(pool, client_of(pool), TARGET, None, "text")
        assert counter.is_exact
        assert await counter.count("one two three") == 3
        server.routes["/tokenize"] = answering({}, 500)
        with pytest.raises(UnavailableError, match="--tokenizer"):
            await counter.count("x")


async def test_then_the_usage_of_one_request_is_the_measure() -> None:
    handler = scripted(0.0, final=usage_event(1, prompt=25))
    async with serving(v1__completions=handler) as (pool, server):
        counter = await make_counter(pool, client_of(pool), TARGET, None, "abcd" * 25)
        assert not counter.is_exact
        assert (server.asked[-1].body["prompt"], server.asked[-1].body["max_tokens"]) == ("abcd" * 25, 1)
        assert 100 <= await counter.count("x" * 400) <= 125


async def test_a_server_that_counts_nothing_is_told_apart() -> None:
    async def handle(_: Asked, out: Out) -> None:
        await out.begin()
        await out.event(finish_event())
        await out.end()

    async with serving(v1__completions=handle) as (pool, _):
        with pytest.raises(UnavailableError, match=r"no usage.*--tokenizer"):
            await make_counter(pool, client_of(pool), TARGET, None, "text")
