"""An engine of this process, driven step by step: the times of each token and load; and conversations on it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hiserve.cache.storage.host_segment import open_segment
from hiserve.config.options import make_options
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyKind
from hiserve.core.usage import CacheUse
from hiserve.engine.build import build_engine
from hiserve.ipc.messages import Admit, GateCounts
from hiserve.launch import prepare

READY_TIMEOUT_S = 120.0
Texts = tuple[list[np.ndarray], list[list[np.ndarray]]]


@dataclass(slots=True)
class Seen:
    """One request, as its caller sees it; times by ``time.perf_counter``."""

    uid: int
    added: float
    times: list[float] = field(default_factory=list)  # when each token came
    tokens: list[int] = field(default_factory=list)
    cached: CacheUse | None = None  # what of its prompt came from the cache
    is_done: bool = False

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.added


@dataclass(slots=True)
class LoadSeen:
    """One order to load pages."""

    begin: float  # when it was given, by ``time.perf_counter``
    end: float = 0.0  # when it was known to have ended
    seconds: float = 0.0  # what it took of the link
    num_bytes: int = 0  # that arrived


class Drive:
    """An engine and everything that was seen of it.

    Attributes:
        max_len: Of its longest request, in tokens.
        memory: The plan of ``resolve``, bytes by item.
        build_s: Seconds until it was ready, its host pages included if they are awaited.
        loads: All that were ordered since the caller last cleared the list.

    Args:
        awaits_host: It is ready when all its host pages are.
        **settings: Of the engine.
    """

    def __init__(self, *, awaits_host: bool = True, **settings: Any) -> None:
        begin = time.perf_counter()
        launch = prepare(make_options(log_level="warning", **settings))
        self.settings, memory = launch.identified(), launch.resolved.memory
        self.memory = memory.parts | memory.host_parts
        self.model, self.vocab_size = launch.model, launch.model.vocab_size
        self.max_len = self.settings.model.max_model_len
        self._segment = open_segment(self.settings, 0)
        self.engine = build_engine(self.settings, self._segment)
        self._seen: dict[int, Seen] = {}
        self._open: dict[int, LoadSeen] = {}
        self.loads: list[LoadSeen] = []
        self._watch()
        if awaits_host:
            self.await_host()
        self.build_s = time.perf_counter() - begin

    @property
    def is_host_ready(self) -> bool:
        """Whether every page of the host can be copied to; without a host tier there is none that cannot."""
        return self._segment is None or self._executor.num_ready_host_pages >= self._segment.layout.num_pages

    def await_host(self) -> None:
        end = time.perf_counter() + READY_TIMEOUT_S
        while not self.is_host_ready:
            assert time.perf_counter() < end, "the host pages are not ready"
            time.sleep(0.01)

    @property
    def _executor(self) -> Any:
        return self.engine._executor

    def _watch(self) -> None:
        """Looks at what passes between engine and executor."""
        executor, submit, take_acks = self._executor, self._executor.submit, self._executor.take_acks

        def watched_submit(plan: Any) -> Any:
            for copy in plan.copies:
                if copy.kind is CopyKind.LOAD:
                    self._open[copy.op] = LoadSeen(time.perf_counter())
                    self.loads.append(self._open[copy.op])
            return submit(plan)

        def watched_acks(*arguments: Any) -> Any:
            acks = take_acks(*arguments)
            for ack in acks:
                if (load := self._open.pop(ack.op, None)) is not None:
                    load.end, load.seconds, load.num_bytes = time.perf_counter(), ack.seconds, ack.num_bytes
            return acks

        executor.submit, executor.take_acks = watched_submit, watched_acks

    def add(self, prompt: np.ndarray, num_new: int, **how: Any) -> Seen:
        """Adds a request that generates ``num_new`` tokens, past the model's end, greedy unless told; prompt int32 ``[n]``."""
        sampling = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": num_new, "ignore_eos": True} | how)
        uid = len(self._seen) + 1
        self._seen[uid] = Seen(uid, time.perf_counter())
        self.engine.add(Admit(uid, len(prompt), sampling, b"", 0), prompt)
        return self._seen[uid]

    def step(self) -> None:
        """One step; notes what it brought."""
        updates = self.engine.step()
        if updates is None:
            return
        assert not updates.failed, updates.failed
        now, start = time.perf_counter(), 0
        for uid, count, finish, cached in zip(
            updates.uids, updates.counts, updates.finishes, updates.cached, strict=True
        ):
            seen = self._seen[uid]
            seen.tokens += updates.tokens[start : start + count].tolist()
            seen.times += [now] * count
            seen.cached = cached or seen.cached
            seen.is_done |= bool(finish)
            start += count

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def finish(self, *requests: Seen) -> None:
        while not all(request.is_done for request in requests):
            self.step()

    def abort(self, *requests: Seen) -> None:
        self.engine.abort([request.uid for request in requests])
        self.settle()

    def settle(self) -> None:
        """Steps until there is nothing to do, copies included."""
        while self.engine.has_work:
            self.step()

    def leave_device(self) -> None:
        """Evicts from the device all pages that no request or copy uses; the host keeps its pages."""
        cache: Any = self.engine._planner._cache
        while len(cache.ops):
            self.step()
        pages = cache.allocate(np.zeros(cache.device.pages.num_free + cache.device.num_evictable, dtype=np.int32))
        assert pages is not None
        cache.free(pages)

    def close(self) -> None:
        self.engine.close()
        if self._segment is not None:
            self._segment.close()
        del self.engine
        gc.collect()  # what looks at its executor refers to it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Conversations:
    """The number and lengths of conversations; the first turn is not counted."""

    conversations: int
    group: int
    history: int  # tokens of a conversation's first turn
    turn_input: int  # new tokens of each later turn
    turn_output: int
    turns: int

    def texts(self, draw: Callable[[int], np.ndarray], count: int | None = None) -> Texts:
        """Draws the first prompts, int32, and what each later turn adds to each; ``count`` in place of all conversations."""
        first = [draw(self.history) for _ in range(count or self.conversations)]
        return first, [[draw(self.turn_input) for _ in first] for _ in range(self.turns - 1)]


