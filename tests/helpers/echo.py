"""An executor whose KV cache stores token ids, read back through the page table.

Any page bug becomes a wrong token: the next token is a function of the whole context as the
pages tell it, so a page that was handed out twice, evicted too early or mapped wrongly
changes what is generated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hiserve.core.plan import BatchPlan, Scores, StepFault, StepResult
from hiserve.core.request import SamplingParams
from hiserve.core.transfers import CopyAck, StoreEnds
from tests.helpers.echo_host import EchoHost
from tests.helpers.echo_states import EchoStates

VOCAB = 211
POISON = -7


def next_token(context: np.ndarray) -> int:
    """The oracle: the token that follows a context."""
    return zlib.crc32(np.ascontiguousarray(context, dtype=np.int32).tobytes()) % VOCAB


def oracle(prompt: np.ndarray, count: int) -> list[int]:
    context = prompt.astype(np.int32)
    for _ in range(count):
        context = np.append(context, np.int32(next_token(context)))
    return context[prompt.size :].tolist()


def score(context: np.ndarray, tokens: list[int], num_top: int) -> Scores:
    """The scores of tokens that follow a context one by one: a function of all that stands before each."""
    logprobs, top = [], []
    for token in tokens:
        context = np.append(context, np.int32(token))
        hashed = zlib.crc32(np.ascontiguousarray(context, dtype=np.int32).tobytes())
        logprobs.append(-(hashed % 9973) / 1000)
        top.append([(hashed + 17 * k) % VOCAB for k in range(num_top)])
    likeliest = np.array(top, dtype=np.int32).reshape(len(tokens), num_top)
    own = np.array(logprobs, dtype=np.float32)
    return Scores(own, likeliest, own[:, None] - likeliest.astype(np.float32) / 7)


def oracle_scores(prompt: np.ndarray, out: list[int], sampling: SamplingParams) -> bytes:
    """All that is ever reported of a request's scores."""
    packed = b""
    if sampling.prompt_logprobs is not None:
        scores = score(prompt[:1], prompt[1:].tolist(), sampling.prompt_logprobs)
        packed += scores.pack(0, sampling.prompt_logprobs, prompt.size - 1)
    if sampling.logprobs is not None:
        packed += score(prompt, out, sampling.logprobs).pack(0, sampling.logprobs, len(out))
    return packed


