"""KV events of real engines: routers that read them know what the next request finds in the cache."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hiserve import LLM, SamplingParams
from hiserve.engine import executing_half
from hiserve.engine.host_loads import LoadCostModel
from hiserve.errors import ConfigError, ModelError, ResourceError
from tests.e2e.live import Live, serve
from tests.helpers.forks import forked_engines
from tests.helpers.kv_mirror import Mirror, Reader
from tests.helpers.waiting import PATIENCE_S

PAGE = 16
SEED = 3
GUIDE = Path(__file__).parents[2] / "docs" / "kv-events.md"
SMALL: dict[str, Any] = {
    "page_size": PAGE,
    "max_model_len": 512,
    "kv_pages": 60,
    "max_running_requests": 4,
    "spec": "off",
    "cpu_threads": 1,
    "log_level": "warning",
}
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Router:
    """A mirror, its sockets, and the number of its last batch."""

    def __init__(self, events: str, replay: str, rank: int = 0) -> None:
        self.mirror = Mirror()
        self.reader = Reader(events, replay)
        self.rank = rank
        self.last = -1

    def catch_up(self) -> None:
        """Takes in all that was ever said, and then what comes."""
        for number, payload in self.reader.replay(self.last + 1):
            assert number > self.last
            self.mirror.apply(payload, self.rank)
            self.last = number

    def join(self, poke: Callable[[], object]) -> None:
        """Pokes the engine until its news arrive, and catches up."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.reader.events.poll(20):
            assert time.monotonic() < deadline
            poke()
        self.catch_up()

    def follow(self) -> list[dict[str, Any]]:
        """Takes in what was published, until it knows as much as a replay; returns the events."""
        newest = max((number for number, _ in self.reader.replay(self.last + 1)), default=self.last)
        events: list[dict[str, Any]] = []
        while self.last < newest:
            number, payload = self.reader.receive()
            if number > self.last:  # else it was in the replay
                assert number == self.last + 1, f"{number} came after {self.last}"
                events += self.mirror.apply(payload, self.rank)
                self.last = number
        return events

    def close(self) -> None:
        self.reader.close()


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"


def prompts(rng: np.random.Generator, count: int) -> Iterator[list[int]]:
    """Prompts that share beginnings, of any length."""
    shared = rng.integers(7, 4096, 96).tolist()
    for _ in range(count):
        yield shared[: rng.integers(0, 97)] + rng.integers(7, 4096, rng.integers(1, 160)).tolist()


# --- a server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, str, str]]:
    folder = tmp_path_factory.mktemp("kv")
    events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replays"
    flags = [text for name, value in SMALL.items() for text in ("--" + name.replace("_", "-"), str(value))]
    flags += ["--host-cache-gib", "0", "--kv-events", events, "--kv-events-replay", replay]
    with serve(folder, *flags) as live:
        yield live, events, replay
    assert sorted(path.name for path in folder.iterdir()) == ["serve.log"]


