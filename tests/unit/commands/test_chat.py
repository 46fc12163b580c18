"""The terminal chat, against the real application over a real socket, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from hiserve.commands import chat, serve
from hiserve.commands.chat import ReplyStats, stats_lines
from hiserve.config.options import Options, make_options
from hiserve.errors import EngineError, UnavailableError
from tests.helpers import tiny_text
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.unit.server.conftest import REPLY, TOKENIZER, Server, make_server, reply_script


@asynccontextmanager
async def running_at(made: Server) -> AsyncIterator[str]:
    """Serves an application on a port of its own."""
    with serve.bind("127.0.0.1", 0) as listener:
        url = serve.url_of(listener)
        task = asyncio.create_task(serve.serve(made.app, made.handle, listener, drain_timeout_s=30))
        await made.handle.wait_open()
        yield url
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture
async def running() -> AsyncIterator[tuple[Server, str]]:
    made = make_server(FakeEngineClient(script=lambda prompt: reply_script()))
    async with running_at(made) as url:
        yield made, url


async def talk(url: str, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return await asyncio.to_thread(chat.run, Options(), url)


def prompts(server: Server) -> list[str]:
    return [TOKENIZER.decode(seen.prompt, skip_hidden=False) for seen in server.engine.seen]


async def test_turns_build_on_each_other_until_reset(running: Any, monkeypatch: Any, capsys: Any) -> None:
    server, url = running
    server.engine.cached = 4
    assert await talk(url, "one\n\n  two  \n/reset\nthree\n/exit\nfour\n", monkeypatch) == 0
    first = "<|bos|><|user|>one<|end|><|assistant|>"
    assert prompts(server) == [
        first,
        f"{first}{REPLY}<|end|><|user|>two<|end|><|assistant|>",
        "<|bos|><|user|>three<|end|><|assistant|>",
    ]
    out = capsys.readouterr().out
    assert out.count(REPLY) == out.count("first token") == 3
    assert f"{len(server.engine.seen[1].prompt)} prompt tokens, 4 cached · {len(reply_script())} generated" in out
    assert "[dim]" not in out


async def test_markup_in_a_reply_is_shown_as_it_is(running: Any, monkeypatch: Any, capsys: Any) -> None:
    server, url = running
    server.engine.script = lambda prompt: reply_script("[red]a[/red] [b")
    assert await talk(url, "hi\n", monkeypatch) == 0
    assert "[red]a[/red] [b" in capsys.readouterr().out


async def test_a_reply_cannot_command_the_terminal(running: Any, monkeypatch: Any, capsys: Any) -> None:
    server, url = running
    server.engine.script = lambda prompt: reply_script("a\x1b[2Jb\x07\x9bc\ne")
    assert await talk(url, "hi\n", monkeypatch) == 0
    assert "\na[2Jbc\ne\n" in capsys.readouterr().out


async def test_stats_show_the_conversation_and_the_workers(running: Any, monkeypatch: Any, capsys: Any) -> None:
    server, url = running
    server.engine.cached = 2
    assert await talk(url, "hi\n/stats\n", monkeypatch) == 0
    out = capsys.readouterr().out
    assert f"conversation: 1 turns, {len(server.engine.seen[0].prompt)} prompt tokens, 2 (" in out
    assert "server: 1 worker, " in out


def test_stats_are_five_short_lines_of_all_workers_together() -> None:
    use = {"proposed": 30, "accepted": 12, "verify_steps": 10}
    cache = {
        "device": {"num_pages": 14363, "num_free": 14000},
        "host": {"num_pages": 1794, "num_free": 1700},
        "store": None,
        "cached_tokens": {"device": 1600, "host": 320, "store": 0},
    }
    stats = {"running": 2, "waiting": 1, "steps": 500, "prompt_tokens": 4000, "cache": cache}
    workers = [{"stats": {**stats, "drafts": {"by_source": {"cold": use, "device": use}}}}, {"stats": stats}]
    turn = ReplyStats(num_prompt=100, num_cached=80, num_generated=40)
    lines = stats_lines([turn, turn], workers)
    assert lines == [
        "conversation: 2 turns, 200 prompt tokens, 160 (80 %) cached, 80 generated",
        "server: 2 workers, 4 running, 2 waiting, 1,000 steps",
        "cache: device 726 of 28,726 pages, host 188 of 3,588 pages, no store",
        "prompt tokens from the cache: device 3,200, host 640, store 0, of 8,000",
        "drafts: 24 (40 %) of 60 accepted, 2.20 tokens a verifying step",
    ]
    assert max(map(len, lines)) <= 80
    assert len(stats_lines([], [{"stats": {}}])) == 5, "an engine that tells less"


@pytest.mark.parametrize("fail_at", [0, 1])
async def test_a_failed_turn_is_reported_and_forgotten(
    running: Any, monkeypatch: Any, capsys: Any, fail_at: int
) -> None:
    server, url = running
    server.engine.fail_at, server.engine.failure = fail_at, EngineError("the [worker] broke.")

    async def recover(index: int) -> None:
        if len(server.engine.seen) > 1:
            server.engine.failure = None

    server.engine.step = recover
    assert await talk(url, "one\ntwo\n", monkeypatch) == 1, "nobody was watching"
    assert prompts(server)[1] == "<|bos|><|user|>two<|end|><|assistant|>"
    assert "the [worker] broke." in capsys.readouterr().out


async def test_an_unknown_command_shows_help(running: Any, monkeypatch: Any, capsys: Any) -> None:
    _, url = running
    assert await talk(url, "/quit\n", monkeypatch) == 0
    assert "/exit leaves" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(UnavailableError, match="cannot reach the server"):
            chat.run(Options(), url)


def test_flags_make_the_same_configuration() -> None:
    given = {"model": "/models/a b", "max_model_len": 512, "kv_pages": 64, "policy": "longest-prefix", "debug": True}
    config = make_options(**given, host="0.0.0.0", port=1, log_level="debug")
    model, *words = chat.arguments_of(config)
    parsed: dict[str, Any] = {"model": model}
    while words:
        name = words.pop(0).removeprefix("--")
        parsed[name] = True if name == "debug" else words.pop(0)
    assert make_options(**parsed) == make_options(**given)


async def test_a_thought_is_shown_and_no_part_of_the_history(monkeypatch: Any, capsys: Any) -> None:
    thinking = make_server(
        FakeEngineClient(script=lambda prompt: reply_script("<think>\nso\n</think>\n\nYes.")),
        template=tiny_text.TEMPLATE + "{#- <think></think> -#}",
    )
    async with running_at(thinking) as url:
        assert await talk(url, "hi\nbye\n", monkeypatch) == 0
    assert capsys.readouterr().out.count("so\nYes.") == 2
    assert "Yes.<|end|><|user|>bye" in prompts(thinking)[1]
    assert "so" not in prompts(thinking)[1]
