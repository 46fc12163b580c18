"""Real processes under faults: start them, load them, and see that every stream is right and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from hiserve.bench.soak.server_process import is_alive
from tests.e2e import live as lives
from tests.e2e.live import Live
from tests.helpers.processes import children, wait_dead
from tests.helpers.traffic import SETTINGS, TENANTS, TINY, Script, Turn, make_scripts
from tests.helpers.waiting import PATIENCE_S

SCRIPTS_SEED = 77
SPARE_FILES = 6
FLAGS = [
    value if name == "model" else f"--{name.replace('_', '-')}={value}"
    for name, value in (SETTINGS | TINY).items()
    if value is not True
]
FLAGS += ["--sampling-defaults=openai", "--kv-canary", *lives.DRAFTS]


@lru_cache
def scripts() -> list[Script]:
    """Conversations and their replies, by an engine that nothing disturbs: float64, no cache, no drafts."""
    return make_scripts(SCRIPTS_SEED)


# --- servers ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(
    folder: Path, *flags: str, worker: str | None = None, before: tuple[str, ...] = (), is_fork: bool = True
) -> Iterator[Live]:
    """Starts a server, and sees that nothing of it is left when it has ended.

    Args:
        folder: For its log and what is temporary.
        flags: Of ``hiserve serve``, beside ``FLAGS``.
        worker: Module and arguments of a worker of the test's own.
        before: What stands before its command line, such as ``unshare``.
        is_fork: As for ``live.serve``.
    """
    own = () if worker is None else (sys.executable, "-m", "tests.faults.serve", worker)
    temporary = folder / "tmp"
    temporary.mkdir()
    seen: set[int] = set()
    with lives.serve(
        folder,
        *FLAGS,
        *flags,
        command=(*before, *(own or lives.COMMAND)),
        environment={"TMPDIR": str(temporary)},
        is_fork=is_fork and not before,
    ) as live:
        try:
            yield live
        finally:
            seen.update(family(live.process.pid))
    wait_dead(seen)
    left = [path.name for path in temporary.iterdir() if path.name.startswith("hiserve-")]
    assert not left, f"left behind: {left}"


def family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(member for child in children(pid) for member in family(child))]


def check_idle(live: Live, num_files: dict[int, int]) -> dict[str, Any]:
    """No request is anywhere, all pages can be had, no process has more files open than it had; returns the facts.

    Args:
        live: The server.
        num_files: As ``open_files`` gave it; processes that are gone are not asked about.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        info = live.wait_idle()
        stats = [(worker["stats"], worker["num_pages"]) for worker in info["workers"]]
        held = sum(pages - its["free_pages"] - its["evictable_pages"] for its, pages in stats)
        more = {
            pid: (count, num_files[pid])
            for pid, count in open_files(live).items()
            if pid in num_files and count > num_files[pid] + SPARE_FILES
        }
        if not held and not more:
            return info
        assert time.monotonic() < deadline, f"{held} pages are held; open files, and before: {more}"
        time.sleep(0.1)


def open_files(live: Live) -> dict[int, int]:
    """Open descriptors of each process of a server."""
    return {pid: sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()) for pid in family(live.process.pid) if is_alive(pid)}


def worker_pid(live: Live) -> int:
    """The only worker."""
    (worker,) = live.info()["processes"]["workers"]
    return int(worker["pid"])


# --- streams ----------------------------------------------------------------------------------------------


@dataclass
class Reply:
    """What a client saw of one request.

    Attributes:
        status: Of HTTP.
        tokens: Of the stream, or of its part that was read.
        ends: Finish reasons and errors that came.
        retry_after: That header.
    """

    status: int
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    retry_after: str = ""


def body_of(turn: Turn, tenant: str = "") -> dict[str, Any]:
    body = {
        "prompt": turn.prompt,
        "max_tokens": turn.sampling.max_tokens,
        "temperature": turn.sampling.temperature,
        "seed": turn.sampling.seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    return body | ({"cache_salt": tenant} if tenant else {})


async def read(http: httpx.AsyncClient, body: dict[str, Any], num_wanted: int | None = None) -> Reply:
    """Reads a stream; closes it after so many tokens, if told to."""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        reply = Reply(response.status_code, retry_after=response.headers.get("retry-after", ""))
        if response.status_code != 200:
            reply.ends.append((await response.aread()).decode())
            return reply
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                reply.ends.append(event["error"]["message"])
            for choice in event.get("choices", ()):
                reply.tokens += choice.get("token_ids") or []
                reply.ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            if num_wanted is not None and len(reply.tokens) >= num_wanted:
                break
    return reply


class Crowd:
    """Conversations over HTTP. Every stream must end once, with the tokens of an engine that nothing disturbs.

    Args:
        url: Of the server.
        seed: Of who says what; printed.
        num_users: At once.
        leaving: Share of requests whose users leave before the end.
        may_refuse: Answers 429 and 503 with Retry-After are no error.

    Attributes:
        counts: Of requests, by what became of them: answered, left, refused, failed.
        may_fail: From now on streams may end with an error (but never with a wrong token); as long as it is set.
    """

    def __init__(
        self, url: str, seed: int, *, num_users: int = 6, leaving: float = 0.1, may_refuse: bool = False
    ) -> None:
        print(f"crowd seed {seed}")
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False)
        self._rng = np.random.default_rng(seed)
        self._num_users = num_users
        self._leaving = leaving
        self._may_refuse = may_refuse
        self._is_over = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self.may_fail = False

    @contextlib.asynccontextmanager
    async def talking(self) -> Any:
        """They talk while the body runs, and then until each stream has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_users):
                group.create_task(self._talk())
            try:
                yield self
            finally:
                self._is_over.set()
        await self._http.aclose()
        print(dict(self.counts))

    async def until(self, name: str, more: int, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Returns when so many more requests came to this end."""
        wanted = self.counts[name] + more
        async with asyncio.timeout(timeout_s):
            while self.counts[name] < wanted:
                await asyncio.sleep(0.01)

    async def _talk(self) -> None:
        while not self._is_over.is_set():
            tenant = TENANTS[self._rng.integers(len(TENANTS))]
            script = scripts()[self._rng.integers(len(scripts()))]
            for turn in script:
                leaves = self._rng.random() < self._leaving
                num_wanted = int(self._rng.integers(0, len(turn.reply))) if leaves else None
                reply = await read(self._http, body_of(turn, tenant), num_wanted)
                outcome = self._check(turn, reply, leaves)
                self.counts[outcome] += 1
                if outcome in ("refused", "failed"):
                    await asyncio.sleep(0.1)
                if outcome != "answered" or self._is_over.is_set():
                    break

    def _check(self, turn: Turn, reply: Reply, leaves: bool) -> str:
        assert reply.tokens == turn.reply[: len(reply.tokens)], f"{reply.tokens}, expected {turn.reply}"
        assert len(reply.ends) <= 1, reply
        if reply.status in (429, 503):
            assert self._may_refuse or self.may_fail, reply
            assert reply.retry_after.isdigit(), reply
            return "refused"
        if leaves and not reply.ends:
            return "left"
        if reply.ends != ["length"]:
            assert self.may_fail and len(reply.ends) == 1, reply
            return "failed"
        assert reply.tokens == turn.reply, reply
        return "answered"
