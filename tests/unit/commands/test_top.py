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

import msgspec
import pytest
from rich.console import Console

from hiserve import cli
from hiserve.commands import serve
from hiserve.commands.top import draw
from hiserve.commands.top_frames import WINDOW_S, Frame, FrameHistory, TopServer, read_series
from hiserve.core.usage import DraftStats, DraftUse
from hiserve.ipc.cache_stats import CacheStats, CopyStats, StoreStats, TierStats, WindowStats
from hiserve.ipc.messages import Status, WorkerFacts, WorkerStats
from hiserve.server.metrics.registry import Metrics
from tests.helpers.fake_engine_client import FakeEngineClient
from tests.helpers.fake_server import Asked, FakeServer, Handler, Out
from tests.helpers.running import Running
from tests.helpers.waiting import PATIENCE_S, until
from tests.unit.server.conftest import make_server, reply_script

TIER = TierStats(num_pages=160, num_free=40, num_evictable=80, num_evicted=7)
STORE = StoreStats(num_pages=321, num_bytes=5 << 30, num_hits=9, num_evicted=4)
LOADS = CopyStats(30, 20, 4, {"broken": 6}, num_bytes=2 * 10**9, seconds=0.5)
CACHE = CacheStats(
    device=TIER,
    host=msgspec.structs.replace(TIER, num_evicted=8),
    store=STORE,
    loads=LOADS,
    misses={"cold": 5, "evicted": 9},
)
STATS = WorkerStats(
    running=2, waiting=1, free_pages=10, evictable_pages=50, steps=100, generated_tokens=40, cache=CACHE
)
PAGE = 16


def workers(stats: WorkerStats, num_pages: int = 100) -> list[WorkerFacts]:
    """Two workers with the same numbers."""
    return [WorkerFacts(replica, 77 + replica, 3, {}, num_pages, stats) for replica in (0, 1)]


def info(of: list[WorkerFacts], **more: Any) -> dict[str, Any]:
    """``/server_info``, as far as the board reads it."""
    shown: list[dict[str, Any]] = msgspec.to_builtins(of)
    for worker in shown:
        worker["stats"] |= {"drafts": "shown in other words", "something_new": [1]}
    return {"version": "9.9", "served_model_name": "tiny", "not_ready_because": None, "workers": shown, **more}


def metrics(of: list[WorkerFacts]) -> bytes:
    """``/metrics``, as a server with these workers writes it."""
    counted = Metrics("tiny", page_size=PAGE, compat="vllm")
    counted.prompt_tokens.inc(1000)
    counted.prefix_queries.inc(1000)
    counted.prefix_hits.inc(600)
    counted.cached_tokens["device"].inc(400)
    counted.cached_tokens["host"].inc(200)
    counted.engine.observe(Status(ticket=1, queued=1, queued_tokens=10, workers=of))
    return counted.render()


def showing(stats: WorkerStats, num_pages: int = 100, **more: Any) -> dict[str, tuple[int, Any]]:
    """The answers of a server."""
    of = workers(stats, num_pages)
    return {"server_info": (200, info(of, **more)), "metrics": (200, metrics(of))}


def answering(status: int, content: Any) -> Handler:
    async def handle(_: Asked, out: Out) -> None:
        await out.json(status, content)

    return handle


def routes(**changed: tuple[int, Any]) -> dict[str, Handler]:
    given = showing(STATS, config={"cache": {"store": "file:/x"}})
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
        "4 running, 3 waiting",
        "per second – – – – in all 1,000 600 0 200",
        "80 160 80 14 – 40.0%",  # the device of both replicas
        "80 160 80 16 – 20.0%",
        "store 5.00 GiB 321 8 – 0.0%",  # one store that both share, emptied by each of them
        "pages of the store: delivered 18 why no more was cached:",
        "together – 60.0%",
        "evicted 18, cold 10",
        "host → device – – 40 8 4.00",
        "host → device, pages not copied: broken 12",
        "0 3 2 1 – – 10 of 100 50 77",
        "1 3 2 1 – – 10 of 100 50 78",
    ):
        assert text in out, text
    assert "device → host" not in out


async def test_a_terminal_of_80_columns_cuts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    large = TierStats(num_pages=2_469_134, num_free=617_284, num_evictable=617_284, num_evicted=617_284)
    copies = msgspec.structs.replace(LOADS, num_wanted=6_172_839, num_fulfilled=6_172_839, num_in_flight=617)
    cache = CacheStats(large, large, STORE, loads=copies, offloads=copies, prefetches=copies, uploads=copies)
    stats = msgspec.structs.replace(
        STATS, free_pages=1_000_000, evictable_pages=1_000_000, running=512, waiting=1024, cache=cache
    )
    async with serving(**showing(stats, 4_000_000)) as server:
        assert await top("--url", server.url, "--once") == 0
    out = capsys.readouterr().out
    assert "…" not in out, out
    assert max(map(len, out.splitlines())) <= 80
    said = " ".join(out.split())
    for text in ("evicted: device 1,234,568, host 1,234,568, store 8", "1,234,568 1,234,568", "12,345,678 1,234 4.00"):
        assert text in said, (text, out)
    assert "512 1,024 – – 1,000,000 of 4,000,000" in said, out


