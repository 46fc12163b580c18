"""What users see of the cache: tiers and misses in usage, counts that add up, the tree, flushes by tier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.live import Live, serve
from tests.helpers.processes import wait_resting
from tests.helpers.waiting import PATIENCE_S, wait_until

PAGE = 16
FLAGS = ("--host-cache-gib", "0.2", "--kv-pages", "60", "--max-model-len", "512", "--cpu-threads", "1")
SEED = 5
Details = dict[str, Any]


class Client:
    """Asks for continuations of token ids, and adds up what usage tells of the tiers."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self._http = httpx.Client(base_url=live.url, timeout=PATIENCE_S)
        self._rng = np.random.default_rng(SEED)
        self.told: Counter[str] = Counter()

    def close(self) -> None:
        self._http.close()

    def prompt(self, size: int = 161) -> list[int]:
        """A prompt like no other."""
        return self._rng.integers(7, 4096, size).tolist()  # type: ignore[no-any-return]

    def ask(self, prompt: list[int], **fields: Any) -> Details:
        """Returns ``prompt_tokens_details``."""
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
        reply = self._http.post("/v1/completions", json=body).raise_for_status().json()
        details: Details = reply["usage"]["prompt_tokens_details"]
        self.told.update(details["cached_tokens_details"])
        return details

    def fill(self) -> None:
        """Takes more pages than the device has, so that all that was there leaves it."""
        for _ in range(4):
            self.ask(self.prompt(400))

    def get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()

    def flush(self, tier: str = "") -> int:
        path = f"/flush_cache?tier={tier}" if tier else "/flush_cache"
        return int(self._http.post(path).raise_for_status().json()["flushed_pages"])

    def wait_for_host(self) -> None:
        """Waits until the memory of all host pages is ready; before, nothing is stored there."""
        wait_resting(self.live.pids()[-1])  # nobody makes more of it ready
        deadline = time.monotonic() + PATIENCE_S
        seen = [-1]
        while (num_pages := self.get("/cache/stats")["replicas"][0]["tiers"]["host"]["num_pages"]) != seen[
            -1
        ] or not num_pages:
            assert time.monotonic() < deadline, f"{num_pages} host pages are ready"
            seen.append(num_pages)
            time.sleep(1.2)  # an idle worker looks once a second

    def rest(self) -> dict[str, Any]:
        """Waits until no copy is under way; returns what ``/cache/stats`` says of the only replica."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            (replica,) = self.get("/cache/stats")["replicas"]
            if not sum(replica[kind]["num_in_flight"] for kind in ("loads", "offloads", "prefetches", "uploads")):
                return dict(replica)
            assert time.monotonic() < deadline, replica
            time.sleep(0.02)

    def state(self, prompt_pages: int) -> set[str]:
        """States of the nodes of the tree, its roots left out, that add this many pages."""
        (replica,) = self.get("/cache/tree?depth=32")["replicas"]
        return {node["state"] for node in replica["nodes"] if node["num_tokens"] == prompt_pages * PAGE}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    print(f"seed {SEED}")
    with serve(tmp_path_factory.mktemp("cache"), *FLAGS) as live:
        made = Client(live)
        made.wait_for_host()
        yield made
        made.close()


def check_identity(client: Client) -> None:
    """No copy is lost count of: in the counts, and in the metrics, which must be the same."""
    replica = client.rest()
    for copy, kind in (("load", "loads"), ("offload", "offloads"), ("prefetch", "prefetches"), ("upload", "uploads")):
        stats = replica[kind]
        assert stats["num_wanted"] == stats["num_fulfilled"] + sum(stats["unfulfilled"].values()), stats
        wanted, fulfilled, unfulfilled = (
            client.live.counter(f"hiserve:cache_{name}_tokens_total", copy=copy)
            for name in ("wanted", "fulfilled", "unfulfilled")
        )
        assert wanted == fulfilled + unfulfilled == stats["num_wanted"] * PAGE
        assert client.live.counter("hiserve:kv_offload_total_bytes_total", copy=copy) == stats["num_bytes"]


def test_a_conversation_that_left_the_device_comes_back_from_the_host(client: Client) -> None:
    prompt = client.prompt()
    assert client.ask(prompt)["cached_tokens"] == 0
    client.fill()
    before = client.rest()
    assert before["tiers"]["device"]["num_evicted"] > 0
    details = client.ask(prompt)
    assert details["cached_tokens_details"] == {"device": 0, "host": 160, "store": 0}
    assert details["cached_tokens"] == 160
    after = client.rest()
    assert after["loads"]["num_fulfilled"] == before["loads"]["num_fulfilled"] + 10
    assert after["loads"]["num_bytes"] > before["loads"]["num_bytes"]
    assert after["loads"]["seconds"] > before["loads"]["seconds"]
    check_identity(client)


def test_marked_prefixes_are_on_the_device_after_a_flood_and_others_are_not(client: Client) -> None:
    before, kept, other = client.rest(), client.prompt(), client.prompt()
    client.ask(kept, prompt_cache_retention="24h")
    client.ask(other)
    texts = {name: " ".join(f"{name} rule {number}." for number in range(30)) for name in ("kept", "other")}

    def session(name: str, first: str, **mark: Any) -> dict[str, Any]:
        system = [{"type": "text", "text": texts[name], **mark}]
        body = {"system": system, "messages": [{"role": "user", "content": first}], "max_tokens": 2}
        reply = httpx.post(f"{client.live.url}/v1/messages", json=body, timeout=PATIENCE_S).raise_for_status().json()
        return dict(reply["usage"])

    def cached(name: str) -> Details:
        messages = [{"role": "system", "content": texts[name]}, {"role": "user", "content": "And then?"}]
        body = {"messages": messages, "max_tokens": 2}
        reply = httpx.post(f"{client.live.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).raise_for_status()
        details: Details = reply.json()["usage"]["prompt_tokens_details"]
        client.told.update(details["cached_tokens_details"])
        return details

    usage = session("kept", "Hello.", cache_control={"type": "ephemeral", "ttl": "1h"})
    created = usage["cache_creation"]
    assert created["ephemeral_1h_input_tokens"] >= 6 * PAGE
    assert sum(created.values()) == usage["cache_creation_input_tokens"]
    client.told["device"] += usage["cache_read_input_tokens"]
    client.told["device"] += session("other", "Hello.")["cache_read_input_tokens"]
    client.fill()
    assert client.ask(kept)["cached_tokens_details"] == {"device": 160, "host": 0, "store": 0}
    assert client.ask(other)["cached_tokens_details"] == {"device": 0, "host": 160, "store": 0}
    found, lost = cached("kept"), cached("other")
    assert found["cached_tokens_details"]["device"] >= created["ephemeral_1h_input_tokens"] - PAGE
    assert lost["cached_tokens_details"]["device"] <= PAGE < lost["cached_tokens_details"]["host"]
    after = client.rest()
    assert after["num_retained"] - before["num_retained"] >= 16 and after["num_not_retained"] == 0
    client.flush()
    wait_until(lambda: client.rest()["num_retained"] == 0)  # the worker tells its counts some time after the flush


def test_every_miss_has_its_reason(client: Client) -> None:
    def miss(prompt: list[int], **fields: Any) -> tuple[str, int]:
        told = client.ask(prompt, **fields)["cache_miss"]
        return told["reason"], told["at"]

    before = client.rest()["misses"]
    prompt = client.prompt()
    assert miss(prompt) == ("cold", 0)
    assert miss(prompt) == ("page_remainder", 160)
    assert miss(prompt[:72] + client.prompt()) == ("diverged_at", 72)
    assert miss(prompt, cache_salt="mine") == ("namespace", 0)
    client.fill()  # the device evicts what the host has
    client.rest()
    client.flush("host")
    assert miss(prompt) == ("evicted", 0)
    after = client.rest()["misses"]
    grown = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    assert grown == {"cold": 5, "page_remainder": 1, "diverged_at": 1, "namespace": 1, "evicted": 1}
    for reason, count in after.items():
        assert client.live.counter("hiserve:cache_misses_total", reason=reason) == count
    check_identity(client)


def test_a_flush_of_a_tier_changes_what_the_next_request_finds_and_the_tree_shows(client: Client) -> None:
    client.flush("all")
    prompt = client.prompt(15 * PAGE + 1)
    client.ask(prompt)
    client.rest()
    assert client.state(15) == {"DH"}
    assert client.flush("device") > 0
    assert client.state(15) == {"H"}
    assert client.ask(prompt)["cached_tokens_details"] == {"device": 0, "host": 240, "store": 0}
    client.rest()
    assert client.state(15) == {"DH"}
    client.flush("host")
    assert client.state(15) == {"D"}
    assert client.ask(prompt)["cached_tokens_details"] == {"device": 240, "host": 0, "store": 0}
    assert client.flush("all") > 0
    assert client.state(15) == set()
    assert client.ask(prompt)["cached_tokens"] == 0
    check_identity(client)


def test_pages_of_each_tier_add_up(client: Client) -> None:
    client.ask(client.prompt())
    replica = client.rest()
    device, host = replica["tiers"]["device"], replica["tiers"]["host"]
    assert device["num_pages"] == 59 == device["num_free"] + device["num_evictable"]
    assert host["num_pages"] > 500
    assert host["num_free"] < host["num_pages"]
    for tier, pages in replica["tiers"].items():
        for state, name in (("free", "num_free"), ("evictable", "num_evictable")):
            assert client.live.counter("hiserve:cache_pages", tier=tier, state=state) == pages[name]


def test_what_users_were_told_is_what_was_counted(client: Client) -> None:
    """The sums over all replies of this module are the workers' counters, and the hits of the host are its loads."""
    prompt = client.prompt()
    client.ask(prompt)
    client.fill()
    client.ask(prompt)
    replica = client.rest()
    assert replica["cached_tokens"] == dict(client.told)
    left = replica["loads"]["unfulfilled"].get("not_worth_loading", 0)
    assert (replica["loads"]["num_wanted"] - left) * PAGE == client.told["host"] > 0
    for tier, count in client.told.items():
        assert client.live.counter("hiserve:cached_tokens_total", cache_source=tier) == count
    assert sum(replica["misses"].values()) == client.live.counter("hiserve:request_success_total")