def visit(drive: Drive, case: Conversations, texts: Texts) -> list[dict[str, Any]]:
    """Returns turn, seconds, input tokens and cached tokens of each group, in order."""
    first, later = texts
    histories, groups = list(first), []
    for turn in range(case.turns):
        for start in range(0, len(histories), case.group):
            members = range(start, min(start + case.group, len(histories)))
            begin = time.perf_counter()
            requests = [drive.add(histories[i], case.turn_output) for i in members]
            drive.finish(*requests)
            seconds = time.perf_counter() - begin
            groups.append(
                {
                    "turn": turn,
                    "seconds": seconds,
                    "input_tokens": sum(len(histories[i]) for i in members),
                    "device_tokens": sum(seen.cached.device for seen in requests if seen.cached),
                    "host_tokens": sum(seen.cached.host for seen in requests if seen.cached),
                }
            )
            if turn + 1 < case.turns:
                for i, seen in zip(members, requests, strict=True):
                    said = np.array(seen.tokens, dtype=np.int32)
                    histories[i] = np.concatenate((histories[i], said, later[turn][i]))
    return groups


def counted(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if group["turn"] > 0]


def input_rate(groups: Sequence[dict[str, Any]]) -> float:
    later = counted(groups)
    return float(sum(group["input_tokens"] for group in later) / sum(group["seconds"] for group in later))


def copied_pages(before: Any, after: Any) -> dict[str, int]:
    """Returns the pages that were loaded and stored between two ``stats().cache``."""
    return {
        "loaded_pages": after.loads.num_fulfilled - before.loads.num_fulfilled,
        "stored_pages": after.offloads.num_fulfilled - before.offloads.num_fulfilled,
    }


def gate_between(before: GateCounts, after: GateCounts) -> GateCounts:
    """Returns the gate's counts of the steps between two ``stats().graph_gate``."""
    return {
        action: {reason: count - before.get(action, {}).get(reason, 0) for reason, count in reasons.items()}
        for action, reasons in after.items()
    }
