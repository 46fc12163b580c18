"""``hiserve top``: what a board shows of what a server says, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hiserve import cli
from hiserve.bench.cache.copy_counts import ReplicaCacheStats
from hiserve.commands import serve
from hiserve.commands.top_board import draw
from hiserve.commands.top_frames import WINDOW_S, Frame, FrameHistory, ServerStatus, WorkerLoad
from hiserve.ipc.cache_stats import CopyStats
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.fake_server import Asked, FakeServer, Handler, Out
from tests.helpers.running import Running
from tests.unit.server.conftest import make_server, reply_script

STATS = {"running": 2, "waiting": 1, "free_pages": 10, "evictable_pages": 50, "steps": 100, "generated_tokens": 40}
WORKER = {"replica": 0, "pid": 77, "incarnation": 3, "num_pages": 100, "stats": STATS, "startup_s": {}}
INFO = {"version": "9.9", "served_model_name": "tiny", "not_ready_because": None, "workers": [WORKER], "config": {}}
TIER = {"num_pages": 200, "num_ready": 160, "num_free": 40, "num_evictable": 80, "num_evicted": 7}
STORE = {"num_pages": 321, "num_bytes": 5 << 30, "num_hits": 9, "num_refused": 0, "num_evicted": 4, "last_error": ""}
LOADS = {
    "num_wanted": 30,
    "num_fulfilled": 20,
    "num_in_flight": 4,
    "unfulfilled": {"broken": 6},
    "num_bytes": 2 * 10**9,
}
CACHE = {
    "replica": 0,
    "incarnation": 3,
    "tiers": {"device": TIER, "host": TIER | {"num_evicted": 8}, "store": STORE},
    "loads": LOADS | {"seconds": 0.5, "something_new": [1]},
    "misses": {"cold": 5, "evicted": 9},
}
METRICS = """hiserve:prompt_tokens_total{model_name="m"} 1000.0
hiserve:prefix_cache_queries_total{model_name="m"} 1000.0
hiserve:prefix_cache_hits_total{model_name="m"} 600.0
hiserve:cached_tokens_total{cache_source="device",model_name="m"} 400.0
hiserve:cached_tokens_total{cache_source="host",model_name="m"} 200.0
"""


def answering(status: int, content: Any) -> Handler:
    async def handle(_: Asked, out: Out) -> None:
        await out.json(status, content)

    return handle


def routes(**changed: tuple[int, Any]) -> dict[str, Handler]:
    given = {
        "server_info": (200, INFO),
        "get_load": (200, [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 3, "num_tokens": 64}]),
        "cache/stats": (200, {"replicas": [CACHE, CACHE | {"replica": 1}]}),
        "metrics": (200, METRICS.encode()),
    }
    return {f"/{path}": answering(*answer) for path, answer in (given | changed).items()}


@contextlib.asynccontextmanager
async def serving(**changed: tuple[int, Any]) -> AsyncIterator[FakeServer]:
    async with FakeServer(routes(**changed)) as server:
        yield server


async def top(*argv: str) -> int:
    return await asyncio.to_thread(cli.main, ["top", *argv])


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")


def words(capsys: Any) -> str:
    return " ".join(capsys.readouterr().out.split())


async def test_one_frame_shows_tiers_hits_copies_requests_and_workers(capsys: Any) -> None:
    async with serving() as server:
        assert await top("--url", server.url, "--once") == 0
    out = words(capsys)
    for text in (
        "hiserve 9.9, tiny",
        "2 running, 3 waiting",
        "80 160 80 14 – 40.0%",  # the device of both replicas, what is not ready left out: 320 - 160 - 80
        "80 160 80 16 – 20.0%",
        "store 5.00 GiB 321 8 – 0.0%",  # one store that both share, emptied by each of them
        "pages of the store: delivered 18 requests that missed",
        "together – 60.0%",
        "evicted 18, cold 10",
        "host → device – – 40 8 4.00",
        "host → device, pages not copied: broken 12",
        "0 3 2 1 – – 10 of 100 50 77",
    ):
        assert text in out, text
    assert "device → host" not in out


async def test_a_terminal_of_80_columns_cuts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    large = dict.fromkeys(TIER, 1234567) | {"num_pages": 4_000_000, "num_ready": 4_000_000}
    copies = LOADS | {"num_fulfilled": 12_345_678, "num_in_flight": 1234, "seconds": 0.5}
    cache = CACHE | {"tiers": {"device": large, "host": large, "store": STORE}}
    cache |= dict.fromkeys(("loads", "stores", "prefetches", "uploads"), copies)
    stats = STATS | {"free_pages": 1_000_000, "evictable_pages": 1_000_000, "running": 512, "waiting": 1024}
    info = INFO | {"workers": [WORKER | {"num_pages": 4_000_000, "stats": stats}]}
    changed = {"cache/stats": (200, {"replicas": [cache]}), "server_info": (200, info)}
    async with serving(**changed) as server:
        assert await top("--url", server.url, "--once") == 0
    out = capsys.readouterr().out
    assert "…" not in out, out
    assert max(map(len, out.splitlines())) <= 80
    said = " ".join(out.split())
    for text in ("evicted: device 1,234,567, host 1,234,567, store 4", "1,234,567 1,234,567", "12,345,678 1,234 4.00"):
        assert text in said, (text, out)
    assert "512 1,024 – – 1,000,000 of 4,000,000" in said, out


async def test_what_a_server_does_not_show_is_said_and_the_rest_is_shown(capsys: Any) -> None:
    refusal = {"error": {"message": "no"}}
    changed = {"server_info": (403, refusal), "cache/stats": (404, refusal), "metrics": (404, b"")}
    async with serving(**changed) as server:
        assert await top("--url", server.url, "--once") == 0
    out = words(capsys)
    assert "/server_info needs the admin key" in out and "/cache/stats answers 404" in out
    assert "2 running, 3 waiting" in out and "no copies" in out


async def test_how_steps_were_run_is_shown_where_graphs_are_replayed(capsys: Any) -> None:
    async def shown(**counts: dict[str, int]) -> str:
        workers = [WORKER | {"stats": STATS | {"graph_gate": counts}}] * 2
        async with serving(server_info=(200, INFO | {"workers": workers})) as server:
            assert await top("--url", server.url, "--once") == 0
        return words(capsys)

    replayed = await shown(replay={"decode": 8, "piecewise": 1}, eager={"tokens": 1})
    assert "steps: 90.0% replayed as graphs (decode 16, piecewise 2), 10.0% eager (tokens 2)" in replayed
    assert "replayed" not in await shown(eager={"graphs_off": 4})


async def test_what_became_of_drafts_is_shown_where_there_are_any(capsys: Any) -> None:
    counts = "".join(
        f'hiserve:spec_decode_num_{name}_total{{cache_source="{source}",model_name="m"}} {count}\n'
        for source in ("cold", "host")
        for name, count in (("drafts", 500.0), ("draft_tokens", 1500.0), ("accepted_tokens", 700.0))
    )
    async with serving(metrics=(200, (METRICS + counts).encode())) as server:
        assert await top("--url", server.url, "--once") == 0
    assert "drafts: 1,400 of 3,000 accepted, 2.40 tokens a verifying step" in words(capsys)
    async with serving() as server:
        assert await top("--url", server.url, "--once") == 0
    assert "drafts" not in words(capsys)


async def test_without_cache_stats_the_device_is_what_the_workers_tell(capsys: Any) -> None:
    async with serving(**{"cache/stats": (404, {})}) as server:
        assert await top("--url", server.url, "--once") == 0
    assert "40 50 10 0 – 40.0%" in words(capsys)


async def test_the_key_is_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k3y\n")
    async with serving() as server:
        assert await top("--url", server.url, "--once", "--api-key-file", str(key)) == 0
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer k3y"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"server_info": (401, {}), "get_load": (401, {})}, "Give a key with --api-key-file"),
        ({"server_info": (200, {"workers": 3})}, "/server_info"),
        ({"get_load": (200, b"<html>")}, "/get_load"),
    ],
)
async def test_a_server_of_another_kind_is_told_in_one_line(changed: Any, said: str, capsys: Any) -> None:
    async with serving(**changed) as server:
        assert await top("--url", server.url, "--once") == 1
    err = capsys.readouterr().err
    assert err.startswith("hiserve: ") and err.count("\n") == 1 and said in err


async def test_no_server_and_wrong_options_are_told(capsys: Any) -> None:
    for argv, said in (
        (["--url", "http://127.0.0.1:9"], "cannot reach the server"),
        (["--interval-s", "0"], "the least is 0.05"),
        (["--interval-s", "nan"], "out of range"),
        (["--url", "nonsense"], "cannot reach"),
        (["--api-key-file", "/nowhere"], "--api-key-file"),
    ):
        assert await top(*argv, "--once") == 1
        assert said in capsys.readouterr().err


async def test_the_board_ends_when_the_server_has_gone_and_says_so(capsys: Any) -> None:
    async with serving() as server:
        running = asyncio.create_task(top("--url", server.url, "--interval-s", "0.05"))
        while len(server.asked) < 9:  # two frames and more
            await asyncio.sleep(0.01)
    assert await running == 1
    assert "the server has gone away: cannot reach" in capsys.readouterr().err


async def test_ctrl_c_ends_the_board_without_a_word_of_error() -> None:
    async with serving() as server:
        command = [sys.executable, "-m", "hiserve.cli", "top", "--url", server.url, "--interval-s", "0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(server.asked) < 9:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(process.communicate, timeout=30)
    assert (process.returncode, err) == (0, "")
    assert "hiserve 9.9" in out


async def test_the_real_application_is_shown(capsys: Any) -> None:
    running = Running(make_server(FakeEngineClient(script=lambda prompt: reply_script())))
    try:
        await running.ready()
        assert await top("--url", serve.url_of(running.listener), "--once") == 0
    finally:
        await running.stop()
    out = words(capsys)
    assert "hiserve" in out and "0 running, 0 waiting" in out and "workers" in out


# --- rates ------------------------------------------------------------------------------------


def frame(at: float, *, asked: float = 0.0, host: float = 0.0, loads: CopyStats | None = None) -> Frame:
    counters = {
        "hiserve:prefix_cache_queries_total{}": asked,
        'hiserve:cached_tokens_total{cache_source="host"}': host,
        "hiserve:generation_tokens_total{}": host,
    }
    caches = [ReplicaCacheStats(tiers={"host": TIER}, loads=loads or CopyStats())]
    return Frame(at_s=at, info=None, load=[WorkerLoad()], caches=caches, counters=counters, hidden={})


def shown(history: FrameHistory) -> str:
    console = Console(width=150, highlight=False)
    with console.capture() as capture:
        console.print(draw(history, "http://x"))
    return " ".join(capture.get().split())


def test_rates_are_those_between_the_frames() -> None:
    history = FrameHistory(
        frame(0, asked=1000, host=0, loads=CopyStats(num_wanted=10, num_fulfilled=10, num_bytes=10**6))
    )
    history.add(frame(2, asked=1500, host=400, loads=CopyStats(num_wanted=50, num_fulfilled=50, num_bytes=9 * 10**6)))
    out = shown(history)
    assert "– tokens" not in out and "200 tokens" in out
    assert "80.0% 26.7%" in out  # 400 of 500 in the last seconds, 400 of 1500 in all
    assert "host → device 4 20 50 0" in out


def test_only_the_last_seconds_count_and_one_frame_before_them() -> None:
    history = FrameHistory(frame(0))
    for second in range(1, 31):
        history.add(frame(second, host=second if second < 20 else 20 + 10 * (second - 20)))
    assert history.rate(lambda each: each.counter("cached_tokens_total")) == pytest.approx(100 / WINDOW_S)


def test_a_counter_that_fell_did_not_grow() -> None:
    history = FrameHistory(frame(0, host=50))
    assert history.rate(lambda each: each.counter("cached_tokens_total")) is None
    history.add(frame(1, host=3))
    assert history.growth(lambda each: each.counter("cached_tokens_total")) == 0.0


def test_a_store_shows_its_size_of_what_it_may_have_and_its_last_error() -> None:
    def board(**store: Any) -> str:
        info = ServerStatus(config={"cache": {"store_gib": 2.5}})
        caches = [ReplicaCacheStats(tiers={"store": store})]
        return shown(FrameHistory(Frame(at_s=0, info=info, load=[], caches=caches, counters={}, hidden={})))

    assert "store 0.00 of 2.5 GiB 0 0 " in board(num_pages=0, num_bytes=0)
    assert "none asked for or written yet" in board(num_pages=0, num_bytes=0)
    out = board(num_pages=7, num_bytes=1 << 30, num_misses=3, num_errors=2, last_error="disk [full]")
    assert "store 1.00 of 2.5 GiB 7 " in out
    assert "pages of the store: not delivered 3, failed operations 2, the last error: disk [full]" in out


def test_a_bar_shows_what_is_there_however_little() -> None:
    tier = {"num_pages": 10_000, "num_free": 9_997, "num_evictable": 2}
    history = FrameHistory(
        Frame(at_s=0, info=None, load=[], caches=[ReplicaCacheStats(tiers={"host": tier})], counters={}, hidden={})
    )
    out = shown(history)
    bar = next(word for word in out.split() if "·" in word and len(word) > 5)
    assert (bar.count("█"), bar.count("▒"), len(bar)) == (1, 1, 36)


def test_a_tier_of_which_nothing_comes_is_named_with_the_reason() -> None:
    def board(copies: CopyStats) -> str:
        return shown(FrameHistory(frame(0, loads=copies)))

    idle = CopyStats(num_wanted=5000, num_fulfilled=10, unfulfilled={"not_worth_loading": 4900, "checksum": 90})
    assert "the host does not help: not_worth_loading for 4,900 of 5,000 pages wanted of it" in board(idle)
    busy = CopyStats(num_wanted=5000, num_fulfilled=1000, unfulfilled={"not_worth_loading": 4000})
    early = CopyStats(num_wanted=20, unfulfilled={"not_worth_loading": 20})
    for copies in (busy, early):
        assert "does not help" not in board(copies)
