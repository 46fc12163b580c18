"""A scheduler's outlet that remembers everything, per request and per worker."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason, SamplingParams
from hiserve.core.usage import CacheUse
from hiserve.errors import HiserveError
from hiserve.ipc.messages import Admit, Generate, Ready
from hiserve.ipc.updates import RequestUpdates, TokenDelta

PAGE_SIZE = 4
NAMESPACE = b"n" * 16


class FakeOutlet:
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


def generate(uid: int, *, priority: int = 0, caller: int = 0, **sampling: object) -> Generate:
    return Generate(uid, SamplingParams(**sampling), priority=priority, caller=caller)


def prompt(*tokens: int) -> Int32Array:
    return np.array(tokens, dtype=np.int32)


def step_updates(*rows: tuple[int, list[int], int], failed: tuple[int, ...] = ()) -> RequestUpdates:
    """Rows are (uid, tokens, finish)."""
    updates = RequestUpdates(failed=[(uid, "engine_error", "it broke") for uid in failed])
    updates.add(*(TokenDelta(tokens, FinishReason(finish), uid=uid, cached=CacheUse()) for uid, tokens, finish in rows))
    return updates