async def test_window_pages_have_a_row_where_there_are_some(capsys: Any) -> None:
    windows = WindowStats(60, 10, 30, 12, num_tails=1_200, num_evicted_tails=7)
    stats = msgspec.structs.replace(STATS, cache=msgspec.structs.replace(CACHE, windows=windows))
    async with serving(**showing(stats)) as server:
        assert await top("--url", server.url, "--once") == 0
    out = words(capsys)
    assert "40 60 20 14 tails" in out and "tails: 2,400" in out, out
    async with serving() as server:
        assert await top("--url", server.url, "--once") == 0
    assert "tails" not in words(capsys)


async def test_what_a_server_does_not_show_is_said_and_the_rest_is_shown(capsys: Any) -> None:
    refusal = {"error": {"message": "no"}}
    async with serving(server_info=(403, refusal)) as server:
        assert await top("--url", server.url, "--once") == 0
    out = words(capsys)
    assert "/server_info needs the admin key" in out and "workers" not in out
    assert "4 running, 3 waiting" in out and "80 160 80 14 – 40.0%" in out
    async with serving(metrics=(404, b"")) as server:
        assert await top("--url", server.url, "--once") == 0
    out = words(capsys)
    assert "/metrics answers 404" in out and "10 of 100" in out
    assert "running, " not in out and "in all" not in out and "no copies" not in out  # zeros would be no facts


async def test_without_the_admin_key_the_public_metrics_are_shown(capsys: Any) -> None:
    counted = Metrics("tiny", page_size=PAGE, compat="none")
    counted.engine.observe(Status(ticket=1, queued=1, queued_tokens=10, workers=workers(STATS)))
    async with serving(server_info=(401, {}), metrics=(200, counted.render(is_whole=False))) as server:
        assert await top("--url", server.url, "--once") == 0
    out = words(capsys)
    assert "4 running, 3 waiting" in out
    assert "/metrics shows requests and cache to the admin key alone" in out
    assert "in all" not in out and "evicted" not in out and "no copies" not in out  # zeros would be no facts


async def test_how_steps_were_run_is_shown_where_graphs_are_replayed(capsys: Any) -> None:
    async def shown(**counts: dict[str, int]) -> str:
        async with serving(**showing(msgspec.structs.replace(STATS, graph_gate=counts))) as server:
            assert await top("--url", server.url, "--once") == 0
        return words(capsys)

    replayed = await shown(replay={"decode": 8, "piecewise": 1}, eager={"tokens": 1})
    assert "steps: 90.0% replayed as graphs (decode 16, piecewise 2), 10.0% eager (tokens 2)" in replayed
    assert "replayed" not in await shown(eager={"graphs_off": 4})


async def test_what_became_of_drafts_is_shown_where_there_are_any(capsys: Any) -> None:
    use = DraftUse(verify_steps=250, proposed=750, accepted_per_position=(200, 150))
    stats = msgspec.structs.replace(STATS, drafts=DraftStats({"cold": use, "host": use}))
    async with serving(**showing(stats)) as server:
        assert await top("--url", server.url, "--once") == 0
    assert "drafts: 1,400 of 3,000 accepted, 2.40 tokens a verifying step" in words(capsys)
    async with serving() as server:
        assert await top("--url", server.url, "--once") == 0
    assert "drafts" not in words(capsys)


async def test_the_key_is_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k3y\n")
    async with serving() as server:
        assert await top("--url", server.url, "--once", "--api-key-file", str(key)) == 0
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer k3y"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"server_info": (401, {}), "metrics": (401, {})}, "Give a key with --api-key-file"),
        ({"server_info": (200, {"workers": 3})}, "/server_info"),
        ({"metrics": (200, b"<html>")}, "/metrics"),
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
        (["--api-key-file", "/nowhere"], "--api-key-file"),
        (
            ["--url", "nonsense"],
            "cannot reach the server at nonsense/: Request URL is missing an 'http://' or 'https://' protocol.\n",
        ),
    ):
        assert await top(*argv, "--once") == 1
        assert said in capsys.readouterr().err


