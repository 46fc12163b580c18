"""Two engines behind Dynamo's frontend on loopback, without etcd or NATS; one is killed while it streams."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.served import child_pids, cpu_s
from tests.helpers.valkey import free_port
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.fleet
SETTINGS = ("cpu_threads=1", "spec=off", "host_cache_gib=0", "seal_key=one secret")
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
BODY = {
    "model": "hiserve-nano",
    "prompt": "Would you like",
    "max_tokens": 200,
    "temperature": 0.9,
    "seed": 5,
    "stream": True,
    "ignore_eos": True,
}


@contextlib.contextmanager
def running(folder: Path, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a Python module of the fleet, whose services are found by files in a folder; its log is there too."""
    variables = {"DYN_FILE_KV": str(folder / "kv"), "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_LOG": "info"}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=log, env={**os.environ, **variables}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, list[subprocess.Popen[bytes]]]]:
    folder, port = tmp_path_factory.mktemp("dynamo"), free_port()
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(running(folder, f"engine-{index}", "hiserve.fleet.dynamo", *PLANES, *SETTINGS))
            for index in range(2)
        ]
        flags = ("--http-host", "127.0.0.1", "--http-port", str(port), "--migration-limit", "3", "--router-mode", "kv")
        stack.enter_context(running(folder, "frontend", "dynamo.frontend", *PLANES, *flags))
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S))
        deadline = time.monotonic() + PATIENCE_S
        while num_registered(folder) < 2 or not models(http):
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            assert time.monotonic() < deadline and all(engine.poll() is None for engine in engines), logs
            time.sleep(0.2)
        yield http, engines


def num_registered(folder: Path) -> int:
    """Returns the engines that have registered their model."""
    return sum(path.is_file() for path in (folder / "kv" / "v1" / "mdc").glob("*"))


def models(http: httpx.Client) -> list[Any]:
    try:
        return list(http.get("/v1/models").json()["data"])
    except (httpx.TransportError, ValueError):
        return []


def used_s(engine: subprocess.Popen[bytes]) -> float:
    return sum(cpu_s(pid) for pid in (engine.pid, *child_pids(engine.pid)))


def read(
    fleet: tuple[httpx.Client, list[subprocess.Popen[bytes]]], kill_after: int | None = None, **fields: Any
) -> tuple[str, float]:
    """Returns the text of a stream, and its longest gap in s; kills the busiest engine after so many events."""
    http, engines = fleet
    living = [engine for engine in engines if engine.poll() is None]
    before = {engine: used_s(engine) for engine in living}
    texts, times = [], []
    with http.stream("POST", "/v1/completions", json=BODY | fields) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                break
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                texts.append("".join(choice["text"] or "" for choice in event["choices"]))
                times.append(time.monotonic())
                if len(texts) == kill_after:
                    os.kill(max(living, key=lambda engine: used_s(engine) - before[engine]).pid, signal.SIGKILL)
        else:
            raise AssertionError("the stream ended early")
    return "".join(texts), max(later - earlier for earlier, later in itertools.pairwise(times))


def test_prompts_go_to_the_engine_that_has_their_pages(
    fleet: tuple[httpx.Client, list[subprocess.Popen[bytes]]],
) -> None:
    """The frontend knows it from our KV events; in turns, half of these would miss."""
    http, _ = fleet
    for word in ("alpha", "beta", "gamma"):
        prompt = " ".join(f"{word} {index}" for index in range(100))
        cached = []
        for _ in range(4):
            reply = http.post(
                "/v1/completions", json={**BODY, "prompt": prompt, "max_tokens": 3, "stream": False}
            ).json()
            cached.append(reply["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0))
            time.sleep(0.5)  # events are on their way
        assert cached[0] < 16 and min(cached[1:]) > 200, cached


def test_no_client_notices_the_death_of_an_engine(fleet: tuple[httpx.Client, list[subprocess.Popen[bytes]]]) -> None:
    """Drawn with a seed, whose noise is that of the place: the other engine draws the same."""
    whole, _ = read(fleet)
    assert read(fleet)[0] == whole
    text, gap_s = read(fleet, kill_after=40)
    assert text == whole
    print(f"longest gap {gap_s:.2f} s")
    assert sum(engine.poll() is None for engine in fleet[1]) == 1
    assert read(fleet)[0] == whole, "the engine that is left has all"


def test_what_an_engine_refuses_is_the_clients_fault(
    fleet: tuple[httpx.Client, list[subprocess.Popen[bytes]]],
) -> None:
    http, _ = fleet
    refused = http.post("/v1/completions", json={**BODY, "stream": False, "n": 2})
    assert refused.status_code == 400, refused.text