def test_a_store_gives_back_what_device_and_host_lost_until_it_is_emptied(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with ExitStack() as stack:
        live = stack.enter_context(serve(tmp_path, *FLAGS, "--store", f"file:{store}", "--store-prefetch", "wait"))
        stack.callback((client := Client(live)).close)
        prompt = client.prompt()
        assert client.ask(prompt)["cached_tokens"] == 0
        deadline = time.monotonic() + PATIENCE_S
        while client.rest()["uploads"]["num_fulfilled"] < 10:  # they begin when the host's memory is ready
            assert time.monotonic() < deadline, client.rest()
            time.sleep(0.02)
        assert client.flush() > 0
        assert client.ask(prompt)["cached_tokens_details"] == {"device": 0, "host": 0, "store": 160}
        check_identity(client)
        tier = client.rest()["tiers"]["store"]
        assert (tier["num_pages"], tier["num_stored"], tier["num_hits"], tier["num_errors"]) == (10, 10, 10, 0)
        assert client.live.counter("hiserve:store_tokens_total", result="hit") == 160
        assert client.live.counter("hiserve:store_bytes") == tier["num_bytes"] == bytes_in(store)
        assert client.flush("store") == 0, "pages that others may share are counted"
        deadline = time.monotonic() + PATIENCE_S
        while client.rest()["tiers"]["store"]["num_pages"]:  # nobody asks the idle worker for anything
            assert time.monotonic() < deadline, list(store.rglob("*"))
            time.sleep(0.02)
        assert bytes_in(store) == 0
        assert client.ask(prompt)["cached_tokens_details"] == {"device": 160, "host": 0, "store": 0}
        assert client.flush() > 0
        assert client.ask(prompt)["cached_tokens"] == 0
        check_identity(client)
        client.flush("all")


def test_steps_are_shown_while_somebody_asks_for_them(client: Client) -> None:
    def gate() -> Counter[tuple[str, str]]:
        (worker,) = client.get("/server_info")["workers"]
        decisions = worker["stats"]["graph_gate"].items()
        return Counter(
            {(decision, reason): count for decision, counts in decisions for reason, count in counts.items()}
        )

    since_s = client.get("/debug/steps")["until_s"]
    before = gate()
    client.ask(client.prompt(300), max_tokens=40)
    client.rest()
    (replica,) = client.get(f"/debug/steps?since={since_s}")["replicas"]
    steps = [step for step in replica["steps"] if step["num_rows"]]
    assert Counter((step["decision"], step["reason"]) for step in steps) == gate() - before
    assert sum(step["num_prefill"] for step in steps) == 300
    assert sum(step["num_emitted"] for step in steps) >= 40
    assert all(before["end_s"] <= after["begin_s"] < after["end_s"] for before, after in pairwise(steps))
    assert client.get("/debug/rows")["replicas"] == [{"replica": 0, "incarnation": 1, "rows": []}]


def bytes_in(store: Path) -> int:
    """Bytes that the pages of a store take."""
    return sum(path.stat().st_size for path in store.glob("??/*"))


@pytest.mark.parametrize(
    "path", ["/cache/tree?depth=0", "/cache/tree?depth=x", "/debug/steps?since=x", "/flush_cache?tier=disk"]
)
def test_what_is_not_understood_is_refused_by_name(client: Client, path: str) -> None:
    reply = httpx.request("POST" if "flush" in path else "GET", client.live.url + path)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] in path
    assert reply.json()["error"]["message"].startswith(("depth must be", "since must be", "tier must be"))