class _ScoreSheet:
    """The scores of a step as a device hands them over: every row as wide as the widest, garbage where nobody asks."""

    def __init__(self, num_top: int | None) -> None:
        self._num_top = num_top
        self._parts: list[Scores] = []

    def add(self, context: np.ndarray, tokens: list[int]) -> None:
        if self._num_top is not None:
            self._parts.append(score(context, tokens, self._num_top))

    def skip(self, count: int) -> None:
        self.add(np.array([POISON], dtype=np.int32), [POISON] * count)

    def done(self) -> Scores | None:
        if self._num_top is None:
            return None
        columns = [(part.logprobs, part.top_tokens, part.top_logprobs) for part in self._parts]
        return Scores(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _most(wanted: list[int | None]) -> int | None:
    return max((num_top for num_top in wanted if num_top is not None), default=None)


class EchoExecutor:
    """Keeps rows and a pool as the device would, in numpy; drafts are sometimes right.

    Args:
        threaded: Runs steps in a thread, not inside ``submit``.
        defer_rate: Share of the steps that are refused, as the gate may.
        fault_rate: Share of the steps that are given up half done, as if memory had run out.

    Attributes:
        host: Another tier, if there is one.
        states: Of the rows, if the model has any.
        num_deferred: Steps that were refused.
        runs_out: Says of a plan whether its step is given up, too.
        given_up: Plans whose step was.
        num_resumed: Admissions that go on in the middle of a prompt whose scores are wanted.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_len: int,
        threaded: bool = False,
        defer_rate: float = 0.0,
        fault_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.runs_out: Callable[[BatchPlan], bool] = lambda plan: False
        self.given_up: list[BatchPlan] = []
        self._fault_rate = fault_rate
        self.page_size = page_size
        self.pool = np.full(num_pages * page_size, POISON, dtype=np.int64)
        self.table = np.zeros((max_rows + 1, -(-max_len // page_size) + 1), dtype=np.int32)
        self.entry_owner = np.full_like(self.table, -1)
        self.page_owner = np.full(num_pages, -2, dtype=np.int32)
        self.tokens = np.zeros((max_rows + 1, max_len + 8), dtype=np.int32)
        self.known = np.zeros(max_rows + 1, dtype=np.int64)
        self.computed = np.zeros(max_rows + 1, dtype=np.int64)
        self.rng = np.random.default_rng(seed)
        self.sampling = [SamplingParams()] * (max_rows + 1)
        self.num_prompt = np.zeros(max_rows + 1, dtype=np.int64)
        self.num_resumed = 0
        self.num_accepted = 0
        self.num_drafted = 0
        self.stale_rows: set[int] = set()
        self.host: EchoHost | None = None
        self.states: EchoStates | None = None
        self.num_deferred = 0
        self._defer_rate = defer_rate
        self._thread = ThreadPoolExecutor(1) if threaded else None

    def submit(self, plan: BatchPlan) -> Future[StepResult]:
        if self._thread is not None:
            return self._thread.submit(self._run, plan)
        done: Future[StepResult] = Future()
        done.set_result(self._run(plan))
        return done

    def store_stats(self) -> None:
        return None

    def gate_counts(self) -> dict[str, dict[str, int]]:
        return {}

    def take_found(self) -> list[StoreEnds]:
        return []

    def take_acks(self, wait_s: float = 0.0) -> list[CopyAck]:
        return [] if self.host is None else self.host.poll(must_end=wait_s > 0)

    @property
    def num_ready_host_pages(self) -> int:
        return 0 if self.host is None else self.host.num_pages

    def decision_of(self, step_id: int) -> tuple[str, str]:
        return "eager", "graphs_off"

    def last_decision(self) -> tuple[int, str]:
        return 0, ""

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, plan: BatchPlan) -> StepResult:
        for row in plan.release:
            self.known[row] = self.computed[row] = 0
            self.entry_owner[row] = -1
        for admit in plan.admit:
            self.tokens[admit.row, : admit.tokens.size] = admit.tokens
            self.known[admit.row], self.computed[admit.row] = admit.tokens.size, admit.num_computed
            self.sampling[admit.row], self.num_prompt[admit.row] = admit.sampling, admit.num_prompt
        writes = plan.table
        self.table[writes.rows, writes.indices] = writes.pages
        self.entry_owner[writes.rows, writes.indices] = writes.owners
        self.page_owner[writes.pages] = writes.owners
        if self.states is not None:
            self.states.apply(plan)
        if self.host is not None:
            self.host.start(plan)
            self.host.wait(plan.waits)
        if plan.rows.size and self.rng.random() < self._defer_rate:
            return self._defer(plan)
        if plan.rows.size and (self._is_unlucky(plan) or self.runs_out(plan)):
            return self._give_up(plan)
        admitted = {each.row: each.num_computed for each in plan.admit}
        width = 1 + max([0, *plan.num_draft.tolist()])
        sampling = [self.sampling[row] for row in plan.rows.tolist()]
        scores = _ScoreSheet(
            _most([each.logprobs for each, samples in zip(sampling, plan.samples, strict=True) if samples])
        )
        scored = plan.num_scored.tolist()
        prompt_scores = _ScoreSheet(
            _most([each.prompt_logprobs for each, num in zip(sampling, scored, strict=True) if num])
        )
        counts, tokens, faults = [], [], []
        for i, row in enumerate(plan.rows.tolist()):
            start = int(self.computed[row])
            planned = self.entry_owner[row, : -(-int(plan.max_len[i]) // self.page_size)]
            assert self.known[row] == 0 or (planned >= 0).all(), (
                f"row {row} has not the pages for {plan.max_len[i]} tokens"
            )
            emitted = self._row(row, int(plan.num_new[i]), int(plan.num_draft[i]), bool(plan.samples[i]))
            if emitted is None:
                faults.append(row)
                emitted = []
                prompt_scores.skip(scored[i])
            else:
                self._score_prompt(row, start, scored[i], prompt_scores)
            if scored[i] and start and start == admitted.get(row):
                self.num_resumed += 1
            if plan.samples[i]:
                counts.append(len(emitted))
                tokens.append(emitted + [POISON] * (width - len(emitted)))
                scores.add(self.tokens[row, : self.known[row] - len(emitted)], emitted)
                scores.skip(width - len(emitted))
        return StepResult(
            step_id=plan.step_id,
            counts=np.array(counts, dtype=np.int32),
            tokens=np.array(tokens, dtype=np.int32).reshape(-1, width),
            scores=scores.done(),
            prompt_scores=prompt_scores.done(),
            faults=np.array(faults, dtype=np.int32),
        )

    def _defer(self, plan: BatchPlan) -> StepResult:
        """Refuses a step; what is planned on top of it fails too."""
        self.num_deferred += 1
        self.known[plan.rows] = self.computed[plan.rows] = 0
        self.entry_owner[plan.rows] = -1
        nothing = np.empty(0, dtype=np.int32)
        return StepResult(plan.step_id, counts=nothing, tokens=nothing[:, None], deferred="chance")

    def _is_unlucky(self, plan: BatchPlan) -> bool:
        """Whether a step fails by chance; the smallest does not do so again and again."""
        is_spared = plan.num_tokens == 1 and any(each.step_id > plan.step_id - 4 for each in self.given_up)
        return self.rng.random() < self._fault_rate and not is_spared

    def _give_up(self, plan: BatchPlan) -> StepResult:
        """Leaves a step half done: what it would store is garbage, and what is planned on top of it fails."""
        self.given_up.append(plan)
        if self.states is not None:
            self.states.spoil(plan.rows.tolist())
        for row, end in zip(plan.rows.tolist(), plan.max_len.tolist(), strict=True):
            places = np.arange(int(self.computed[row]), min(end, int(self.known[row])))
            pages, owners = self.table[row, places // self.page_size], self.entry_owner[row, places // self.page_size]
            own = (self.page_owner[pages] == owners).nonzero()[0]
            self.pool[pages[own].astype(np.int64) * self.page_size + places[own] % self.page_size] = POISON
        self.known[plan.rows] = self.computed[plan.rows] = 0
        self.entry_owner[plan.rows] = -1
        return self.given_up_of(plan)

    @staticmethod
    def given_up_of(plan: BatchPlan, *, was_replay: bool = False) -> StepResult:
        """The result of a step for which memory ran out."""
        nothing = np.empty(0, dtype=np.int32)
        fault = StepFault("out_of_memory", "no memory for it", was_replay)
        return StepResult(plan.step_id, counts=nothing, tokens=nothing[:, None], fault=fault)

    def _score_prompt(self, row: int, start: int, num_scored: int, sheet: _ScoreSheet) -> None:
        """Scores what follows the first new tokens; the pages tell what stands before them."""
        end = start + num_scored
        if self.sampling[row].prompt_logprobs is None:
            assert num_scored == 0, f"row {row} wants no scores of its prompt"
        if num_scored:
            assert end < self.num_prompt[row], f"row {row} has a prompt of {self.num_prompt[row]}, {end} are scored"
            sheet.add(self._read(row, start + 1), self.tokens[row, start + 1 : end + 1].tolist())

    def _read(self, row: int, end: int) -> np.ndarray:
        """The row's first tokens, as its pages tell them."""
        places = np.arange(end)
        pages = self.table[row, places // self.page_size].astype(np.int64)
        return self.pool[pages * self.page_size + places % self.page_size]

    def _row(self, row: int, num_new: int, num_draft: int, samples: bool) -> list[int] | None:
        start = int(self.computed[row])
        end = start + num_new
        pages = -(-end // self.page_size)
        held = self.table[row, :pages]
        is_forgotten = self.known[row] == 0  # it failed in a step before this one
        if row in self.stale_rows or is_forgotten or (self.page_owner[held] != self.entry_owner[row, :pages]).any():
            self.stale_rows.discard(row)
            self.known[row] = self.computed[row] = 0
            self.entry_owner[row] = -1
            return None
        assert (held > 0).all(), f"row {row} would touch the sink"
        context_end = end - num_draft
        inputs = self.tokens[row, start:context_end].tolist()
        truth: list[int] = []
        context = self.tokens[row, :context_end]
        for _ in range(num_draft):
            truth.append(next_token(np.append(context, np.array(truth, dtype=np.int32))))
        drafts = [t if self.rng.random() < 0.7 else (t + 1) % VOCAB for t in truth]
        slots = held[np.arange(start, end) // self.page_size].astype(np.int64) * self.page_size
        self.pool[slots + np.arange(start, end) % self.page_size] = inputs + drafts
        if self.states is not None:
            self.states.step(row, self._read(row, context_end))
        if not samples:
            self.computed[row] = end
            return []
        assert context_end == self.known[row], f"row {row} samples at {context_end} but knows {self.known[row]}"
        read = self._read(row, end)
        emitted: list[int] = []
        for j in range(num_draft + 1):
            emitted.append(next_token(read[: context_end + j]))
            if j < num_draft and drafts[j] != emitted[-1]:
                break
        self.num_drafted += num_draft
        self.num_accepted += len(emitted) - 1
        self.tokens[row, context_end : context_end + len(emitted)] = emitted
        self.known[row] += len(emitted)
        self.computed[row] = context_end + len(emitted) - 1
        return emitted
