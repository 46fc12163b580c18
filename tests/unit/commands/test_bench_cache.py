"""``hiserve bench cache`` from its command line, against a scripted server whose cache is the test's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hiserve import cli
from tests.helpers.fake_server import CARD, Asked, FakeServer, Out, finish_event, text_event

PAGE = 4
COMPLETIONS = "/v1/completions"
SIZES = ["--num-conversations", "4", "--group-size", "2", "--num-rounds", "2", "--conversation-length", "10"]
CONVERSATIONS = [*SIZES, "--request-length", "5", "--output-length", "3", "--vocab-size", "50"]


class Cache:
    """A server with a cache without end, half of each hit on the host; it counts in its metrics."""

    def __init__(self) -> None:
        self.known: list[tuple[str, list[int]]] = []
        self.num_host = 0
        self.tells = True

    async def complete(self, asked: Asked, out: Out) -> None:
        prompt, salt = asked.body["prompt"], asked.body.get("cache_salt", "")
        prompt = [ord(letter) for letter in prompt] if isinstance(prompt, str) else prompt
        found = max((common(prompt, known) for its_salt, known in self.known if its_salt == salt), default=0)
        reply = [7] * asked.body["max_tokens"]
        self.known.append((salt, prompt + reply[:-1]))
        host = found // PAGE // 2 * PAGE
        self.num_host += host
        miss = {"reason": "cold" if not found else "diverged", "position": found}
        details: dict[str, Any] = {"cached_tokens": found}
        if self.tells:
            details |= {"cached_tokens_details": {"device": found - host, "host": host, "store": 0}, "cache_miss": miss}
        await out.begin()
        await asyncio.sleep(0.005)
        event = text_event("abc")
        event["choices"][0]["token_ids"] = reply
        await out.event(event)
        await out.event(finish_event())
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(reply), "prompt_tokens_details": details}
        await out.event({"choices": [], "usage": counts})
        await out.end()

    async def flush(self, asked: Asked, out: Out) -> None:
        self.known.clear()
        await out.json(200, {})

    async def metrics(self, asked: Asked, out: Out) -> None:
        lines = [
            f'hiserve:cached_tokens_total{{cache_source="host",model_name="m"}} {self.num_host}',
            f'hiserve:cache_config_info{{model_name="m",num_pages="9",page_size="{PAGE}"}} 1.0',
        ]
        await out.json(200, "\n".join([*lines, ""]).encode())

    async def stats(self, asked: Asked, out: Out) -> None:
        num_pages = self.num_host // PAGE
        loads = {"num_wanted": num_pages, "num_fulfilled": num_pages, "num_bytes": num_pages * 10**6, "seconds": 0.5}
        await out.json(200, {"replicas": [{"replica": 0, "incarnation": 1, "loads": loads}]})


def common(prompt: list[int], known: list[int]) -> int:
    end = 0
    while end + PAGE < len(prompt) and prompt[: end + PAGE] == known[: end + PAGE]:
        end += PAGE
    return end


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[FakeServer, Cache]]:
    cache = Cache()
    routes = {
        COMPLETIONS: cache.complete,
        "/flush_cache": cache.flush,
        "/metrics": cache.metrics,
        "/cache/stats": cache.stats,
    }
    async with FakeServer(routes, CARD) as server:
        yield server, cache


async def bench_cache(server: FakeServer, *argv: str) -> int:
    return await asyncio.to_thread(cli.main, ["bench", "cache", "--url", server.url, *argv])


async def test_a_perfect_cache_is_as_good_as_the_endless_one(tmp_path: Path, capsys: Any) -> None:
    output, plot = tmp_path / "run.json", tmp_path / "run.png"
    async with serving() as (server, _):
        assert await bench_cache(server, *CONVERSATIONS, "--output", str(output), "--plot", str(plot)) == 0
        assert server.most_open == 2
    found = json.loads(output.read_bytes())
    cache = found["cache"]
    # the first prompt has 10 tokens, the second 18, of which 12 were computed before
    assert cache["num_prompt"] == 4 * (10 + 18)
    assert cache["num_cached"] == {"device": 4 * 8, "host": 4 * 4, "store": 0}
    assert (cache["share_of_most"], cache["most_hit_rate"]) == (1.0, cache["least_hit_rate"])
    assert cache["hit_rate"] == pytest.approx(48 / 112)
    assert cache["misses"] == {"cold": 4, "diverged": 4}
    assert {kind: spread["count"] for kind, spread in cache["ttft_ms"].items()} == {
        "all": 8,
        "device": 0,
        "host": 4,
        "store": 0,
        "miss": 4,
    }
    assert found["held"] == [{"most": 0, "least": 0}, {"most": 12, "least": 12}] * 4
    assert found["page_size"] == PAGE
    assert found["server_counters"] == {'hiserve:cached_tokens_total{cache_source="host"}': 16.0}
    loads = {"num_pages": 4, "num_bytes": 4 * 10**6, "seconds": 0.0, "bytes_per_s": None, "unfulfilled": {}}
    assert (found["copies"]["loads"], found["server_notes"]) == (loads, [])
    assert [each["cached_by_tier"]["host"] for each in found["samples"]] == [0, 4] * 4
    assert plot.stat().st_size > 20_000
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "hit rate │ 42.86%",
        "endless cache │ 42.86% to 42.86%",
        "missed: cold",
        "loads │ 4 pages, 4.0 MB",
        "TTFT by kind of hit",
    ):
        assert words in out, words


async def test_a_cache_that_was_not_empty_is_told_and_a_flush_helps(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "run.json"
    async with serving() as (server, _):
        for flags, num_above in (([], 0), ([], 8), (["--flush-cache"], 0)):
            assert await bench_cache(server, *CONVERSATIONS, *flags, "--output", str(output)) == 0
            assert json.loads(output.read_bytes())["cache"]["num_above_most"] == num_above
            assert ("Give --flush-cache" in capsys.readouterr().out.replace("\n", " ")) == bool(num_above)


async def test_tenants_share_nothing_there_nor_here(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    sizes = ["--num-prefixes", "1", "--suffixes-per-prefix", "6", "--prefix-length", "8", "--suffix-length", "3"]
    argv = ["--load", "shared-prefix", *sizes, "--vocab-size", "50", "--max-concurrency", "1", "--num-tenants", "2"]
    async with serving() as (server, _):
        assert await bench_cache(server, *argv, "--output", str(output)) == 0
        salts = [asked.body.get("cache_salt") for asked in server.asked if asked.path == COMPLETIONS]
    assert salts == [None, *["tenant-0", "tenant-1"] * 3]
    cache = json.loads(output.read_bytes())["cache"]
    assert (cache["share_of_most"], cache["hit_rate"]) == (1.0, pytest.approx(4 * 8 / (6 * 11)))


async def test_a_server_without_tiers_and_metrics_is_measured_too(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    async with serving() as (server, cache):
        cache.tells = False
        del server.routes["/metrics"], server.routes["/cache/stats"]
        assert await bench_cache(server, *CONVERSATIONS, "--tokens-per-page", "4", "--output", str(output)) == 0
    found = json.loads(output.read_bytes())
    assert found["cache"]["num_cached"] == {"device": 48, "host": 0, "store": 0}
    assert (found["cache"]["tells_tiers"], found["server_counters"], found["copies"]) == (False, {}, {})
    assert found["server_notes"] == [
        "/metrics gave nothing; where there are API keys, the admin key reads it",
        "/cache/stats answered 404",
    ]


async def test_recorded_sessions_are_sent_as_text_and_compared_by_their_tokens(tmp_path: Path) -> None:
    path, output = tmp_path / "agents.jsonl", tmp_path / "run.json"
    texts = ["one two three", "one two three four five six"]
    rows = [{"session_id": "a", "timestamp_us": at, "input": text, "output": "x"} for at, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def tokenize(asked: Asked, out: Out) -> None:
        ids = [ord(letter) for letter in asked.body["prompt"]]
        await out.json(200, {"count": len(ids), "tokens": ids})

    async with serving() as (server, _):
        server.routes["/tokenize"] = tokenize
        argv = ["--load", "agent-sessions", "--path", str(path), "--speed", "inf", "--output", str(output)]
        assert await bench_cache(server, *argv) == 0
        sent = [asked.body["prompt"] for asked in server.asked if asked.path == COMPLETIONS]
    assert sent[1:] == texts
    found = json.loads(output.read_bytes())
    assert found["held"] == [{"most": 0, "least": 0}, {"most": 12, "least": 12}]
    assert found["prompts_of_another_length"] == 0
    assert found["cache"]["num_cached"]["device"] == 8


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--backend", "openai-chat"], "--backend openai or generate"),
        (["--max-concurrency", "3"], "Set --group-size"),
        (["--load", "conversation-trace", "--vocab-size", "9"], "give --path"),
        (["--vocab-size", "9", "--conversation-length", "1200"], "context is 1000"),
        (["--length-scale", "2"], "the most is 1"),
    ],
)
async def test_what_cannot_be_run_is_one_line_that_says_what_to_do(argv: list[str], words: str, capsys: Any) -> None:
    async with serving() as (server, _):
        assert await bench_cache(server, *argv) == 1
    err = capsys.readouterr().err
    assert err.startswith("hiserve: ") and err.count("\n") == 1
    assert words in err


async def test_a_page_size_that_is_not_told_must_be_given(capsys: Any) -> None:
    async with serving() as (server, _):
        del server.routes["/metrics"]
        assert await bench_cache(server, *CONVERSATIONS) == 1
    assert "Give --tokens-per-page" in capsys.readouterr().err
