"""The gateway of Ray Serve over two engines, of which one is killed while it streams."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.valkey import free_port
from tests.helpers.waiting import PATIENCE_S

pytestmark = pytest.mark.fleet
BODY = {"prompt": "Would you like", "max_tokens": 200, "ignore_eos": True, "stream": True, "presence_penalty": 0.5}
SETTINGS = {"cpu_threads": "1", "spec": "off", "host_cache_gib": "0", "seal_key": "one secret"}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    import ray
    from ray import serve

    from hiserve.ray_app import gateway

    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=str(tmp_path_factory.mktemp("r")))
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(gateway({"engines": "2"} | SETTINGS), name="g", route_prefix="/")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        yield client
    serve.shutdown()
    ray.shutdown()


def engines() -> dict[int, int]:
    """Returns the processes of the replicas that are engines, each with the CPU time that its children and it took."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:g:engine"):
                times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
                found[int(folder.name)] = sum(map(int, times))
        except OSError:
            continue
    return found


def read(http: httpx.Client, *, kill_after: int | None = None, **fields: Any) -> tuple[str, list[Any]]:
    """Returns the text of a stream, and its events; kills the busiest engine after so many."""
    before, events = engines(), []
    with http.stream("POST", "/v1/completions", json=BODY | fields, headers={"x-request-id": "one"}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == "data: [DONE]":
                break
            if line:
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == kill_after:
                    now = engines()
                    os.kill(max(now, key=lambda pid: now[pid] - before.get(pid, 0)), signal.SIGKILL)
        else:
            raise AssertionError("the stream ended early")
    return "".join(event["choices"][0]["text"] for event in events), events


def test_no_client_notices_the_death_of_an_engine(http: httpx.Client) -> None:
    """Drawn with penalties, without a seed: the other engine draws the same."""
    whole, _ = read(http)
    text, events = read(http, kill_after=40)
    assert text == whole
    assert len({event["id"] for event in events}) == 1
    assert all("token_ids" not in event["choices"][0] for event in events)
    assert len(engines()) >= 1
    assert read(http)[0] == whole, "the engine that is left has all"


def test_what_an_engine_refuses_and_answers_passes(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert http.post("/v1/completions", json={"prompt": "x", "stream": True, "n": 0}).status_code == 400
    assert http.get("/v1/models").json()["data"][0]["id"] == "hiserve-nano"
    reply = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    assert reply.json()["usage"]["completion_tokens"] <= 5