async def test_the_board_ends_when_the_server_has_gone_and_says_so(capsys: Any) -> None:
    async with serving() as server:
        running = asyncio.create_task(top("--url", server.url, "--interval-s", "0.05"))
        while len(server.asked) < 5 and not running.done():  # two frames and more
            await asyncio.sleep(0.01)
    assert await running == 1
    assert "the server has gone away: cannot reach" in capsys.readouterr().err


async def test_ctrl_c_ends_the_board_without_a_word_of_error() -> None:
    async with serving() as server:
        command = [sys.executable, "-m", "hiserve.cli", "top", "--url", server.url, "--interval-s", "0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(server.asked) < 5 and process.poll() is None:
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert "hiserve 9.9" in out


DEAF = """
import os, sys, time
from hiserve import cli
from hiserve.commands import top

read_frame, marker = top.read_frame, sys.argv.pop(1)

class Deaf:
    def __del__(self):
        open(marker, "w").close()
        time.sleep(3600)

def read(client):
    if os.path.exists(marker):
        os._exit(3)  # Ctrl-C ended the finalizer, and nothing else
    frame = read_frame(client)
    Deaf() if read.num_frames > 2 else None
    read.num_frames += 1
    return frame

read.num_frames = 0
top.read_frame = read
sys.exit(cli.main())
"""


async def test_ctrl_c_ends_the_board_within_a_finalizer_too(tmp_path: Path) -> None:
    async with serving() as server:
        marker = tmp_path / "deaf"
        command = [sys.executable, "-c", DEAF, str(marker), "top", "--url", server.url, "--interval-s", "0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            await until(lambda: marker.exists() or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            _, err = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")


async def test_ctrl_c_does_not_wait_for_a_server_that_hangs() -> None:
    async with serving() as server:
        is_asked, answer = asyncio.Event(), server.routes["/metrics"]

        async def hang(asked: Asked, out: Out) -> None:
            if server.paths().count("/metrics") > 2:
                is_asked.set()
                await asyncio.Event().wait()
            await answer(asked, out)

        server.routes["/metrics"] = hang
        command = [sys.executable, "-m", "hiserve.cli", "top", "--url", server.url, "--interval-s", "0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            await is_asked.wait()
            process.send_signal(signal.SIGINT)
            _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert (process.returncode, err) == (0, "")  # a request that waits until its timeout ends with 1


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


SERIES = """\
hiserve:num_requests_running 0
hiserve:prompt_tokens_total 0
hiserve:cache_config_info{{page_size="16"}} 1
hiserve:prefix_cache_queries_total {asked}
hiserve:cached_tokens_total{{cache_source="host"}} {host}
hiserve:generation_tokens_total {host}
"""


def frame(at: float, *, asked: float = 0.0, host: float = 0.0, loads: CopyStats | None = None, more: str = "") -> Frame:
    text = SERIES.format(asked=asked, host=host) + more
    if loads is not None:
        of = workers(WorkerStats(cache=CacheStats(loads=loads)))[:1]
        copied = [line for line in metrics(of).decode().splitlines() if 'copy="load"' in line]
        text += "".join(line + "\n" for line in copied if not line.startswith("#"))
    return Frame(at, None, read_series(text))


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
    assert history.rate(lambda each: each.value("cached_tokens")) == pytest.approx(100 / WINDOW_S)


def test_a_counter_that_fell_did_not_grow() -> None:
    history = FrameHistory(frame(0, host=50))
    assert history.rate(lambda each: each.value("cached_tokens")) is None
    history.add(frame(1, host=3))
    assert history.growth(lambda each: each.value("cached_tokens")) == 0.0


def test_a_store_shows_its_size_of_what_it_may_have_and_its_last_error() -> None:
    def board(**store: Any) -> str:
        of = workers(WorkerStats(cache=CacheStats(store=StoreStats(**store))))
        config = {"cache": {"store": "file:/x", "store_gib": 2.5}}
        read = msgspec.convert(info(of[:1], config=config), TopServer)
        return shown(FrameHistory(Frame(0, read, read_series(metrics(of[:1]).decode()))))

    assert "store 0.00 of 2.5 GiB 0 0 " in board(num_pages=0, num_bytes=0)
    assert "none asked for or written yet" in board(num_pages=0, num_bytes=0)
    out = board(num_pages=7, num_bytes=1 << 30, num_misses=3, num_errors=2, last_error="disk [full]")
    assert "store 1.00 of 2.5 GiB 7 " in out
    assert "pages of the store: not delivered 3, failed operations 2, the last error: disk [full]" in out


def test_a_bar_shows_what_is_there_however_little() -> None:
    counts = {"held": 1, "evictable": 2, "free": 9_997}
    text = [f'hiserve:cache_pages{{tier="host",state="{state}"}} {count}\n' for state, count in counts.items()]
    out = shown(FrameHistory(frame(0, more="".join(text))))
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