def complete(live: Live, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "hiserve-nano", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return dict(httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status().json())


def test_two_routers_foresee_the_cached_tokens_of_every_request(served: tuple[Live, str, str]) -> None:
    live, *endpoints = served
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)

    def poke() -> None:
        complete(live, rng.integers(7, 4096, PAGE).tolist())

    with closing(Router(*endpoints)) as first, closing(Router(*endpoints)) as late:
        first.join(poke)
        for i, prompt in enumerate(prompts(rng, 30)):
            if i == 20:
                late.join(poke)
            first.follow()
            foreseen = first.mirror.num_cached(prompt, "GPU")
            if i >= 20:
                late.follow()
                assert late.mirror.cached == first.mirror.cached
            usage = complete(live, prompt)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == foreseen
        assert first.mirror.num_events["BlockRemoved"] > 0
        httpx.post(f"{live.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
        for router in (first, late):
            assert {"type": "AllBlocksCleared"} in router.follow()
            assert not router.mirror.cached["GPU"]


def test_the_reader_of_the_guide_runs(served: tuple[Live, str, str], tmp_path: Path) -> None:
    live, *endpoints = served
    (program,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "reader.py").write_text(program)
    httpx.post(f"{live.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
    complete(live, list(range(7, 7 + 3 * PAGE)))
    num_pages = 3
    command = [sys.executable, tmp_path / "reader.py", *endpoints]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        try:
            while not select.select([reader.stdout], [], [], 0.1)[0]:
                num_pages += 1
                complete(live, [num_pages] * PAGE)
            num_pages += 1
            complete(live, [num_pages] * PAGE)
            while reader.stdout.readline() != f"{{'GPU': {num_pages}}}\n":
                assert reader.poll() is None
            httpx.post(f"{live.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
            assert reader.stdout.readline() == "{}\n"
        finally:
            reader.kill()


def test_the_successor_of_a_killed_worker_listens_at_its_address_and_begins_with_nothing(
    served: tuple[Live, str, str],
) -> None:
    live, *endpoints = served
    complete(live, list(range(7, 7 + 3 * PAGE)))
    (worker,) = live.info()["processes"]["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while [each["incarnation"] for each in live.info()["processes"]["workers"]] != [worker["incarnation"] + 1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    complete(live, list(range(200, 200 + 2 * PAGE)))
    with closing(Router(*endpoints)) as router:
        (number, payload), *rest = router.reader.replay(0)
        assert (number, router.mirror.apply(payload)) == (0, [{"type": "AllBlocksCleared"}])
        for _, batch in rest:
            router.mirror.apply(batch)
        assert len(router.mirror.cached["GPU"]) == 2


# --- an engine of this process ------------------------------------------------------------


def test_what_left_the_device_is_told_to_be_on_the_host(
    endpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {SEED}")
    monkeypatch.setattr(LoadCostModel, "is_worth_loading", lambda *_: True)  # however slow this machine is just now
    rng = np.random.default_rng(SEED)
    given = [rng.integers(7, 4096, 10 * PAGE + 1).tolist() for _ in range(8)]
    with (
        LLM(in_process=True, kv_events=endpoints[0], kv_events_replay=endpoints[1], host_cache_gib=0.2, **SMALL) as llm,
        closing(Router(*endpoints)) as router,
    ):
        for _ in range(2):
            llm.generate(given, ONE)
        router.catch_up()
        mirror = router.mirror
        assert len(mirror.cached["CPU_PINNED"]) > SMALL["kv_pages"] > len(mirror.cached["GPU"]) > 0
        assert mirror.num_events["BlockRemoved"] > 0
        num_from_host = 0
        for prompt in given:
            on_device, anywhere = mirror.num_cached(prompt, "GPU"), mirror.num_cached(prompt, "GPU", "CPU_PINNED")
            (result,) = llm.generate(prompt, ONE)
            assert result.num_cached_tokens == anywhere
            num_from_host += result.num_cached_tokens - on_device
            router.catch_up()
        assert num_from_host > 10 * PAGE
        llm._backend.engine.flush()  # type: ignore[attr-defined]
        router.catch_up()
        assert mirror.cached == {"GPU": {}, "CPU_PINNED": {}}


def test_a_path_in_use_is_refused_before_a_model_is_loaded(
    endpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    with LLM(in_process=True, kv_events=endpoints[0], **SMALL):
        monkeypatch.setattr(executing_half, "load_decoder", refuse)
        with pytest.raises(ResourceError) as raised:
            LLM(in_process=True, kv_events=endpoints[0], **SMALL)
    assert raised.value.param == "kv_events"


def test_a_model_that_does_not_load_gives_the_address_back(
    endpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*given: Any, **options: Any) -> None:
        raise ModelError("broken weights")

    monkeypatch.setattr(executing_half, "load_decoder", fail)
    for _ in range(2):
        with pytest.raises(ModelError, match="broken weights"):
            LLM(in_process=True, kv_events=endpoints[0], **SMALL)
    assert list(tmp_path.iterdir()) == []


# --- processes ----------------------------------------------------------------------------


def test_each_replica_has_an_endpoint_and_says_who_it_is(endpoints: tuple[str, str]) -> None:
    events, replays = endpoints
    options: dict[str, Any] = {"kv_events": events, "kv_events_replay": replays, "replicas": 2, "host_cache_gib": 0}
    with forked_engines(), LLM(**options, **SMALL) as llm:
        routers = [Router(f"{events}-{i}", f"{replays}-{i}", rank=i) for i in range(2)]
        rng = np.random.default_rng(SEED)
        given = [rng.integers(7, 4096, 2 * PAGE).tolist() for _ in range(8)]
        llm.generate(given, ONE)
        for router in routers:
            router.catch_up()
            router.close()
        assert [sum(router.mirror.num_cached(prompt, "GPU") > 0 for router in routers) for prompt in given] == [1] * 8
        assert all(router.mirror.cached["GPU"] for router in routers)


def test_a_port_in_use_ends_the_start_with_its_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            forked_engines(),
            pytest.raises(ResourceError, match=rf"^--kv-events cannot use tcp://127\.0\.0\.1:{port}: Address already"),
        ):
            LLM(kv_events=f"tcp://127.0.0.1:{port}", **SMALL)


def test_an_endpoint_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="--kv-events is 'nowhere'; give tcp://HOST:PORT"):
        LLM(kv_events="nowhere", **SMALL)
