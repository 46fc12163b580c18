"""Routers of others in front of two engines: streams pass, and one that broke goes on at the engine that is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import Live, serve
from tests.helpers.valkey import free_port
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.fleet
ROUTERS: dict[str, tuple[str, ...]] = {"smg": ("smg", "launch"), "vllm-router": ("vllm-router",)}
BODY: dict[str, Any] = {
    "model": "hiserve-nano",
    "prompt": "Would you like",
    "max_tokens": 200,
    "ignore_eos": True,
    "seed": 5,
    "presence_penalty": 0.5,
    "stream": True,
    "return_token_ids": True,
}
BROKEN = (httpx.TransportError, AssertionError)


@pytest.fixture(scope="module", params=ROUTERS)
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, list[Live]]]:
    """A client of a router, and the engines behind it."""
    program, *words = ROUTERS[request.param]
    found = shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"{program} is not installed"
    flags, port = ("--cpu-threads", "1", "--metrics-compat", "vllm"), free_port()
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(serve(tmp_path_factory.mktemp(name), *flags, is_fork=False)) for name in ("one", "two")
        ]
        urls = [engine.url for engine in engines]
        line = [found, *words, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        line += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--worker-urls", *urls]
        log = tmp_path_factory.mktemp("router") / "log"
        with log.open("wb") as sink:
            router = subprocess.Popen(line, stdout=sink, stderr=sink)
        stack.callback(router.wait)
        stack.callback(router.kill)
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S))
        deadline = time.monotonic() + PATIENCE_S
        while not is_serving(http):
            assert time.monotonic() < deadline and router.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        yield http, engines


def is_serving(http: httpx.Client) -> bool:
    try:
        return http.post("/v1/completions", json=BODY | {"stream": False, "max_tokens": 1}).status_code == 200
    except httpx.TransportError:
        return False


def read(http: httpx.Client, into: list[dict[str, Any]], on_event: Any = None, **fields: Any) -> None:
    """Adds the choices of a stream's events as they come."""
    with http.stream("POST", "/v1/completions", json=BODY | fields) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "choices" in event, f"the router ended the stream: {line}"
                into += event["choices"]
                if on_event is not None:
                    on_event()
    raise AssertionError("the stream ended early")


def text_of(choices: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for choice in choices)


def tokens_of(choices: list[dict[str, Any]]) -> list[int]:
    return [token for choice in choices for token in choice["token_ids"]]


def running(engine: Live) -> float:
    return engine.counter("vllm:num_requests_running")


def test_a_stream_that_broke_goes_on_through_the_router(fleet: tuple[httpx.Client, list[Live]]) -> None:
    http, engines = fleet
    whole: list[dict[str, Any]] = []
    read(http, whole)
    other: list[dict[str, Any]] = []
    read(http, other)
    assert text_of(other) == text_of(whole), "each engine says the same"
    assert len(tokens_of(whole)) == 200
    kept: list[dict[str, Any]] = []

    def kill() -> None:
        if len(kept) == 40:
            busy = max(engines, key=running)
            for pid in reversed(busy.pids()):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(BROKEN):
        read(http, kept, kill)
    assert 40 <= len(kept) < 200
    deadline = time.monotonic() + PATIENCE_S
    while True:  # until the router has learned of the death
        rest: list[dict[str, Any]] = []
        try:
            read(http, rest, resume_token_ids=tokens_of(kept))
            break
        except BROKEN:
            assert not rest and time.monotonic() < deadline
            time.sleep(0.2)
    assert text_of(kept) + text_of(rest) == text_of(whole)
    assert tokens_of(kept) + tokens_of(rest) == tokens_of(whole)
