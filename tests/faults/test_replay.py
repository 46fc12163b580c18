"""Workers die in every way there is; their users see a pause, and then the tokens they would have had."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from hiserve.engine.service import EXIT_DEVICE
from tests.e2e.live import Live
from tests.faults.harness import Crowd, check_idle, open_files, serving, worker_pid
from tests.helpers.processes import wait_dead
from tests.helpers.segment_name import segment_name
from tests.helpers.waiting import PATIENCE_S

SEED = 53


async def until_deaths(live: Live, count: int) -> dict[str, Any]:
    """Waits until so many workers died, and news of requests came after the last; returns ``/server_info``."""
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            info = await asyncio.to_thread(live.info)
            recovery = info["recovery"]
            if recovery is not None and recovery["incarnation"] > count:
                return info
            await asyncio.sleep(0.05)


def check_recovery(info: dict[str, Any]) -> None:
    recovery = info["recovery"]
    print("recovery:", json.dumps(recovery), "replays:", json.dumps(info["replays"]))
    assert list(recovery["phases"])[:4] == ["detect", "exit", "wait", "start process"]
    assert list(recovery["phases"])[-1] == "first token"
    assert abs(sum(recovery["phases"].values()) - recovery["total_s"]) < 0.1


@pytest.mark.wide  # in every run: test_everything_at_once.py, and test_process_lives.py of the clients
async def test_workers_that_die_of_a_fault_or_a_signal_cost_nobody_a_token(tmp_path: Path) -> None:
    with serving(tmp_path, worker="tests.faults.worker fatal=30:90,lives=1") as live:
        files = open_files(live)
        async with Crowd(live.url, SEED, num_users=6, leaving=0.2).talking() as crowd:
            info = await until_deaths(live, 1)
            check_recovery(info)
            check_crash_report(info["crash"], live)
            await crowd.until("answered", 4)
            expected = await whole_replies(live)
            asking = asyncio.create_task(whole_replies(live))
            await asyncio.sleep(0.15)
            await kill_at_work(live)
            info = await until_deaths(live, 2)
            assert await asking == expected
            check_recovery(info)
            assert info["crash"]["end"] == "killed by SIGKILL"
            assert info["crash"]["uids"]
        info = await asyncio.to_thread(check_idle, live, files)
        assert info["replays"]["requests"] >= 2
        assert sum(info["replays"]["cached"].values()) > 0, "nothing was found on the host"


async def kill_at_work(live: Live) -> None:
    """Kills the worker while it has requests: a worker that is stopped keeps what it has."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            pid = worker_pid(live)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)  # what it said before is taken
            if (await asyncio.to_thread(live.info))["num_inflight"]:
                break
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)


async def whole_replies(live: Live) -> list[Any]:
    """Replies that are not streamed: choices and usage of each."""
    bodies: list[dict[str, Any]] = [
        {"prompt": "Once upon a time", "n": 3, "temperature": 0.8, "seed": 3, "logprobs": 2},
        {"prompt": "The river", "stop": ["a", "q"], "min_tokens": 20, "temperature": 0.8, "seed": 4},
        {"prompt": "It was", "presence_penalty": 1.5, "temperature": 0},
    ]
    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S, trust_env=False) as http:
        replies = await asyncio.gather(
            *(http.post("/v1/completions", json={"max_tokens": 60} | body) for body in bodies)
        )
    answers = [reply.raise_for_status().json() for reply in replies]
    return [(answer["choices"], answer["usage"]["completion_tokens"]) for answer in answers]


def check_crash_report(crash: dict[str, Any], live: Live) -> None:
    """What a worker says whose device has died."""
    assert crash["end"] == f"exit code {EXIT_DEVICE}"
    assert "illegal memory access" in crash["error"]
    assert crash["snapshot"]["decision"]
    assert crash["num_steps"] > 0
    lines = live.log.read_text().splitlines()
    (report,) = [line.split("crash report: ")[1] for line in lines if "crash report: " in line]
    assert json.loads(report) == crash


