"""What a server does between SIGTERM and its end: says so, finishes what it can, ends the rest with a clear error."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.live import Live, serve
from tests.helpers.processes import wait_dead
from tests.helpers.waiting import PATIENCE_S

GRACE_S = (2.5, 20.0, 120.0)  # a busy machine may not finish a short stream in the first; a fault fails in each
NUM_REQUESTS = 6
FLAGS = ("--cpu-threads", "1", "--max-running-requests", "4")
PATH = "/v1/completions"


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [50, 51], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


class Stream:
    """A stream that is read to its end, whatever that is."""

    def __init__(self, http: httpx.AsyncClient, max_tokens: int) -> None:
        self.begun = asyncio.Event()
        self.events: list[str] = []
        self.task = asyncio.create_task(self._read(http, max_tokens))

    async def _read(self, http: httpx.AsyncClient, max_tokens: int) -> None:
        async with http.stream("POST", PATH, json=body(max_tokens, stream=True)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self.begun.set()


async def test_a_drain_says_so_finishes_what_it_can_and_ends_the_rest_with_a_clear_error(tmp_path: Path) -> None:
    for grace_s in GRACE_S:
        folder = tmp_path / f"{grace_s:g}"
        folder.mkdir()
        try:
            await drain(folder, grace_s)
        except (AssertionError, httpx.HTTPError):
            if grace_s == GRACE_S[-1]:
                raise
        else:
            return


async def drain(folder: Path, grace_s: float) -> None:
    with serve(folder, *FLAGS, "--drain-timeout-s", str(grace_s)) as live:
        pids = live.pids()
        async with httpx.AsyncClient(base_url=live.url, timeout=2 * PATIENCE_S, trust_env=False) as http:
            alone = (await http.post(PATH, json=body(40))).json()["choices"][0]["text"]
            long, short = Stream(http, 8000), Stream(http, 40)
            whole = [asyncio.create_task(http.post(PATH, json=body(8000))) for _ in range(4)]  # two of them wait
            await asyncio.gather(long.begun.wait(), short.begun.wait())
            while (await asyncio.to_thread(live.info))["num_inflight"] < NUM_REQUESTS:
                await asyncio.sleep(0.01)
            begin = time.monotonic()
            live.process.send_signal(signal.SIGTERM)
            while (ready := await http.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
            assert (ready.status_code, "shutting down" in ready.text) == (503, True)
            assert (await http.get("/health")).status_code == 200
            refused = await http.post(PATH, json=body(1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert time.monotonic() - begin < grace_s, "it said so when its time was over"
            await short.task
            assert "".join(texts_of(short.events)) == alone
            await long.task
            assert time.monotonic() - begin > grace_s - 0.1
            check_end(json.loads(long.events[-1]))
            for response in await asyncio.gather(*whole):
                assert response.status_code == 503
                assert response.headers["retry-after"]
                check_end(response.json())
            assert await asyncio.to_thread(live.process.wait, PATIENCE_S) == 0  # whatever connections are kept
        wait_dead(pids)
        check_log(live)


def texts_of(events: list[str]) -> list[str]:
    assert events[-1] == "[DONE]"
    return [choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]]


def check_end(answer: dict[str, Any]) -> None:
    """The error of a request that did not end in time."""
    assert answer["error"]["code"] == "unavailable"
    assert "stopped" in answer["error"]["message"]
    assert "send" in answer["error"]["message"]


def check_log(live: Live) -> None:
    log = live.log.read_text()
    assert "draining" in log
    assert "Traceback" not in log
    assert "ERROR" not in log
