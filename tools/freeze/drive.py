"""Runs a workload and writes down its plans, results and reports."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from hiserve import LLM, SamplingParams
from hiserve.core.request import SpecParams
from tools.freeze import names
from tools.freeze.clock import VirtualClock
from tools.freeze.device import VirtualDevice
from tools.freeze.encode import Encoder
from tools.freeze.names import value
from tools.freeze.workloads import Workload

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_model_len": 256,
    "max_running_requests": 4,
    "max_batched_tokens": 96,
    "page_size": 16,
    "kv_pages": 80,
    "host_cache_gib": 0,
    "spec": "off",
    "cpu_threads": 1,
    "log_level": "error",
}
MAX_STEPS = 4000
WIPED_STEP = 135
MAX_PROMPT = 200  # tokens of a conversation, after which no turn follows
SYSTEMS = (
    "You help customers of a small coffee shop. Be short, polite and precise, and ask when something is unclear.",
    "You book tables and tickets. You need a name, a date, a time and a number of people before you book anything.",
)
WORDS = "please order book a table for two four people coffee milk tickets tonight at seven eight the film play"


@dataclass
class Conversation:
    """Requests that follow each other, each with the reply to the one before in its prompt."""

    number: int
    tokens: list[int]
    tenant: bytes
    turns_left: int


class Drive:
    """An engine, its conversations, and its log."""

    def __init__(self, workload: Workload, llm: LLM, clock: VirtualClock, store: Path) -> None:
        self._workload = workload
        self._llm = llm
        self._store = store
        self._random = Random(workload.name)
        self._encoder = Encoder()
        self._engine = names.engine_of(llm)
        device = VirtualDevice(names.executor_of(self._engine), clock, workload.weather, self._log)
        names.replace_executor(self._engine, device)
        if workload.starts_early:
            names.start_before_loads(self._engine)
        self._live: dict[int, Conversation] = {}
        self._replies: dict[int, list[int]] = {}
        self._waiting: list[tuple[int, Conversation]] = []  # the step before which its next turn comes
        self._num_requests = 0
        self.lines: list[str] = []

    def run(self) -> list[str]:
        """Returns the lines."""
        self._open_conversations()
        for step in range(MAX_STEPS):
            if not (self._waiting or self._engine.has_work):
                return self.lines
            self._happen(step)
            report = self._engine.step()
            if report is not None:
                self.lines += self._encoder.report(report)
                self._take(report, step)
        raise AssertionError(f"{self._workload.name!r} does not end within {MAX_STEPS} steps")

    def _log(self, kind: str, entry: Any) -> None:
        self.lines += self._encoder.plan(entry) if kind == "plan" else self._encoder.result(entry)

    def _open_conversations(self) -> None:
        step = 0
        for number in range(self._workload.conversations):
            tenant = b"" if self._workload.tenants == 1 else b"tenant %d" % (number % self._workload.tenants)
            text = SYSTEMS[number // 2 % len(SYSTEMS)] * (1 + number % 2)
            tokens = names.tokens_of(self._llm, text)
            conversation = Conversation(number, tokens, tenant, self._workload.turns)
            self._waiting.append((step, conversation))
            step += self._random.randrange(2 * self._workload.gap + 1)

    def _happen(self, step: int) -> None:
        due = [conversation for when, conversation in self._waiting if when <= step]
        self._waiting = [each for each in self._waiting if each[0] > step]
        for conversation in due:
            self._ask(conversation)
        if self._random.random() < self._workload.aborts and self._live:
            uid = self._random.choice(sorted(self._live))
            self.lines.append(f"abort {uid}")
            self._engine.abort([uid])
        if (tiers := self._workload.flushes.get(step)) is not None:
            self.lines.append(f"flush {' '.join(tiers)}: {self._engine.flush(tiers)} pages")
        if self._workload.is_wiped and step == WIPED_STEP:
            for path in sorted(self._store.rglob("*")):
                if path.is_file():
                    path.unlink()

    def _ask(self, conversation: Conversation) -> None:
        words = " ".join(self._random.choices(WORDS.split(), k=self._random.randrange(3, 24)))
        conversation.tokens += names.tokens_of(self._llm, f" User: {words}. Assistant:")
        conversation.turns_left -= 1
        kind = dict(self._workload.kinds[conversation.number % len(self._workload.kinds)])
        spec = kind.pop("spec", None)
        tokens = np.array(conversation.tokens, dtype=np.int32)
        for choice in range(self._workload.choices):
            self._num_requests += 1
            sampling = SamplingParams(
                seed=conversation.number,
                max_tokens=self._random.randrange(8, self._workload.num_new + 1),
                ignore_eos=conversation.number % 3 == 0,
                spec=None if spec is None else SpecParams(**spec),
                **{"min_tokens": 0} | kind,
            )
            priority = conversation.number % 3 if conversation.tenant else 0
            admit = names.admission(self._num_requests, tokens.size, sampling, conversation.tenant, choice, priority)
            self._replies[self._num_requests] = []
            if not choice:
                self._live[self._num_requests] = conversation
            self._engine.add(admit, tokens)

    def _take(self, report: Any, step: int) -> None:
        """Lets a conversation go on some steps after its reply has ended."""
        at = 0
        tokens = value(report, names.REPORT, "tokens")
        columns = [value(report, names.REPORT, key) for key in ("requests", "counts", "ends")]
        for uid, count, end in zip(*columns, strict=True):
            self._replies[uid] += tokens[at : at + count].tolist()
            at += count
            if end and uid in self._live:
                self._end(uid, step)
        for uid, _, _ in value(report, names.REPORT, "failed"):
            if uid in self._live:
                self._end(uid, step)

    def _end(self, uid: int, step: int) -> None:
        conversation = self._live.pop(uid)
        conversation.tokens += self._replies[uid]
        if conversation.turns_left and len(conversation.tokens) < MAX_PROMPT:
            self._waiting.append((step + 1 + self._random.randrange(self._workload.pause), conversation))


def run(workload: Workload, clock: VirtualClock) -> list[str]:
    """Returns the plans and results of an engine with a workload, as lines of text."""
    clock.restart()
    folder = Path(tempfile.mkdtemp(prefix="freeze-"))
    settings = SETTINGS | workload.settings
    if "store" in settings:
        settings["store"] += str(folder)
    try:
        with LLM(in_process=True, **settings) as llm:
            return Drive(workload, llm, clock, folder).run()
    finally:
        shutil.rmtree(folder)