@pytest.mark.long
async def test_a_worker_that_hangs_is_found_and_replaced_and_says_where(tmp_path: Path) -> None:
    with serving(tmp_path, "--step-timeout-s", "1.5", worker="tests.faults.worker hang=30:90,lives=1") as live:
        begin = time.monotonic()
        async with Crowd(live.url, SEED + 2, num_users=4, leaving=0).talking() as crowd:
            while (age := live.counter("hiserve:last_step_age_seconds")) < 1:
                await asyncio.sleep(0.1)
                assert time.monotonic() - begin < 60, age
            info = await until_deaths(live, 1)
            await crowd.until("answered", 4)
        print("recovery:", json.dumps(info["recovery"]))
        assert 1.5 <= info["recovery"]["phases"]["detect"] < 4
        assert "ended no step for" in info["crash"]["error"]
        assert "in step" in live.log.read_text(), "no stack was written"
        await asyncio.to_thread(check_idle, live, {})


@pytest.mark.long
async def test_a_request_that_kills_every_worker_is_told_not_to_come_again_and_the_others_go_on(tmp_path: Path) -> None:
    poison = 4095  # begins no prompt of the crowd
    body = {"prompt": [poison, 7, 8], "max_tokens": 5}
    with serving(tmp_path, worker=f"tests.faults.worker poison={poison}") as live:
        async with Crowd(live.url, SEED + 4, num_users=4, leaving=0).talking() as crowd:
            await crowd.until("answered", 4)
            async with httpx.AsyncClient(base_url=live.url, timeout=120, trust_env=False) as http:
                begin = time.monotonic()
                replies = await asyncio.gather(
                    http.post("/v1/completions", json=body), http.post("/v1/completions", json=body | {"stream": True})
                )
                print(f"given up after {time.monotonic() - begin:.1f} s")
            await crowd.until("answered", 4)
        for reply in replies:
            assert reply.status_code == 500, reply.text
            assert reply.headers["x-should-retry"] == "false"
            assert "at last with no other" in reply.json()["error"]["message"]
        await asyncio.to_thread(check_idle, live, {})


async def cut(live: Live, scheduler: int) -> None:
    """Kills the scheduler while a stream is open, which ends with an error and nothing else."""
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as http,
        http.stream("POST", f"{live.url}/v1/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        assert "choices" in json.loads((await anext(lines)).removeprefix("data: "))
        os.kill(scheduler, signal.SIGKILL)
        events = [json.loads(line.removeprefix("data: ")) async for line in lines if line.startswith("data: {")]
    assert "the scheduler process died" in events[-1]["error"]["message"]
    assert sum("error" in event for event in events) == 1


async def test_a_scheduler_that_is_killed_is_replaced_and_finds_the_cache_again(tmp_path: Path) -> None:
    with segment_name() as name, serving(tmp_path, "--host-cache-name", name, "--log-level", "info") as live:
        before = live.info()["processes"]
        crowd = Crowd(live.url, SEED + 3, num_users=4, leaving=0, may_refuse=True)
        async with crowd.talking():
            await crowd.until("answered", 4)
            crowd.may_fail = True
            begin = time.monotonic()
            await cut(live, before["scheduler"])
            await crowd.until("refused", 1)
            await crowd.until("answered", 4)
            print(f"recovery: {time.monotonic() - begin:.2f} s until four were answered", dict(crowd.counts))
        info = await asyncio.to_thread(check_idle, live, {})
        assert info["processes"]["scheduler"] != before["scheduler"]
        assert info["processes"]["api"] == before["api"]
        await asyncio.to_thread(wait_dead, [worker["pid"] for worker in before["workers"]])
        adopted = [int(number) for number in re.findall(r"adopted (\d+) of", live.log.read_text())]
        print(f"pages adopted: {adopted}")
        assert adopted[0] == 0
        assert adopted[-1] > 0
