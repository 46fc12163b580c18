"""Ten times too much work, deadlines, and readers that do not read: what is promised is kept, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import Live, serve
from tests.helpers.small_model import small_model
from tests.helpers.waiting import PATIENCE_S, wait_until

ROWS = 4
QUEUED = 8
CAPACITY = ROWS + 1 + QUEUED  # a worker holds one more than its rows
QUEUE_TIMEOUT_S = 1.5
REQUEST_TIMEOUT_S = 1.0
SIZES = ("--max-running-requests", str(ROWS), "--kv-pages", "600", "--max-model-len", "2048", "--cpu-threads", "1")
SMALL = (small_model(), *SIZES)
LIMITS = ("--max-queued-requests", str(QUEUED), "--queue-timeout-s", str(QUEUE_TIMEOUT_S))
TIMEOUT = ("--request-timeout-s", str(REQUEST_TIMEOUT_S))
GREEDY = {"temperature": 0, "ignore_eos": True}
COMMAND = (sys.executable, "-m", "tests.helpers.small_buffers")
CUT = "hiserve:slow_readers_total"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = (*SMALL, *LIMITS, "--log-level", "warning")
    with serve(tmp_path_factory.mktemp("overload"), *flags, command=COMMAND) as server:
        yield server


def client(live: Live) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=live.url, timeout=2 * PATIENCE_S, limits=limits, trust_env=False)


def body(number: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [10 + number % 3000, 11, 12, 13], "max_tokens": max_tokens, **GREEDY, **fields}


def num_files(live: Live) -> int:
    return len(os.listdir(f"/proc/{live.process.pid}/fd"))


def check_nothing_left(live: Live, files: int) -> None:
    (worker,) = live.wait_idle()["workers"]
    stats = worker["stats"]
    assert stats["free_pages"] + stats["evictable_pages"] == worker["num_pages"]
    wait_until(lambda: num_files(live) <= files, lambda: f"{num_files(live)} open files, {files} before")


async def test_ten_times_too_much_is_answered_or_refused_and_nothing_else(live: Live) -> None:
    files = num_files(live)
    async with client(live) as http:
        alone = [(await http.post("/v1/completions", json=body(n, 48))).json()["choices"][0] for n in range(8)]

        async def ask(number: int) -> tuple[int, httpx.Response]:
            return number, await http.post("/v1/completions", json=body(number, 48))

        with live.stopped():  # until all have arrived: this process may be slower than the worker
            asking = [asyncio.create_task(ask(number % 8)) for number in range(10 * CAPACITY)]
            while sum(task.done() for task in asking) < 9 * CAPACITY:
                await asyncio.sleep(0.01)
        results = await asyncio.gather(*asking)
    statuses = Counter(response.status_code for _, response in results)
    print(statuses)
    assert set(statuses) <= {200, 429, 503}
    assert statuses[200] >= CAPACITY - QUEUED
    assert statuses[429] >= CAPACITY
    for number, response in results:
        if response.status_code == 200:
            assert response.json()["choices"][0]["text"] == alone[number]["text"]
        else:
            assert 1 <= int(response.headers["retry-after"]) <= 60
            error = response.json()["error"]
            assert error["code"] == ("overloaded" if response.status_code == 429 else "queue_timeout")
    await asyncio.to_thread(check_nothing_left, live, files + 1)


async def test_a_request_that_waits_too_long_is_told_in_time_and_the_others_go_on(live: Live) -> None:
    async with client(live) as http:
        with live.stopped():
            held = [asyncio.create_task(http.post("/v1/completions", json=body(n, 60))) for n in range(ROWS + 1)]
            await asyncio.to_thread(wait_until, lambda: live.info()["num_inflight"] == ROWS + 1)
            begin = time.monotonic()
            late = await asyncio.gather(*(http.post("/v1/completions", json=body(n, 4)) for n in range(3)))
            waited = time.monotonic() - begin
        assert [response.status_code for response in late] == [503] * 3
        assert waited > QUEUE_TIMEOUT_S - 0.1
        assert "no worker was free" in late[0].json()["error"]["message"]
        done = await asyncio.gather(*held)
    for response in done:
        assert response.status_code == 200
        (choice,) = response.json()["choices"]
        assert (choice["finish_reason"], response.json()["usage"]["completion_tokens"]) == ("length", 60)


async def test_a_request_that_takes_too_long_ends_with_what_it_has(tmp_path: Path) -> None:
    with serve(tmp_path, *SMALL, *TIMEOUT) as live:
        async with client(live) as http:
            begin = time.monotonic()
            tasks = [http.post("/v1/completions", json=body(n, 2000)) for n in range(ROWS)]
            responses = await asyncio.gather(*tasks)
            assert time.monotonic() - begin > REQUEST_TIMEOUT_S - 0.1
        for response in responses:
            answer = response.json()
            assert response.status_code == 200
            assert answer["choices"][0]["finish_reason"] == "abort"
            num_tokens = answer["usage"]["completion_tokens"]
            assert num_tokens < 2000
            assert bool(answer["choices"][0]["text"]) == bool(num_tokens)
        await asyncio.to_thread(live.wait_idle)


async def test_readers_that_do_not_read_slow_nobody_down_are_cut_at_a_limit_and_leave_nothing(live: Live) -> None:
    files, num_cut = num_files(live), live.counter(CUT)

    async def reply() -> tuple[float, str]:
        async with client(live) as http:
            begin = time.monotonic()
            response = await http.post("/v1/completions", json=body(1, 32))
            assert response.status_code == 200
            return time.monotonic() - begin, response.json()["choices"][0]["text"]

    before = [await reply() for _ in range(5)]
    host, port = live.url.removeprefix("http://").split(":")
    sleepers = []
    content = json.dumps(body(7, 1900, stream=True, return_token_ids=True, logprobs=20)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    for _ in range(ROWS - 2):  # they hold rows; a reply of theirs is far larger than the sockets' buffers
        sleeper = socket.socket()
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sleeper.connect((host, int(port)))
        sleeper.sendall(head + content)
        sleepers.append(sleeper)
    await asyncio.sleep(0.2)
    during = [await reply() for _ in range(5)]
    medians = [statistics.median(seconds for seconds, _ in replies) for replies in (before, during)]
    print(f"{medians[0]:.3f} s before, {medians[1]:.3f} s with {len(sleepers)} readers asleep")
    assert medians[1] < 10 * medians[0] + 5
    assert {text for _, text in during} == {text for _, text in before}
    await asyncio.to_thread(live.wait_idle)  # although nobody has read
    assert live.counter(CUT) == num_cut + len(sleepers)
    for sleeper in sleepers:
        sleeper.settimeout(PATIENCE_S)
        assert b'"code":"slow_reader"' in await asyncio.to_thread(rest_of, sleeper)
        sleeper.close()
    await asyncio.to_thread(check_nothing_left, live, files + 1)


def rest_of(sleeper: socket.socket) -> bytes:
    """Reads a chunked reply to its end; returns the last of it."""
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        piece = sleeper.recv(65536)
        assert piece, tail
        tail = (tail + piece)[-1000:]
    return tail


async def test_a_half_closed_connection_gets_its_answer(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    content = json.dumps(body(3, 8)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + content[: len(content) // 2])
    await writer.drain()
    writer.transport.abort()  # in the middle of the body
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + content)
    await writer.drain()
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()
    live.wait_idle()


def test_the_server_wrote_nothing_alarming(live: Live) -> None:
    alarming = [line for line in Path(live.log).read_text().splitlines() if "Traceback" in line or "ERROR" in line]
    assert not alarming
