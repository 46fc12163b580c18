"""The benchmark of any servers: its workloads are the engine's, and a server counts as ready when it generates."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.gpu.sizes import FULL, TINY


class Loading(BaseHTTPRequestHandler):
    """Lists a model at once, and generates from the second request on."""

    num_asked = 0

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body == {"model": "m", "prompt": "Hello", "max_tokens": 1}
        type(self).num_asked += 1
        self._answer(200 if self.num_asked > 1 else 503, {})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *said: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Loading) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_is_ready_when_it_generates_and_not_when_it_lists_its_models(url: str) -> None:
    assert [peers.is_ready(url) for _ in range(2)] == [False, True]
    assert not peers.is_ready("http://127.0.0.1:1")


def test_a_server_that_ends_at_its_start_is_told() -> None:
    with pytest.raises(SystemExit, match="ended with 3"), peers.started([sys.executable, "-c", "raise SystemExit(3)"]):
        pass


def test_the_workloads_are_those_of_the_engine() -> None:
    found = peers.workloads(FULL)
    assert list(found) == [
        *(f"{case.rows} x {case.prompt} -> {case.output}" for case in FULL.peers),
        "8 x 8192 -> 1",
        "32 of 96 x 1024 -> 256",
        "64 chats x 6 turns",
    ]
    assert found["8 x 8192 -> 1"] == peers.Workload(
        "serve", {"num_prompts": 8, "max_concurrency": 8, "input_length": 8192, "output_length": 1}
    )
    assert peers.workloads(TINY)["4 chats x 2 turns"] == peers.Workload(
        "multiturn", {"num_clients": 4, "num_rounds": 2, "request_length": 16, "output_length": 8}
    )


def test_what_follows_two_dashes_are_flags_of_the_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "out.json", "abc", "--start", "hiserve", "--tiny", "--", "--tp", "2"])
    given = peers.arguments()
    assert (given.out, given.start, given.flags) == (Path("out.json"), ["hiserve"], ["--tp", "2"])
    monkeypatch.setattr(sys, "argv", ["peers", "out.json", "abc", "--url", "http://one", "--", "--tp", "2"])
    with pytest.raises(SystemExit):
        peers.arguments()


def test_ratios_are_of_the_first_server_to_each_other_in_workloads_that_both_ran() -> None:
    rates = {"ours": {"a": 30.0, "b": 8.0}, "theirs": {"a": 20.0}, "third": {"a": 60.0, "b": 4.0}}
    servers = {
        name: {title: {"median": {"output_tokens_per_s": rate}} for title, rate in found.items()}
        for name, found in rates.items()
    }
    assert peers.ratios(servers) == {"a": {"theirs": 1.5, "third": 0.5}, "b": {"third": 2.0}}
