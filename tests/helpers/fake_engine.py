"""An engine without a model, for real workers: token ids follow from the prompt, pages are digests in a set.

Tests of the scheduler and of the worker process need an engine on the worker's side; ``fake_engine_client`` has no process.

Some token ids at the front of a prompt are orders: see ``CRASH``, ``FAIL``, ``SLOW``.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hiserve.cache.index.reports import PrefixEvents
from hiserve.config.settings import Settings
from hiserve.core.digest import chain, namespace_digest, pack_tokens
from hiserve.core.plan import Int32Array
from hiserve.core.request import FinishReason
from hiserve.core.startup_measurements import NO_MEASUREMENTS, StartupMeasurements
from hiserve.core.usage import CacheUse
from hiserve.engine.loop import EngineFacts
from hiserve.errors import ModelError
from hiserve.ipc.cache_stats import LOCAL_TIERS, NodeFacts, TierName
from hiserve.ipc.lifecycle import CrashSnapshot, StepSnapshot
from hiserve.ipc.messages import Admit, WorkerStats
from hiserve.ipc.updates import RequestUpdates, TokenDelta
from hiserve.ipc.watching import RowFacts, StepRecord, Subject

CRASH = 900001  # the step that runs this request raises
KILL = 900002  # the step that runs this request ends the process as kill -9 would
FAIL = 900003  # the engine fails this request alone
LIE = 900004  # reports on a request nobody sent
STEP_S = 0.001
SLOW_FILE, SLOW_STEP_S = "slow", 0.05  # while this file is in the folder for temporary ones, a step takes so long
VOCAB = 1000


def reply_token(prompt: Int32Array, position: int) -> int:
    """The token the fake engine generates at a position of a request."""
    return int((int(prompt[-1]) * 31 + len(prompt) * 7 + position * 13) % VOCAB)


def reply(prompt: Int32Array, num_tokens: int) -> list[int]:
    return [reply_token(prompt, position) for position in range(num_tokens)]


def score_words(begin: int, end: int, num_top: int | None) -> bytes:
    """Scores of the tokens at these positions, each word the position itself; none when none are wanted."""
    if num_top is None:
        return b""
    return np.repeat(np.arange(begin, end, dtype="<i4"), 1 + 2 * num_top).tobytes()


@dataclass
class _Request:
    admit: Admit
    tokens: list[int]
    max_tokens: int
    cached: CacheUse
    digests: list[bytes]
    is_reported: bool = False
    is_scored: bool = False

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.admit.num_prompt


class FakeEngine:
    """One token per running request and step; the scores of a prompt take a step before.

    It chooses one more than its forerunner.
    """

    def __init__(
        self, config: Settings, step_s: float = STEP_S, measurements: StartupMeasurements = NO_MEASUREMENTS
    ) -> None:
        self._page_size = config.cache.page_size
        self._max_running = config.scheduler.max_running_requests
        self._step_s = step_s
        self._slow_file = Path(tempfile.gettempdir()) / SLOW_FILE
        self._namespace = namespace_digest("fake")
        self._pages: set[bytes] = set()
        self._events = PrefixEvents()
        self._requests: dict[int, _Request] = {}
        self._aborted: list[int] = []
        self._num_steps = 0
        self.facts = EngineFacts(
            max_running=self._max_running,
            max_len=config.model.max_model_len,
            num_pages=config.cache.kv_pages - 1,
            page_size=self._page_size,
            namespace=self._namespace,
            startup_s={"build": 0.0},
            measurements=StartupMeasurements(free_bytes=measurements.free_bytes + 1),
        )

    def add(self, admit: Admit, tokens: Int32Array) -> None:
        root = namespace_digest(self._namespace, admit.namespace)
        digests = chain(root, pack_tokens(tokens), self._page_size)
        depth = 0
        while depth < min(len(digests), (len(tokens) - 1) // self._page_size) and digests[depth] in self._pages:
            depth += 1
        room = self.facts.max_len - admit.num_prompt
        max_tokens = min(admit.sampling.max_tokens or room, room)
        self._requests[admit.uid] = _Request(
            admit, tokens.tolist(), max_tokens, CacheUse(device=depth * self._page_size), digests[:depth]
        )

    def abort(self, uids: list[int]) -> None:
        for uid in uids:
            if self._requests.pop(uid, None):
                self._aborted.append(uid)

    def flush(self, tiers: tuple[TierName, ...] = LOCAL_TIERS) -> int:
        if "device" not in tiers:
            return 0
        pages, self._pages = self._pages, set()
        self._events.remove(list(pages))
        return len(pages)

    def inspect(self, depth: int) -> list[NodeFacts]:
        """A root that tells the depth asked for."""
        return [NodeFacts(self._namespace.hex(), "", depth, 0, "", 0, 0, self._num_steps, len(self._pages))]

    def watch(self, subject: Subject, since_s: float) -> tuple[float, list[RowFacts], list[StepRecord]]:
        """Its running requests, or its last step."""
        running = list(self._requests.values())[: self._max_running]
        rows = [
            RowFacts(
                row=row,
                uid=each.admit.uid,
                state="decode",
                num_prompt=each.admit.num_prompt,
                num_cached=each.cached.num_tokens,
                source=each.cached.source,
                num_computed=len(each.tokens) - 1,
                num_generated=each.num_generated,
                num_left=each.max_tokens - each.num_generated,
                num_pages=-(-len(each.tokens) // self._page_size),
                priority=each.admit.priority,
                has_grammar=False,
                num_drafts=0,
                num_accepted=0,
            )
            for row, each in enumerate(running, 1)
        ]
        now_s, count = time.monotonic(), len(running)
        step = StepRecord(
            self._num_steps, now_s - STEP_S, now_s, count, count, 0, count, 0, 0, "eager", "graphs_off", 0.0, 0, ""
        )
        return (now_s, rows, []) if subject == "rows" else (now_s, [], [step])

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._aborted)

    def step(self) -> RequestUpdates | None:
        updates = RequestUpdates()
        for uid in self._aborted:
            updates.add(TokenDelta(finish=FinishReason.ABORT, uid=uid))
        self._aborted.clear()
        running = list(self._requests.values())[: self._max_running]
        if running:
            time.sleep(SLOW_STEP_S if self._slow_file.exists() else self._step_s)
            self._num_steps += 1
        for request in running:
            uid = request.admit.uid
            order, sampling = request.tokens[0], request.admit.sampling
            if not request.is_scored and sampling.prompt_logprobs is not None:
                request.is_scored = request.is_reported = True
                scores = score_words(1, request.admit.num_prompt, sampling.prompt_logprobs)
                updates.add(TokenDelta(scores=scores, uid=uid, cached=request.cached))
                continue
            if order == CRASH:
                raise RuntimeError("the device is on fire")
            if order == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if order == FAIL:
                updates.failed.append((uid, "engine_error", "this request is cursed"))
                del self._requests[uid]
                continue
            prompt = np.array(request.tokens[: request.admit.num_prompt], dtype=np.int32)
            token = reply_token(prompt, request.num_generated)
            request.tokens.append(token)
            is_last = request.num_generated >= request.max_tokens
            finish = FinishReason.LENGTH if is_last else FinishReason.RUNNING
            scores = score_words(len(request.tokens) - 1, len(request.tokens), sampling.logprobs)
            told_uid = uid + (10**9 if order == LIE else 0)
            cached = None if request.is_reported else request.cached
            updates.add(TokenDelta([token], finish, scores, told_uid, cached=cached))
            request.is_reported = True
            self._publish(request)
            if is_last:
                del self._requests[uid]
        updates.published, updates.removed = self._events.take()
        return None if updates.is_empty else updates

    def stats(self) -> WorkerStats:
        return WorkerStats(running=len(self._requests), steps=self._num_steps, free_pages=self.facts.num_pages)

    @property
    def is_copying(self) -> bool:
        return False

    @property
    def has_unsaved_pages(self) -> bool:
        return False

    def crash_snapshot(self) -> CrashSnapshot:
        return CrashSnapshot([StepSnapshot(self._num_steps, sorted(self._requests), len(self._requests), 0, [], [])])

    def close(self) -> None:
        self._requests.clear()

    def _publish(self, request: _Request) -> None:
        """Publishes the pages whose tokens are all computed: every token but the newest."""
        num_full = (len(request.tokens) - 1) // self._page_size
        if num_full > len(request.digests):
            root = namespace_digest(self._namespace, request.admit.namespace)
            request.digests = chain(root, pack_tokens(np.array(request.tokens[:-1])), self._page_size)
            new = [digest for digest in request.digests if digest not in self._pages]
            self._pages.update(new)
            self._events.publish(new)


def build(
    config: Settings, host_fd: int = -1, replica: int = 0, measurements: StartupMeasurements = NO_MEASUREMENTS
) -> FakeEngine:
    """Builds the engine, or fails as the model's name asks."""
    match config.model.model:
        case "tell_keys":
            raise ModelError(f"the keys are {config.server.api_key} and {config.server.admin_api_key}.")
        case "missing":
            raise ModelError("the folder 'missing' has no config.json. Give a checkpoint folder.")
        case "broken":
            raise RuntimeError("the builder is broken")
        case "vanishes":
            os._exit(7)
        case "slow":
            time.sleep(60)
        case "held":  # as long as a test wants
            while (Path(tempfile.gettempdir()) / "hold").exists():
                time.sleep(0.005)
    return FakeEngine(config, measurements=measurements)
