"""A dispatcher without processes: its events are recorded per request and per worker."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hiserve.config.options import Scheduler
from hiserve.core.digest import chain, namespace_digest, pack_tokens
from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, Retain, SamplingParams
from hiserve.core.usage import CacheUse
from hiserve.errors import HiserveError
from hiserve.ipc.messages import Admit, Generate, Ready
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from hiserve.scheduler.dispatcher import Dispatcher
from hiserve.scheduler.placement import PrefixIndex
from hiserve.scheduler.queue import Fcfs, Policy

PAGE_SIZE = 4
NAMESPACE = b"n" * 16
ABORT = str(int(FinishReason.ABORT))
STOP = str(int(FinishReason.STOP))
UNLIMITED = Scheduler()


class RecordedEvents:
    """Remembers each event of a dispatcher; fails when a request has news after its end."""

    def __init__(self) -> None:
        self.sent: dict[int, list[int]] = defaultdict(list)
        self.terminals: dict[int, list[str]] = defaultdict(list)
        self.errors: dict[int, HiserveError] = {}
        self.admitted: list[tuple[int, int]] = []
        self.admits: dict[int, tuple[Admit, list[int]]] = {}
        self.news: list[RequestUpdates] = []
        self.dropped: list[tuple[int, list[int]]] = []

    def updated(self, updates: RequestUpdates) -> None:
        self.news.append(updates)
        for delta in updates:
            assert not self.terminals[delta.uid], f"news of {delta.uid} after its end"
            self.sent[delta.uid] += delta.tokens
            if delta.finish:
                self.terminals[delta.uid].append(str(int(delta.finish)))

    def failed(self, uid: int, error: HiserveError) -> None:
        self.terminals[uid].append(error.code)
        self.errors[uid] = error

    def admit(self, replica: int, message: Admit, tokens: Int32Array) -> None:
        self.admitted.append((replica, message.uid))
        self.admits[message.uid] = (message, tokens.tolist())

    def drop(self, replica: int, uids: list[int]) -> None:
        self.dropped.append((replica, uids))


def ready(replica: int = 0, *, rows: int = 4, max_len: int = 256) -> Ready:
    return Ready(
        incarnation=1,
        pid=1,
        max_running=rows,
        max_len=max_len,
        num_pages=100,
        page_size=PAGE_SIZE,
        namespace=NAMESPACE,
        startup_s={},
    )


def generate(
    uid: int, *, priority: int = 0, caller: int = 0, session: bytes = b"", retain: Retain = (), **sampling: object
) -> Generate:
    return Generate(uid, SamplingParams(**sampling), priority=priority, caller=caller, session=session, retain=retain)


def prompt(*tokens: int) -> Int32Array:
    return np.array(tokens, dtype=np.int32)


def step_updates(*rows: tuple[int, list[int], int], failed: tuple[int, ...] = ()) -> RequestUpdates:
    """Rows are (uid, tokens, finish)."""
    updates = RequestUpdates(failed=[(uid, "engine_error", "it broke") for uid in failed])
    updates.add(*(TokenDelta(tokens, FinishReason(finish), uid=uid, cached=CacheUse()) for uid, tokens, finish in rows))
    return updates


class Desk:
    """A dispatcher, its clock and its recorded events."""

    def __init__(
        self, policy: Policy | None = None, *, replicas: int = 1, rows: int = 2, limits: Scheduler = UNLIMITED
    ) -> None:
        self.events = RecordedEvents()
        self.now_s = 100.0
        self.dispatcher = Dispatcher(self.events, policy or Fcfs(), PrefixIndex(PAGE_SIZE), limits, lambda: self.now_s)
        for replica in range(replicas):
            self.dispatcher.worker_ready(replica, ready(replica, rows=rows))

    def submit(self, uid: int, *tokens: int, priority: int = 0, **sampling: object) -> None:
        self.dispatcher.submit(generate(uid, priority=priority, **sampling), prompt(*(tokens or (1, 2, 3))))
        self.dispatcher.dispatch()

    def expire_after(self, seconds: float) -> None:
        self.now_s += seconds
        self.dispatcher.expire()
        self.dispatcher.dispatch()

    def report(self, *rows: tuple[int, list[int], int], replica: int = 0, failed: tuple[int, ...] = ()) -> None:
        self.dispatcher.report(replica, step_updates(*rows, failed=failed))
        self.dispatcher.dispatch()

    def cache(self, replica: int, *tokens: int) -> None:
        digests = chain(namespace_digest(NAMESPACE, b""), pack_tokens(np.array(tokens)), PAGE_SIZE)
        self.dispatcher.report(replica, RequestUpdates(published=b"".join(digests)))

    @property
    def admitted(self) -> list[int]:
        return [uid for _, uid in self.events.admitted]

    def is_empty(self) -> bool:
        return len(self.dispatcher.ledger) == len(self.dispatcher.queue) == 0
