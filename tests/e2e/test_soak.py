"""Mixed traffic for as long as you like over pools that are far too small: nothing differs, leaks or grows.

The canary is on. Traffic repeats a few scripts at random, so that every reply is known.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest

from hiserve import LLM
from hiserve.ipc.messages import Admit
from tests.e2e.live import Live, serve
from tests.faults.harness import body_of
from tests.helpers.tiered import check_whole, counts_of, engine_of
from tests.helpers.traffic import SETTINGS, TENANTS, TINY, Memory, Script, Turn, census, make_scripts
from tests.helpers.waiting import PATIENCE_S

SEED = 77
NUM_LIVE = 6
ABORT_RATE = 0.1
WARM_UP_S, LONG_S = 480.0, 720.0
WARM_UP, ROUND = 120, 120  # requests, not seconds: a loaded machine would be measured while its memory still fills
MAX_ROUNDS = 12
MAX_HELD = 2  # objects of a class: a thread holds the last order it carried out until it has another
MAX_MIB_A_MIN = 1.0  # where there is time to measure it
MAX_MIB = 1.5  # from one round to the next, where there is not: a page of either tier is 0.25
LENGTHS = [pytest.param("short", marks=pytest.mark.wide), pytest.param("long", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def scripts() -> list[Script]:
    return make_scripts(SEED)


def warm_up(length: str) -> Callable[[int], bool]:
    return for_seconds(WARM_UP_S) if length == "long" else lambda num: num < WARM_UP


def for_seconds(seconds: float) -> Callable[[int], bool]:
    """Returns whether there is more to do: for so long from now on."""
    end = time.monotonic() + seconds
    return lambda _: time.monotonic() < end


def check_memory(
    pids: Sequence[int | str], run: Callable[[Callable[[int], bool], list[Memory]], None], length: str
) -> None:
    """Runs traffic, and checks that no process's memory grows with it.

    A leak grows from each round of requests to the next. Memory that a process takes once, and keeps, does not: there
    is a pair of rounds without it.

    Args:
        run: Runs traffic while there is more to do, given how many requests have ended, and samples each memory.
    """
    if length == "long":
        memories = [Memory(pid) for pid in pids]
        run(for_seconds(LONG_S), memories)
        assert all(memory.slope() <= MAX_MIB_A_MIN for memory in memories), [memory.slope() for memory in memories]
        return
    medians: list[list[float]] = []
    least = [math.inf] * len(pids)
    while len(medians) < MAX_ROUNDS and max(least) > MAX_MIB:
        memories = [Memory(pid) for pid in pids]
        run(lambda num: num < ROUND, memories)
        medians.append([memory.median() for memory in memories])
        least = [min(np.diff(each), default=math.inf) for each in zip(*medians, strict=True)]
    print(f"MiB of {pids} in each round: {medians}")
    assert max(least) <= MAX_MIB, f"memory grows in each round, by at least {least} MiB"


# --- an engine in this process ----------------------------------------------------------------------------


@dataclass
class Call:
    """A request on its way.

    Attributes:
        script: What comes after it.
        index: Which turn it is.
        tenant: Whose.
        num_wanted: Tokens after which it is given up; more than there are, if it is not.
        tokens: That came.
    """

    script: Script
    index: int
    tenant: bytes
    num_wanted: int
    tokens: list[int] = field(default_factory=list)

    @property
    def turn(self) -> Turn:
        return self.script[self.index]


class Users:
    """Keeps an engine busy with conversations, and compares every reply.

    Attributes:
        num_replies: Compared.
        num_aborts: Requests given up.
    """

    def __init__(self, llm: LLM, scripts: list[Script], rng: np.random.Generator) -> None:
        self._engine = engine_of(llm)
        self._scripts = scripts
        self._rng = rng
        self._last_uid = 0
        self._live: dict[int, Call] = {}
        self.num_replies = self.num_aborts = 0

    def run(self, has_more: Callable[[int], bool], memories: list[Memory]) -> None:
        """Serves them for a while, and then those that are left."""
        before = self._last_uid
        while has_more(self._last_uid - before):
            while len(self._live) < NUM_LIVE:
                script = self._scripts[self._rng.integers(len(self._scripts))]
                self._send(script, 0, TENANTS[self._rng.integers(len(TENANTS))].encode())
            self._step()
            for memory in memories:
                memory.sample()
        while self._live:
            self._step()

    def _send(self, script: Script, index: int, tenant: bytes) -> None:
        turn = script[index]
        gives_up = self._rng.random() < ABORT_RATE
        self._last_uid += 1
        num_wanted = int(self._rng.integers(0, len(turn.reply))) if gives_up else len(turn.reply) + 1
        self._live[self._last_uid] = Call(script, index, tenant, num_wanted)
        prompt = np.array(turn.prompt, dtype=np.int32)
        self._engine.add(Admit(self._last_uid, prompt.size, turn.sampling, tenant, 0), prompt)

    def _step(self) -> None:
        updates = self._engine.step()
        if updates is not None:
            assert not updates.failed
            parts = np.split(updates.tokens, np.cumsum(updates.counts, dtype=np.int64))[:-1]
            for uid, part, finish in zip(updates.uids, parts, updates.finishes, strict=True):
                if uid in self._live:
                    self._take(uid, part.tolist(), bool(finish))

    def _take(self, uid: int, tokens: list[int], is_over: bool) -> None:
        call = self._live[uid]
        call.tokens += tokens
        assert call.tokens == call.turn.reply[: len(call.tokens)]
        if is_over:
            assert call.tokens == call.turn.reply
            self.num_replies += 1
            del self._live[uid]
            if call.index + 1 < len(call.script):
                self._send(call.script, call.index + 1, call.tenant)
        elif len(call.tokens) >= call.num_wanted:
            self._engine.abort([uid])
            self.num_aborts += 1
            del self._live[uid]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(in_process=True, overlap=1, **SETTINGS, **TINY) as made:
        yield made


@pytest.mark.parametrize("length", LENGTHS)
def test_an_engine_of_this_process_neither_errs_nor_leaks(llm: LLM, scripts: list[Script], length: str) -> None:
    users = Users(llm, scripts, np.random.default_rng(SEED))
    users.run(warm_up(length), [])
    check_whole(llm)
    before = census()
    check_memory(["self"], users.run, length)
    check_whole(llm)
    check_paths(llm, users)
    assert all(num <= MAX_HELD for num in (census() - before).values()), census() - before


def check_paths(llm: LLM, users: Users) -> None:
    """Both tiers evicted, and both directions were copied, all the time."""
    counts = counts_of(llm)
    print(f"{users.num_replies} replies, {users.num_aborts} aborts; {counts}")
    assert counts.device.num_evicted > 200 and counts.host.num_evicted > 50
    assert counts.loads.num_fulfilled > 100 and counts.offloads.num_fulfilled > 100
    assert users.num_replies > 40 and users.num_aborts > 5


# --- processes, over HTTP ---------------------------------------------------------------------------------


class Clients:
    """Conversations over HTTP; every reply is compared.

    Attributes:
        num_replies: Compared.
        num_aborts: Streams that were closed before their end.
    """

    def __init__(self, url: str, scripts: list[Script], rng: np.random.Generator) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)
        self._scripts = scripts
        self._rng = rng
        self.num_replies = self.num_aborts = 0

    async def run(self, has_more: Callable[[int], bool], memories: list[Memory]) -> None:
        before = self._num_requests
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_LIVE):
                group.create_task(self._talk(lambda: has_more(self._num_requests - before), memories))

    @property
    def _num_requests(self) -> int:
        return self.num_replies + self.num_aborts

    async def close(self) -> None:
        await self._client.aclose()

    async def _talk(self, has_more: Callable[[], bool], memories: list[Memory]) -> None:
        while has_more():
            tenant = TENANTS[self._rng.integers(len(TENANTS))]
            for turn in self._scripts[self._rng.integers(len(self._scripts))]:
                body = body_of(turn, tenant) | {"stream": False}
                if self._rng.random() < ABORT_RATE:
                    await self._give_up(body)
                    break
                reply = (await self._client.post("/v1/completions", json=body)).raise_for_status().json()
                assert reply["choices"][0]["token_ids"] == turn.reply
                self.num_replies += 1
                for memory in memories:
                    memory.sample()

    async def _give_up(self, body: dict[str, object]) -> None:
        """Reads the first event of a stream and closes it."""
        async with self._client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                break
        self.num_aborts += 1


def check_idle(live: Live) -> None:
    """No request is anywhere, every device page can be had, no copy is under way."""
    for worker in live.wait_idle()["workers"]:
        assert worker["incarnation"] == 1
    deadline = time.monotonic() + PATIENCE_S
    while True:
        (replica,) = httpx.get(f"{live.url}/cache/stats", timeout=PATIENCE_S).raise_for_status().json()["replicas"]
        device, host = replica["tiers"]["device"], replica["tiers"]["host"]
        copies = [replica[kind] for kind in ("loads", "offloads")]
        is_idle = not any(each["num_in_flight"] for each in copies)
        if is_idle and device["num_free"] + device["num_evictable"] == device["num_pages"]:
            break
        assert time.monotonic() < deadline, replica
        time.sleep(0.05)
    for each in copies:
        assert each["num_wanted"] == each["num_fulfilled"] + sum(each["unfulfilled"].values())
    assert replica["loads"]["num_fulfilled"] > 20
    assert device["num_evicted"] > 100 and host["num_evicted"] > 20


@pytest.mark.parametrize("length", LENGTHS)
def test_a_server_neither_errs_nor_leaks(scripts: list[Script], tmp_path: Path, length: str) -> None:
    options = SETTINGS | TINY | {"overlap": 1}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not True]
    with serve(tmp_path, *flags, "--kv-canary", "--sampling-defaults=openai") as live:
        live.wait_idle()
        with asyncio.Runner() as runner:
            clients = Clients(live.url, scripts, np.random.default_rng(SEED))
            try:
                runner.run(clients.run(warm_up(length), []))
                check_memory(live.pids(), lambda *args: runner.run(clients.run(*args)), length)
            finally:
                runner.run(clients.close())
        print(f"{clients.num_replies} replies, {clients.num_aborts} aborts")
        assert clients.num_replies > 40 and clients.num_aborts > 5
        check_idle(live)
