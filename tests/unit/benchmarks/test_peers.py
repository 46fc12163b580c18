"""The benchmark of any servers: its workloads are the engine's, and a server counts as ready when it generates."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.gpu.sizes import FULL, TINY
from benchmarks.served import bench_flags
from hiserve.cli import parse


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


def test_the_workloads_are_those_of_the_engine_and_of_its_users() -> None:
    plain, fp8, few_pages, small = peers.setups(FULL, Path("agents.jsonl"))
    at_once = [*(f"{case.rows} x {case.prompt} -> {case.output}" for case in FULL.peers), "8 x 8192 -> 1"]
    assert list(plain.workloads) == [
        *at_once,
        "256 x 128 -> 128",
        "1 x 32000 -> 256",
        "32 of 96 x 1024 -> 256",
        "256 of 512 x 128 -> 256",
        "256 of mixed lengths",
        "10 arrivals a second",
        "64 chats x 6 turns",
        "agents, 16 at once",
    ]
    assert plain.workloads["8 x 8192 -> 1"] == peers.Workload(
        "serve", {"num_prompts": 8, "max_concurrency": 8, "input_length": 8192, "output_length": 1}
    )
    agents = plain.workloads["agents, 16 at once"]
    assert (agents.options["speed"], agents.options["ignore_eos"], agents.is_recorded) == (math.inf, True, True)
    assert list(fp8.workloads) == [f"FP8, {title}" for title in at_once]
    assert list(few_pages.workloads) == ["32 conversations of 6144 over 4096 pages"]
    assert list(small.workloads) == ["qwen3-0.6b, 1 x 1024 -> 512", "qwen3-0.6b, 128 x 1024 -> 256"]
    assert all(set(setup.flags) == set(peers.COMMANDS) for setup in (fp8, few_pages))
    chats = peers.setups(TINY)[0].workloads["4 chats x 2 turns"]
    assert chats == peers.Workload(
        "multiturn",
        {"num_clients": 4, "num_rounds": 2, "shared_length": 32, "request_length": 16, "output_length": 8},
        bar=1.15,
    )


def test_each_workload_is_one_that_the_command_takes() -> None:
    """Its options have their names and are in their ranges, and so are the flags of our own server."""
    for sizes in (FULL, TINY):
        for setup in peers.setups(sizes, Path("agents.jsonl")):
            assert parse(["serve", "model", *setup.flags.get("hiserve", ())])[0] == "serve"
            for workload in setup.workloads.values():
                assert parse(["bench", workload.kind, *bench_flags(workload.options)])[2]["kind"] == workload.kind


def test_what_follows_two_dashes_are_flags_of_the_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "out.json", "abc", "--start", "hiserve", "--tiny", "--", "--tp", "2"])
    given = peers.arguments()
    assert (given.out, given.start, given.flags) == (Path("out.json"), ["hiserve"], ["--tp", "2"])
    monkeypatch.setattr(sys, "argv", ["peers", "out.json", "abc", "--url", "http://one", "--", "--tp", "2"])
    with pytest.raises(SystemExit):
        peers.arguments()


@pytest.mark.parametrize(("is_recorded", "sent", "counted"), [(False, [0, 1, 2], [1, 2]), (True, [0], [0])])
def test_the_first_run_does_not_count_unless_the_next_would_send_the_same(
    monkeypatch: pytest.MonkeyPatch, is_recorded: bool, sent: list[int], counted: list[int]
) -> None:
    seeds: list[int] = []

    def bench(kind: str, url: str, *, seed: int, vocab_size: int) -> dict[str, object]:
        seeds.append(seed)
        rates = dict.fromkeys(peers.FIGURES, float(seed))
        return {"summary": rates | {name: {"median": 1.0} for name in peers.LATENCIES}}

    monkeypatch.setattr(peers, "bench", bench)
    found = peers.measure("http://one", peers.Workload("serve", {}, is_recorded=is_recorded), 2, 100)
    assert seeds == [peers.SEED + number for number in sent]
    assert [run["requests_per_s"] for run in found["runs"]] == [peers.SEED + number for number in counted]


def test_ratios_are_of_the_first_server_to_each_other_in_workloads_that_both_ran() -> None:
    figures = {"ours": {"a": 30.0, "b": 8.0}, "theirs": {"a": 20.0}, "third": {"a": 60.0, "b": 4.0}}
    compared = {"a": "output_tokens_per_s", "b": "e2el_ms"}
    servers = {
        name: {
            title: {"median": {compared[title]: figure}, "compared": compared[title]} for title, figure in found.items()
        }
        for name, found in figures.items()
    }
    assert peers.ratios(servers) == {"a": {"theirs": 1.5, "third": 0.5}, "b": {"third": 0.5}}


def test_a_workload_that_is_not_there_ends_in_the_names_of_those_that_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = next(title for title in peers.setups(TINY)[-1].workloads)
    command = ["peers", "out.json", "abc", "--tiny", "--only", small]
    monkeypatch.setattr(sys, "argv", [*command, "--start", "hiserve"])
    assert peers.arguments().only == [small]
    for others in (
        ["--start", "hiserve", "--only", small, "1 x 2 -> 3"],
        ["--url", "http://one"],
    ):  # there, few are sent
        monkeypatch.setattr(sys, "argv", [*command, *others])
        with pytest.raises(SystemExit) as ended:
            peers.arguments()
        assert ended.value.code == 2
        told = capsys.readouterr().err
        assert "no workload is named '1 x 2 -> 3'" in told or f"no workload is named {small!r}" in told
        assert all(f"  {title}\n" in told for title in peers.setups(TINY)[0].workloads)
